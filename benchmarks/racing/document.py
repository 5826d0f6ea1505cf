"""docs/race-results.md and its plot, from the cells of a race."""

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
# What the race has shown

Written by

    {command}
    python -m benchmarks.race --write-docs

{cells} of the 36 cells, {counted} counted rounds each, as they stand: clusters may have been raced on
different days and by different code, which stands [below](#predictions); [the log](LOG.md) tells what
limited the cells. [The race](race.md) says what is raced, how, and how to read this. Every step of it is in
[race.jsonl](../benchmarks/data/race.jsonl).

{summary}

![Median step of each contender over ours]({plot})
"""

STEPS = """\
## Steps on {cluster}

Median step, and how many times as long as ours within a round.

{table}
"""

PREDICTIONS = """\
## Predictions

Predicted over measured, less one: the step, and the peak memory of the fullest rank. *Machine*: how
many times as long what ranks look at before a round took in the cell as when the cluster was profiled;
and, where devices were held at their speed, how many times as much of a core ranks had for it.

{clusters}

{table}
"""


def write(folder: Path, cells: Sequence[Cell]) -> None:
    """The page and the plot."""
    write_whole(folder / PAGE, [document(cells)])
    tables.plot(folder / PLOT, cells)


def document(cells: Sequence[Cell]) -> str:
    """The page, as Markdown."""
    rounds = [len(e.seconds) for cell in cells for e in cell.entries if e.counts]
    counted = " to ".join(map(str, sorted({min(rounds), max(rounds)})))
    parts = [
        INTRODUCTION.format(
            cells=len(cells), command=_command(cells), counted=counted,
            summary=tables.summary_text(cells), plot=PLOT,
        )
    ]  # fmt: skip
    for cluster in dict.fromkeys(cell.cluster for cell in cells):
        here = [cell for cell in cells if cell.cluster == cluster]
        parts.append(STEPS.format(cluster=f"`{cluster}`", table=_steps(here)))
    parts.append(PREDICTIONS.format(clusters=_clusters(cells), table=_predictions(cells)))
    return "\n".join(parts)


def _command(cells: Sequence[Cell]) -> str:
    """That of most cells."""
    return f"python -m benchmarks.race {statistics.mode(cell.options for cell in cells)}".strip()


def _steps(cells: Sequence[Cell]) -> str:
    """Contenders down, models across, and why some are void."""
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
    """How far the predicted steps of each cluster are off."""
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
