"""Write docs/race-results.md and its plot from the cells of a race."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import ABSENT, OURS, OURS_HALF, OURS_STAGED
from benchmarks.racing import tables
from benchmarks.racing.agenda import AGENDA, Slot
from benchmarks.racing.results import Cell
from benchmarks.racing.summary import PLAN, best_by_hand, memory_errors, prediction_errors, ratio
from hap.files import write_whole
from hap.units import format_seconds

PAGE, PLOT = "race-results.md", "race.png"

INTRODUCTION = """\
# Results of the race

These commands write this page:

    {command}
    python -m benchmarks.race --write-docs

Commit {code} raced all {cells} cells in one go of {minutes:.0f} minutes{pauses}. [Earlier
starts](race.md#earlier-starts) of the race are described apart. {absent}[The race](race.md) describes the contenders, the procedure and the columns,
and `benchmarks/data/race.jsonl` holds every step.

*Best by hand* is the fastest contender that no plan runs, whose losses are right and that fits the memory:
DDP, ZeRO, FSDP2, tensor parallelism and pipelines on all devices and on the fast ones, and the fastest
device alone. Plans leave devices out in {left_out} of {firsts} cells.

{summary}

![Median step of each contender over ours]({plot})

{same}
{again}
{kept}
"""

SAME = """\
## The same program twice

In {cells} cells `ours` and another plan of ours have the same prediction, so they run the same program in
tensors of their own. Their steps in the same rounds differ by {median:.1%} in the median and by {worst:.1%} at
worst. Read a figure of one cell with this in mind.
"""

AGAIN = """\
## The same cell again

Each run has its own profile and its own plan.

{table}
"""

LEFT_OUT = """\
## Devices that plans leave out

*All devices*: the predicted step of the best program that uses all of them, over the plan's.

{table}
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
    """Write the page and the plot into ``folder``.

    Raises:
        ValueError: the cells are of several commits, or of one with changes.
    """
    codes = sorted({cell.code for cell in cells})
    if len(codes) > 1 or not codes[0] or codes[0].endswith("+"):
        raise ValueError(f"the cells were raced by {', '.join(c or 'unknown code' for c in codes)}")
    write_whole(folder / PAGE, [document(cells)])
    tables.plot(folder / PLOT, cells)


def document(cells: Sequence[Cell]) -> str:
    """Return the page as Markdown."""
    first = [cell for cell in cells if cell.run == 1]
    starts = {cell.begun for cell in cells}
    parts = [
        INTRODUCTION.format(
            cells=len(cells), command=_command(cells), code=cells[0].code, firsts=len(first),
            minutes=sum(cell.took_s for cell in cells) / 60,
            pauses=f" with {len(starts) - 1} interruptions" if len(starts) > 1 else "",
            absent=_absent(cells), left_out=len(_left_out(first)), plot=PLOT,
            summary=tables.summary_text(cells), same=_same(cells),
            again=_again(cells), kept=_kept(first),
        )
    ]  # fmt: skip
    for cluster in dict.fromkeys(cell.cluster for cell in first):
        here = [cell for cell in first if cell.cluster == cluster]
        parts.append(STEPS.format(cluster=f"`{cluster}`", table=_steps(here)))
    parts.append(PREDICTIONS.format(clusters=_clusters(cells), table=_predictions(cells)))
    return "\n".join(parts)


def _absent(cells: Sequence[Cell]) -> str:
    """Return a sentence on the cells of the agenda that there was no time for."""
    missing = [slot for slot in AGENDA if slot not in {cell.slot for cell in cells}]
    again = [slot for slot in missing if slot.run > 1]
    if not missing:
        return ""
    runs = f", {len(again)} of them repeated runs" if again else ""
    return f"There was no time for {len(missing)} more cells of the agenda{runs}. "


def _same(cells: Sequence[Cell]) -> str:
    """Return the section on plans that were raced twice in a cell."""
    apart, where = [], set()
    for cell in cells:
        ours = cell.entry(OURS)
        for other in (cell.entry(name) for name in (OURS_STAGED, OURS_HALF)):
            if ours and other and other.predicted_s == ours.predicted_s:
                apart.append(abs(ratio(other, ours) - 1))
                where.add(cell.slot)
    if not apart:
        return ""
    return SAME.format(cells=len(where), median=statistics.median(apart), worst=max(apart))


def _again(cells: Sequence[Cell]) -> str:
    """Return the section on cells that were raced several times."""
    runs: dict[Slot, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(cell.slot._replace(run=1), []).append(cell)
    rows = []
    for slot, same in runs.items():
        if len(same) < 2:
            continue
        found = [(c, c.entry(OURS), best_by_hand(c)) for c in same]
        pairs = [(c, ours, best) for c, ours, best in found if ours and best]
        ratios = [ratio(best, ours) for _, ours, best in pairs]
        rows.append([
            str(slot), ", ".join(format_seconds(ours.median_s) for _, ours, _ in pairs),
            ", ".join(f"{r:.2f}x" for r in ratios), f"{max(ratios) / min(ratios) - 1:.1%}",
            ", ".join(f"{prediction_errors(c)[OURS]:+.1%}" for c, _, _ in pairs),
        ])  # fmt: skip
    if not rows:
        return ""
    head = ["cell", "ours", "over the best by hand", "spread", "predicted step off by"]
    return AGAIN.format(table=_table(head, rows))


def _left_out(cells: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """Return the cells whose plan leaves devices out, with the note that says which."""
    entries = [(cell, cell.entry(OURS)) for cell in cells]
    return [(c, e.note) for c, e in entries if e is not None and e.note.startswith("without")]


def _kept(cells: Sequence[Cell]) -> str:
    """Return the section on devices that are left out."""
    found = [(cell, note.partition("; ")) for cell, note in _left_out(cells)]
    rows = [
        [str(cell.slot), which.removeprefix("without "), cost.rpartition(" ")[2]]
        for cell, (which, _, cost) in found
    ]
    return LEFT_OUT.format(table=_table(["cell", "left out", "all devices"], rows)) if rows else ""


def _command(cells: Sequence[Cell]) -> str:
    """Return the command with the most frequent options of the cells."""
    return f"python -m benchmarks.race {statistics.mode(cell.options for cell in cells)}".strip()


def _steps(cells: Sequence[Cell]) -> str:
    """Return a table, contenders by models, and the reasons of void entries."""
    entries = [(cell, entry) for cell in cells for entry in cell.entries]
    names = dict.fromkeys([OURS, *(e.name for _, e in entries if not e.name.startswith(PLAN))])
    rows = [[name, *(_step(cell, name) for cell in cells)] for name in names if name not in ABSENT]
    void = [
        f"- {entry.name} for {cell.model}{cell.slot.variant} is void: {entry.void}"
        for cell, entry in entries if entry.void and entry.name not in ABSENT
    ]  # fmt: skip
    return "\n".join(
        [_table(["contender", *(c.model + c.slot.variant for c in cells)], rows), "", *void]
    )


def _step(cell: Cell, name: str) -> str:
    entry, ours = cell.entry(name), cell.entry(OURS)
    if entry is None:
        return tables.missing(next((e for e in cell.entries if e.name == name), None))
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
                str(cell.slot), name, format_seconds(entry.predicted_s),
                format_seconds(entry.median_s), f"{error:+.1%}",
                f"{peaks[name]:+.1%}" if name in peaks else "",
                ", ".join(f"{statistics.median(v):.2f}" for v in (cell.drift, cell.pace) if v),
                entry.note,
            ])  # fmt: skip
    return _table(["cell", "plan", "predicted", "measured", "step", "memory", "machine", ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
