"""Tables, plot and page of :mod:`benchmarks.paper_cluster`, from its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hap.units import format_bytes, format_seconds

Results = Mapping[str, Any]
"""``model/cluster`` -> {"rows": [...]}, as :func:`benchmarks.paper_cluster.cell` makes them."""

Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Cluster -> name -> row, of one model."""

PLAN, EVERYONE, BASE = "the plan", "the plan, all devices", "data parallel, proportional"
KEPT = "DP-CP on the kept devices"
STAGED = "the plan with stages"
PIPELINE = "3D, even"

CLAIMS = {"vgg19": 8.8, "vit": 1.0, "bert": 1.08, "bert_untied": 1.08, "bert_moe": 1.75}
"""The original's plans over DP-CP on 8 GPUs, by its own cost model with bytes counted right."""

CONSTANTS = "8-constants"
TITLES = {"29": "29, irregular", CONSTANTS: "8, the paper's constants"}

SIZES = ("8", "16", "29", "32", "64")
_ORDER = (*SIZES, CONSTANTS)

_BOUNDS = ("lower bound, any shares", "lower bound, its shares")

_HIDDEN = ("all devices", "the fastest device alone", "without stages")
"""Starts of rows of the comparison that the tables omit: shown elsewhere, or useless for training."""

COARSE = (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
FINE = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5, 1.75, 2)

FLOOR = 0.45
"""Lower end of the plot; slower methods are irrelevant."""

_STYLES = {
    PLAN: ("silver", "o", "-"),
    STAGED: ("gold", "s", "-"),
    EVERYONE: ("black", "o", ":"),
    "HAP 2024": ("tab:red", "s", "-"),
    "data parallel, even": ("tab:blue", "v", "-"),
    "ZeRO-2, proportional": ("tab:cyan", "^", "-"),
    "ZeRO-3 (FSDP), proportional": ("tab:green", "D", "-"),
    "tensor parallel, even": ("tab:purple", "P", "-"),
    "expert parallel, even": ("tab:orange", "X", "-"),
}
"""Method -> colour, marker and line in the plot."""


def tables(done: Results) -> str:
    """Return a Markdown table per model, methods by clusters: seconds, and times DP-CP."""
    return "".join(_table(model, _of_model(done, model)) for model in CLAIMS)


def _of_model(done: Results, model: str) -> Cells:
    found = {}
    for key, value in done.items():
        name, _, cluster = key.partition("/")
        if name == model:
            found[cluster] = {row["name"]: row for row in value["rows"]}
    return dict(sorted(found.items(), key=lambda entry: _ORDER.index(entry[0])))


def _table(model: str, cells: Cells) -> str:
    if not cells:
        return ""
    seen = dict.fromkeys(name for rows in cells.values() for name in rows)
    own = (STAGED, EVERYONE, KEPT)
    shown = [name for name in seen if not name.startswith(_HIDDEN)]
    others = [name for name in shown if name not in (PLAN, *own)]
    body = [[PLAN, *(_cell(rows, PLAN) for rows in cells.values())]]
    for k, title in enumerate(_BOUNDS):
        body.append([title, *(_bound(rows.get(PLAN), k) for rows in cells.values())])
    body.append(["lower bound, stages", *(_bound(rows.get(STAGED), -1) for rows in cells.values())])
    for name in [*(n for n in own if n in seen), *others]:
        body.append([name, *(_cell(rows, name) for rows in cells.values())])
    return markdown([f"**{model}**, GPUs", *(TITLES.get(c, c) for c in cells)], body)


def _cell(rows: Mapping[str, Any], name: str) -> str:
    row, base = rows.get(name), rows.get(BASE)
    if row is None or not row["step_s"]:
        return "-"
    ratio = f" ({base['step_s'] / row['step_s']:.2f}x)" if base and base["step_s"] else ""
    notes = [f"without {row['left_out']}"] if row.get("left_out") else []
    notes += ["two axes"] if row.get("two_axes") else []
    if groups := row.get("stages"):
        notes.append(f"{len(groups)} stages, {row['microbatches']} microbatches")
        notes.append(f"busiest {row['busiest']:.0%}")
    notes += [f"lacks {format_bytes(row['lacking_bytes'])}"] if row["lacking_bytes"] else []
    return ", ".join([f"{format_seconds(row['step_s'])}{ratio}", *notes])


def _bound(row: Mapping[str, Any] | None, k: int) -> str:
    if row is None or not row["bounds"]:
        return "-"
    bound = row["bounds"][k]
    return f"{format_seconds(bound['step_s'])}, gap {bound['gap']:.1%}"


