"""Planning that a time limit or Ctrl-C stops, and its progress with elapsed and remaining time."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from hap.errors import PlanningStopped, UnfinishedError
from hap.ir.plan import Plan
from hap.units import format_seconds

OnStage = Callable[[str], None]

STAGES: Final = {
    "capturing the model": 0.0,
    "applying the sharding rules": 0.48,
    "search from start 1": 0.5,
    "search from start 2": 0.54,
    "computing a lower bound": 0.57,
    "judging": 0.72,
    "searching without": 0.86,
}
"""Beginning of a message -> part of planning's time that has passed then, for models such as BERT.
Larger clusters and tight memory need more searches: their remaining time is underestimated."""
RAISED_AGAIN_S = 0.01
"""Seconds until a stop that was raised where Python drops exceptions is raised again."""


@contextlib.contextmanager
def stoppable(limit_s: float | None) -> Iterator[None]:
    """Raise ``PlanningStopped`` in the body after ``limit_s`` or at Ctrl-C, once.

    A second Ctrl-C raises ``KeyboardInterrupt``. Without effect outside the main thread, which alone
    receives signals. An exception that a signal raises in a finalizer or in a callback of the garbage
    collector is only reported by Python: such a stop is raised again, outside.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    clock = limit_s is not None  # without a limit the timer is not ours

    def disarm() -> None:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(number: int, frame: FrameType | None) -> None:
        disarm()
        if number == signal.SIGALRM:
            assert limit_s is not None
            raise PlanningStopped(f"time limit of {format_seconds(limit_s)}")
        print("stopping with the best plan so far; Ctrl-C again discards it", file=sys.stderr)
        raise PlanningStopped("Ctrl-C")

    def again(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, PlanningStopped):
            reported(lost)
            return
        nonlocal clock
        reason, clock = str(lost.exc_value), True

        def repeat(number: int, frame: FrameType | None) -> None:
            raise PlanningStopped(reason)

        signal.signal(signal.SIGALRM, repeat)
        signal.setitimer(signal.ITIMER_REAL, RAISED_AGAIN_S)

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)}
    for number in before if clock else (signal.SIGINT,):
        signal.signal(number, stop)
    reported = sys.unraisablehook
    sys.unraisablehook = again
    if limit_s is not None:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        disarm()
        sys.unraisablehook = reported
        for number, handler in before.items():
            signal.signal(number, handler)


def planned(make: Callable[[], Plan], limit_s: float | None) -> Plan:
    """Return the plan that ``make`` makes, the best one so far if it is stopped.

    Raises:
        UnfinishedError: it was stopped before it had a plan that fits the memory.
    """
    try:
        with stoppable(limit_s):
            return make()
    except PlanningStopped as stop:
        raise UnfinishedError(
            f"planning was stopped ({stop}) before it had a plan that fits the memory",
            hint="give it more time, or a smaller model or cluster; no plan was written",
        ) from None


def part_done(stage: str) -> float:
    """Return the typical part of planning's time before a stage; 0 for unknown ones."""
    return next((part for start, part in STAGES.items() if stage.startswith(start)), 0.0)


def remaining_s(part: float, elapsed_s: float, limit_s: float | None = None) -> float | None:
    """Return the estimated seconds that planning still takes, after a part of it; ``None``: unknown."""
    left = elapsed_s * (1 - part) / part if part else None
    if limit_s is None:
        return left
    most = max(limit_s - elapsed_s, 0.0)
    return most if left is None else min(left, most)


class _Remaining(ProgressColumn):
    """The time until ``end_s`` after the start, an estimate."""

    def render(self, task: Task) -> Text:
        end_s = task.fields["end_s"]
        if end_s is None or task.elapsed is None:
            return Text("")
        left = end_s - task.elapsed
        return Text(f"about {left:.0f} s left" if left > 0 else "longer than estimated")


@contextlib.contextmanager
def planning_progress(limit_s: float | None) -> Iterator[OnStage]:
    """Show planning's stages on stderr: on a terminal with elapsed and remaining time, else a line each."""
    out, start = Console(stderr=True, highlight=False), time.perf_counter()
    if not out.is_terminal:
        yield lambda stage: print(stage, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, _Remaining(), console=out, transient=True) as bar:
        task, part = bar.add_task("starting", total=None, end_s=limit_s), 0.0

        def show(stage: str) -> None:
            nonlocal part
            elapsed_s, part = time.perf_counter() - start, max(part, part_done(stage))
            left_s = remaining_s(part, elapsed_s, limit_s)
            bar.update(task, description=stage, end_s=left_s and elapsed_s + left_s)

        yield show
