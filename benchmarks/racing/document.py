"""Write docs/race-results.md and its plot from the cells of a race."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.contenders import ABSENT, CONTENDERS, OURS, OURS_HALF, OURS_STAGED, PLANNED, ROUNDED
from benchmarks.racing import tables
from benchmarks.racing.agenda import AGENDA, Slot
from benchmarks.racing.results import Cell, Entry
from benchmarks.racing.summary import PLAN, best_by_hand, memory_errors, prediction_errors, ratio
from hap.files import write_whole
from hap.units import format_seconds

PAGE, PLOT = "race-results.md", "race.png"

INTRODUCTION = """\
# Results of the race

These commands write this page:

    {command}
    python -m benchmarks.race --write-docs

Commit {code} raced all {cells} cells of this page in one go of {minutes:.0f} minutes{pauses}.
{absent}[Earlier starts](race.md#earlier-starts) of the race are described apart.
[The race](race.md) describes the contenders, the procedure and the columns, and
`benchmarks/data/race.jsonl` holds every step.

{by_hand}

Plans leave devices out in {left_out} of {firsts} cells.

{summary}

![Median step of each contender over ours]({plot})

{same}
{again}
{kept}
"""

BY_HAND = """\
*Best by hand* is the fastest contender that no plan runs, that sums gradients exactly, whose losses are
right and that fits the memory. These contenders by hand ran, in one cell of a cluster or more:

{ran}

{rest}"""

REST = (
    "{void}Without repeated runs there are {unlike} unlike cells. In {seen} of them some contender by hand "
    "has counted rounds; the figures over the best by hand on unlike clusters are of these cells. In the "
    "others all contenders by hand sat out or are void. {worst}"
)

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
            absent=_absent(cells), by_hand=_by_hand(cells), left_out=len(_left_out(first)),
            plot=PLOT,
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
    """Return a sentence on the cells of the agenda that the time limit left out."""
    missing = [slot for slot in AGENDA if slot not in {cell.slot for cell in cells}]
    again = [slot for slot in missing if slot.run > 1]
    if not missing:
        return ""
    runs = f", {len(again)} of them repeated runs" if again else ""
    return (
        f"The race's time limit (`--minutes`, see the [log](LOG.md)) left out {len(missing)} more cells\n"
        f"of the agenda{runs}. "
    )


def _by_hand(cells: Sequence[Cell]) -> str:
    """Return which contenders by hand ran on which cluster, and the cell in which plans are worst."""
    names = [name for name in CONTENDERS if name not in (*PLANNED, *ROUNDED)]
    ran = {
        cluster: {e.name for c in cells if c.cluster == cluster for e in c.entries if not e.void}
        for cluster in dict.fromkeys(cell.cluster for cell in cells)
    }
    lines = [
        _filled(f"- `{cluster}`: {_names(names, those)}", "  ") for cluster, those in ran.items()
    ]
    void = {e.name for cell in cells for e in cell.entries}.difference(*ran.values())
    unlike = [cell for cell in cells if cell.unlike and cell.run == 1]
    raced = [
        (c, ours, best) for c in unlike if (ours := c.entry(OURS)) and (best := best_by_hand(c))
    ]
    rest = REST.format(
        void=_void(_names(names, void), len(cells)), unlike=len(unlike), seen=len(raced),
        worst=_worst(raced),
    )  # fmt: skip
    return BY_HAND.format(ran="\n".join(lines), rest=_filled(rest))


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _names(names: Sequence[str], those: Collection[str]) -> str:
    """Return those of the names that are in a set, for a sentence."""
    return ", ".join(f"`{name}`" for name in names if name in those)


def _void(names: str, cells: int) -> str:
    if not names:
        return ""
    return f"Void in all {cells} cells: {names}; the sections below give the reasons. "


def _worst(raced: Sequence[tuple[Cell, Entry, Entry]]) -> str:
    """Return a sentence on the cell in which ours is slowest relative to the best by hand."""
    if not raced:
        return ""
    cell, ours, best = min(raced, key=lambda one: ratio(one[2], one[1]))
    staged = cell.entry(OURS_STAGED)
    with_stages = f", `{OURS_STAGED}` {format_seconds(staged.median_s)}" if staged else ""
    return (
        f"The worst cell is {cell.slot}: `{best.name}` takes {format_seconds(best.median_s)}, "
        f"`{OURS}` {format_seconds(ours.median_s)}{with_stages}."
    )


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
