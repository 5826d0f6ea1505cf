"""Tables, plot and page of :mod:`benchmarks.paper_cluster`, from its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hap.units import format_bytes, format_seconds

Results = Mapping[str, Any]
"""``model/cluster`` -> {"rows": [...]}, as :func:`benchmarks.paper_cluster.cell` makes them."""

PLAN, EVERYONE, BASE = "the plan", "the plan, all devices", "data parallel, proportional"

CLAIMS = {"vgg19": 8.8, "vit": 1.0, "bert": 1.08, "bert_untied": 1.08, "bert_moe": 1.75}
"""The original's plans over DP-CP on 8 GPUs, by its own cost model with bytes counted right."""

CONSTANTS = "8-constants"
TITLES = {"29": "29, irregular", CONSTANTS: "8, the paper's constants"}
BEGIN = "<!-- begin: python -m benchmarks.paper_cluster --write-docs -->\n"
END = "<!-- end -->\n"


def tables(done: Results) -> str:
    """A Markdown table per model: methods down, clusters across; seconds, and times DP-CP."""
    return "".join(_table(model, _of_model(done, model)) for model in CLAIMS)


def _of_model(done: Results, model: str) -> dict[str, dict[str, Any]]:
    """Cluster -> name -> row, of the cells that are done."""
    found = {}
    for key, value in done.items():
        name, _, cluster = key.partition("/")
        if name == model:
            found[cluster] = {row["name"]: row for row in value["rows"]}
    return dict(sorted(found.items(), key=lambda entry: list(_ORDER).index(entry[0])))


_ORDER = ("8", "16", "32", "64", "29", CONSTANTS)


def _table(model: str, cells: Mapping[str, Mapping[str, Any]]) -> str:
    if not cells:
        return ""
    names = list(dict.fromkeys(name for rows in cells.values() for name in rows))
    head = [f"**{model}**, GPUs", *(TITLES.get(c, c) for c in cells)]
    body = [[name, *(_cell(rows, name) for rows in cells.values())] for name in names]
    return markdown(head, body)


def _cell(rows: Mapping[str, Any], name: str) -> str:
    row, base = rows.get(name), rows.get(BASE)
    if row is None or not row["step_s"]:
        return "-"
    ratio = f" ({base['step_s'] / row['step_s']:.2f}x)" if base and base["step_s"] else ""
    lacks = row["lacking_bytes"]
    short = f", lacks {format_bytes(lacks)}" if lacks else ""
    return f"{format_seconds(row['step_s'])}{ratio}{short}"


def comparison(done: Results) -> str:
    """The plan over DP-CP on 8 GPUs, beside what the original's cost model says of its plans."""
    body = []
    for model, claim in CLAIMS.items():
        for cluster in ("8", CONSTANTS):
            rows = _of_model(done, model).get(cluster, {})
            if PLAN not in rows or BASE not in rows:
                continue
            plan, base, paper = rows[PLAN], rows[BASE], rows.get("HAP 2024")
            body.append([
                model, TITLES.get(cluster, f"{cluster}, catalogue"), f"{claim:.2f}x",
                _times(base, paper), _times(base, plan),
                *(f"{_computing(r)} + {format_seconds(r['communicate_s'])}" for r in (base, plan)),
            ])  # fmt: skip
    if not body:
        return ""
    head = ["8 GPUs", "rates", "the original of itself", "HAP 2024, here", "the plan",
            "DP-CP: computing + communicating", "the plan: computing + communicating"]  # fmt: skip
    return markdown(head, body)


def _times(base: Mapping[str, Any], row: Mapping[str, Any] | None) -> str:
    return f"{base['step_s'] / row['step_s']:.2f}x" if row and row["step_s"] else "-"


def _computing(row: Mapping[str, Any]) -> str:
    return format_seconds(row["step_s"] - row["communicate_s"])


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table in Markdown, and a blank line after it."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *body)) + "\n"


def plot(done: Results, path: Path) -> None:
    """Speed over DP-CP by cluster, a panel per model; the same results give the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hap"
    from matplotlib import pyplot

    models = [model for model in CLAIMS if model != "bert_untied"]  # on one cluster alone
    figure, panels = pyplot.subplots(1, len(models), figsize=(14, 3.6), sharey=False)
    for panel, model in zip(panels, models, strict=True):
        cells = {c: rows for c, rows in _of_model(done, model).items() if c != CONSTANTS}
        names = list(dict.fromkeys(name for rows in cells.values() for name in rows))
        for name in (n for n in names if n != "the fastest device alone"):
            points = [
                (at, rows[BASE]["step_s"] / rows[name]["step_s"])
                for at, rows in enumerate(cells.values())
                if name in rows and rows[name]["step_s"] and rows[BASE]["step_s"]
                and not rows[name]["lacking_bytes"]
            ]  # fmt: skip
            if points:
                width = 2.5 if name == PLAN else 1.0
                panel.plot(*zip(*points, strict=True), marker="o", lw=width, ms=3, label=name)
        panel.set_title(model)
        panel.set_xticks(range(len(cells)), list(cells))
        panel.set_xlabel("GPUs")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("predicted speed over DP-CP")
    entries = {}
    for panel in panels:
        entries.update(
            {label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        )
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_document(path: Path, text: str) -> None:
    """Put the tables between the page's two marks; all else in it is written by hand.

    Raises:
        ValueError: the page lacks the marks.
    """
    page = path.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {BEGIN.strip()} and {END.strip()}")
    path.write_text(f"{before}{begin}\n{text}{end}{after}")
