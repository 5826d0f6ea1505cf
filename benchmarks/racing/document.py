"""Write docs/race-results.md and its plot from the cells of a race."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import ABSENT, OURS
from benchmarks.racing import tables
from benchmarks.racing.results import Cell
from benchmarks.racing.summary import PLAN, memory_errors, prediction_errors, ratio
from hap.files import write_whole
from hap.units import format_seconds

PAGE, PLOT = "race-results.md", "race.png"

INTRODUCTION = """\
# Results of the race

These commands write this page:

    {command}
    python -m benchmarks.race --write-docs

**Most of the advantage over the best contender comes from leaving slow devices out.** Plans do so in
{left_out} of {cells} cells; the contenders on this page always use all devices. A separate check of ten
cells raced plans against the choices that a person would try first (three or four rounds, 32 rows; no
command in this repository repeats it yet). Plans were 1.12x as fast as the best manual choice in the
geometric mean:

| cell | plan | one fast device, plain eager | DDP on the fast devices |
|---|---|---|---|
| vit on `4411` | 1.27 s | 1.43x | 1.23x |
| bert, gpt2, vgg19, bert_moe on `4411` | 1.75, 1.94, 1.28, 1.59 s | 1.38, 1.41, 1.59, 1.23x | 1.13, 1.12, 1.37, 1.17x |
| wide_mlp on `4411` | 0.74 s | 1.64x | 1.99x |
| vit, bert, vgg19 on `two_sites` | 1.52, 2.12, 1.50 s | 1.49, 1.65, 1.63x | **0.96, 0.91, 0.96x** |
| vit on `paper` | 2.5 s | **0.91 to 0.96x** | 2.18x |

A figure below 1x is a defeat, for two reasons: the planner that was raced tried no smaller number of equal
devices, and DDP's reducer overlaps better than this runtime.

**Predictions differ from one profile to the next.** The original HAP's plan for gpt2 on `straggler` was
predicted +4.6, +25.2 and -5.7 % off by three profiles; two profiles of a rank with a small fraction of a
core differ by up to 20 %. The errors below are of one profile per cluster.

The page has {cells} of the 36 cells, with {counted} counted rounds each. Clusters were raced on different
days and by different code, as [stated below](#predictions). [The log](LOG.md) describes the limits of these
runs, and [the race](race.md) the contenders, the procedure and the columns.
`benchmarks/data/race.jsonl` holds every step.

{summary}

![Median step of each contender over ours]({plot})
"""

STEPS = """\
## Steps on {cluster}

Median step, and the median ratio to our step in the same round.

{table}
"""

PREDICTIONS = """\
## Predictions

*Step* and *memory*: predicted over measured, less one, of the step and of the peak memory of the fullest
rank. *Machine*: duration of the probes before a round relative to the profile; and, where the testbed held
devices at their speed, the ranks' share of a core relative to the profile.

{clusters}

{table}
"""


def write(folder: Path, cells: Sequence[Cell]) -> None:
    """Write the page and the plot into ``folder``."""
    write_whole(folder / PAGE, [document(cells)])
    tables.plot(folder / PLOT, cells)


def document(cells: Sequence[Cell]) -> str:
    """Return the page as Markdown."""
    rounds = [len(e.seconds) for cell in cells for e in cell.entries if e.counts]
    counted = " to ".join(map(str, sorted({min(rounds), max(rounds)})))
    parts = [
        INTRODUCTION.format(
            cells=len(cells), command=_command(cells), counted=counted, left_out=_leaving(cells),
            summary=tables.summary_text(cells), plot=PLOT,
        )
    ]  # fmt: skip
    for cluster in dict.fromkeys(cell.cluster for cell in cells):
        here = [cell for cell in cells if cell.cluster == cluster]
        parts.append(STEPS.format(cluster=f"`{cluster}`", table=_steps(here)))
    parts.append(PREDICTIONS.format(clusters=_clusters(cells), table=_predictions(cells)))
    return "\n".join(parts)


def _leaving(cells: Sequence[Cell]) -> int:
    """Return the number of cells whose plan leaves devices out."""
    ours = [cell.entry(OURS) for cell in cells]
    return sum(entry is not None and entry.note.startswith("without") for entry in ours)


def _command(cells: Sequence[Cell]) -> str:
    """Return the command with the most frequent options of the cells."""
    return f"python -m benchmarks.race {statistics.mode(cell.options for cell in cells)}".strip()


def _steps(cells: Sequence[Cell]) -> str:
    """Return a table, contenders by models, and the reasons of void entries."""
    entries = [(cell, entry) for cell in cells for entry in cell.entries]
    names = dict.fromkeys([OURS, *(e.name for _, e in entries if not e.name.startswith(PLAN))])
    rows = [[name, *(_step(cell, name) for cell in cells)] for name in names if name not in ABSENT]
    void = [
        f"- {entry.name} for {cell.model} is void: {entry.void}"
        for cell, entry in entries if entry.void and entry.name not in ABSENT
    ]  # fmt: skip
    return "\n".join([_table(["contender", *(cell.model for cell in cells)], rows), "", *void])


def _step(cell: Cell, name: str) -> str:
    entry, ours = cell.entry(name), cell.entry(OURS)
    if entry is None:
        return "void"
    text = format_seconds(entry.median_s)
    return text if ours is None or name == OURS else f"{text}, {ratio(entry, ours):.2f}x"


def _clusters(cells: Sequence[Cell]) -> str:
    """Return a table of the errors of predicted steps, per cluster."""
    rows = []
    for cluster in dict.fromkeys(cell.cluster for cell in cells):
        here = [cell for cell in cells if cell.cluster == cluster]
        off = [abs(error) for cell in here for error in prediction_errors(cell).values()]
        if off:
            rows.append([
                f"`{cluster}`", str(len(off)), f"{statistics.median(off):.1%}", f"{max(off):.1%}",
                ", ".join(dict.fromkeys(cell.code or "unknown" for cell in here)),
            ])  # fmt: skip
    return _table(["cluster", "plans", "step off by, median", "at worst", "raced by"], rows)


def _predictions(cells: Sequence[Cell]) -> str:
    rows = []
    for cell in cells:
        steps, peaks = prediction_errors(cell), memory_errors(cell)
        for name, error in steps.items():
            entry = cell.entry(name)
            assert entry is not None
            rows.append([
                f"{cell.model} on {cell.cluster}", name, format_seconds(entry.predicted_s),
                format_seconds(entry.median_s), f"{error:+.1%}",
                f"{peaks[name]:+.1%}" if name in peaks else "",
                ", ".join(f"{statistics.median(v):.2f}" for v in (cell.drift, cell.pace) if v),
                entry.note,
            ])  # fmt: skip
    return _table(["cell", "plan", "predicted", "measured", "step", "memory", "machine", ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
