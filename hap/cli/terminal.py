"""Console output: tables, progress bars, short forms of long lists."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from hap.errors import reason_of
from hap.units import format_seconds

MANY_RANKS = 16
"""Above this number of ranks, equal ones share a line."""

_WIDTH = 100

OnStep = Callable[[int, float, float], None]
"""Called after each training step with (its number from 1, loss, seconds)."""


def console() -> Console:
    """Return the console for reports: as wide as the terminal, or 100 columns without colour."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def emit(screen: RenderableType) -> None:
    """Print to stdout, without the blanks that rich appends to lines."""
    out = console()
    with out.capture() as text:
        out.print(screen)
    print("\n".join(line.rstrip() for line in text.get().splitlines()))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()
) -> Table:
    """Return aligned columns without lines. Cells are plain text: ``[0]`` in a name is no markup."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(head))
    for at, title in enumerate(head):
        side = "right" if at in right else "left"
        out.add_column(Text(title, style="dim"), justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        out.add_row(*map(Text, row))
    return out


def no_repeats(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows in which a repeated first cell is empty."""
    before = ["", *(row[0] for row in rows)]
    return [
        ("", *row[1:]) if row[0] == above else row for above, row in zip(before, rows, strict=False)
    ]


_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+")


def pattern(name: str) -> str:
    """``layer.3.mlp out`` -> ``layer.*.mlp out``, for similar layers; ``fc1`` stays."""
    return _NUMBER.sub("*", name)


def alike(names: Sequence[str]) -> list[str]:
    """Merge names that differ only by numbers: ``layer.* heads (12x)``; keep the others.

    A number that all merged names have in common stays: ``old-1:* (8x)``.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    return [
        members[0] if len(members) == 1 else f"{_merged(members)} ({len(members)}x)"
        for members in groups.values()
    ]


def _merged(names: Sequence[str]) -> str:
    """Names of one pattern as one, with ``*`` for the numbers that differ."""
    numbers = [_NUMBER.findall(name) for name in names]
    common = iter([at[0] if len(set(at)) == 1 else "*" for at in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(common), names[0])


def runs(counts: Sequence[int], world_size: int) -> str:
    """Return ``96 96 32 32``; for many ranks runs, ``8x32 24x10``: 8 ranks with 32 each, ..."""
    if world_size <= MANY_RANKS:
        return " ".join(map(str, counts))
    return " ".join(f"{len(list(run))}x{count}" for count, run in groupby(counts))


def spans(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2 5``."""
    found = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        found.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return " ".join(found)


def _bar(out: Console) -> Progress:
    """Return a progress bar: count, total, elapsed time, and a text."""
    at = TextColumn("{task.fields[at]}")
    return Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), at, console=out)


@contextlib.contextmanager
def training_progress(steps: int) -> Iterator[OnStep]:
    """Show the loss and time of each step: a bar on a terminal, else a line each."""
    out = console()
    if not out.is_terminal:
        yield print_step
        return
    with _bar(out) as bar:
        task = bar.add_task("training", total=steps, at="starting")
        yield lambda step, loss, seconds: bar.update(
            task, completed=step, at=step_line(step, loss, seconds)
        )


def print_step(step: int, loss: float, seconds: float) -> None:
    """Print a step; a full disk that the output goes to does not end the run."""
    try:
        print(step_line(step, loss, seconds), flush=True)
    except BrokenPipeError:  # nobody reads it any more
        raise
    except OSError as error:
        _warn_of_output(reason_of(error))


@functools.cache
def _warn_of_output(reason: str) -> None:
    text = (
        f"steps are missing in the output, which cannot be written now ({reason}); training goes on"
    )
    print(text, file=sys.stderr, flush=True)


def step_line(step: int, loss: float, seconds: float) -> str:
    return f"step {step}  loss {loss:.6g}  {format_seconds(seconds)}"


@contextlib.contextmanager
def profiling_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show the progress of measuring: a bar on a terminal, else a line for every tenth."""
    out = console()
    if not out.is_terminal:
        told = -1

        def tell(done: int, total: int, what: str) -> None:
            nonlocal told
            if done * 10 // max(total, 1) > told:
                told = done * 10 // max(total, 1)
                print(f"{done} of {total} samples, next {what}", file=sys.stderr, flush=True)

        yield tell
        return
    with _bar(out) as bar:
        task = bar.add_task("measuring", total=None, at="starting the ranks")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, at=what)


@contextlib.contextmanager
def sweep_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show (done, total, next) on stderr: on a terminal with elapsed and remaining time, else lines.

    The remaining time is that of the questions that are done, per question, times the others.
    """
    out = Console(stderr=True, highlight=False)
    if not out.is_terminal:
        yield lambda done, total, what: print(
            f"{done + 1} of {total}: {what}", file=sys.stderr, flush=True
        )
        return
    at, left = TextColumn("{task.fields[at]}"), TimeRemainingColumn()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("about"),
        left,
        at,
    )
    with Progress(*columns, console=out, transient=True, speed_estimate_period=1e9) as bar:
        task = bar.add_task("planning", total=None, at="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, at=what)


def shown_time(seconds: float) -> str:
    """Return seconds as text; below half a nanosecond they are rounding errors."""
    return format_seconds(seconds if seconds >= 5e-10 else 0.0)