def plans(done: Results) -> str:
    """Return a table of each plan's devices, axes, computing, and time by kind of collective."""
    body = []
    for model in CLAIMS:
        for cluster, rows in _of_model(done, model).items():
            plan, base = rows.get(PLAN), rows.get(BASE)
            if plan is None or base is None:
                continue
            body.append([
                model, TITLES.get(cluster, cluster), _spent(base), _spent(plan),
                str(plan["left_out"] or "-"), "two" if plan["two_axes"] else "one",
                _over_best(rows, PLAN), _over_best(rows, STAGED), _kinds(plan),
            ])  # fmt: skip
    if not body:
        return ""
    head = ["", "GPUs", "DP-CP: computing + communicating", "the plan", "left out", "axes",
            "over the best row that fits", "with stages, over it", "the plan's collectives"]  # fmt: skip
    return markdown(head, body)


def _spent(row: Mapping[str, Any]) -> str:
    computing = row["step_s"] - row["communicate_s"]
    return f"{format_seconds(computing)} + {format_seconds(row['communicate_s'])}"


def _over_best(rows: Mapping[str, Any], plan: str) -> str:
    """Return the speed-up of a plan over the best method that a user could run instead."""
    found = [
        row for name, row in rows.items()
        if name in _STYLES.keys() - {PLAN, STAGED, EVERYONE} | {BASE, KEPT, PIPELINE}
        and row["step_s"] and not row["lacking_bytes"]
    ]  # fmt: skip
    if not found:
        return "-"
    best = min(found, key=lambda row: float(row["step_s"]))
    return f"{best['step_s'] / rows[plan]['step_s']:.2f}x ({best['name']})"


def _kinds(plan: Mapping[str, Any]) -> str:
    """Return seconds by kind of collective, the largest first, without those below a percent."""
    total: dict[str, float] = {}
    for c in plan["collectives"]:
        total[c["kind"]] = total.get(c["kind"], 0.0) + c["seconds"]
    large = [(s, kind) for kind, s in total.items() if s >= 0.01 * plan["communicate_s"]]
    shown = [f"{kind.replace('_', '-')} {format_seconds(s)}" for s, kind in sorted(large)[::-1]]
    return ", ".join(shown) or "-"


def markdown(head: list[str], body: list[list[str]]) -> str:
    """Return a table in Markdown, and a blank line after it."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *body)) + "\n"


def plot(done: Results, path: Path) -> None:
    """Plot speed over DP-CP by cluster, a panel per model; equal results give equal files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "hap", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, grid = pyplot.subplots(2, 3, figsize=(11, 6.6))
    *panels, corner = grid.flat
    lines: dict[str, Any] = {}
    for panel, model in zip(panels, CLAIMS, strict=True):
        cells = _of_model(done, model)
        for name, (colour, marker, style) in _STYLES.items():
            points = [
                (at, cells[size][BASE]["step_s"] / cells[size][name]["step_s"])
                for at, size in enumerate(SIZES)
                if _shown(cells.get(size, {}), name)
            ]
            points = [(at, speed) for at, speed in points if speed >= FLOOR]
            if points:
                (lines[name],) = panel.plot(
                    *zip(*points, strict=True), color=colour, marker=marker, ls=style,
                    lw=4 if name == PLAN else 1.1, ms=9 if name == PLAN else 4.5,
                    zorder=1 if name == PLAN else 2, label=name,
                )  # fmt: skip
        panel.axhline(1, color="grey", lw=0.8)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_ylim(bottom=max(panel.get_ylim()[0], FLOOR))
        low, high = panel.get_ylim()
        fine = high < 3 * low
        ticks = [t for t in (FINE if fine else COARSE) if low <= t <= high]
        panel.set_yticks(ticks)
        panel.set_title(model)
        panel.set_xticks(range(len(SIZES)), [TITLES.get(s, s).replace(", ", "\n") for s in SIZES])
        panel.set_xlim(-0.3, len(SIZES) - 0.7)
        panel.grid(alpha=0.3)
    for panel in grid[:, 0]:
        panel.set_ylabel("predicted speed over DP-CP")
    corner.axis("off")
    order = [name for name in _STYLES if name in lines]
    corner.legend([lines[n] for n in order], order, loc="center", frameon=False)
    corner.text(
        0.5,
        0.02,
        f"across: GPUs; shown is what fits\nand is {FLOOR:g}x as fast at least",
        ha="center",
        fontsize=8,
    )
    figure.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


def _shown(rows: Mapping[str, Any], name: str) -> bool:
    row = rows.get(name)
    return BASE in rows and row is not None and row["step_s"] and not row["lacking_bytes"]


def write_document(path: Path, text: str, command: str) -> None:
    """Replace the text between a command's two marks; the rest of the page is written by hand.

    Raises:
        ValueError: the page lacks the marks.
    """
    begin, end = f"<!-- begin: {command} -->\n", f"<!-- end: {command} -->\n"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} lacks the lines {begin.strip()} and {end.strip()}")
    path.write_text(f"{before}{begin}\n{text}{end}{after}")
