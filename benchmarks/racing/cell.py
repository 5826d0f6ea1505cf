"""Race the contenders of one cell on one rank: all in the same processes, step by step.

A contender that raises on all ranks is dropped and the cell goes on. A contender that raises on some
ranks leaves the others in a collective: the cell then ends, and starts again without it.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import make
from benchmarks.contenders.base import Contender, Setting
from benchmarks.racing.clock import Clock, Tick, settled
from benchmarks.racing.memory import traced
from hap.capture.model_file import ModelFile
from hap.runtime.launch import report

TRACED = 2
"""Traced steps at the start of each contender; the first one allocates the optimizer states."""
HEAP_BYTES = 2**30
"""Size of the heap that the contenders share, faulted in at the start. Otherwise the kernel's time
for new pages would count in the step of whichever contender allocates first."""
SETTLED = 2
"""Rounds without limits, in which connections are made and their windows grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Instructions for the ranks of a cell.

    Attributes:
        names: The contenders, in order.
        plans: Plan files by contender.
        warm_up: Number of rounds that are not counted.
        budget_s: Seconds of rounds after which no further round begins, once ``least`` of
            them have been counted.
        patience_s: Seconds that ranks wait for one that is still building or stepping.
        sit_out: Relative time beyond which a contender sits out after the warm-up: it took more
            than so many times as long as the fastest in all rounds so far. Plans take ``least``
            counted rounds before, since their predictions are judged.
        ticks: Probes that the ranks time before a round; empty without a profile.
    """

    file: ModelFile
    names: tuple[str, ...]
    plans: Mapping[str, Path]
    speeds: tuple[float, ...]
    devices: tuple[str, ...]
    rounds: int
    warm_up: int
    least: int
    budget_s: float
    patience_s: float
    sit_out: float = math.inf
    ticks: tuple[Tick, ...] = ()

    @property
    def steps(self) -> int:
        """Return the largest possible number of steps of a contender."""
        return TRACED + SETTLED + self.warm_up + self.rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A report to the parent.

    ``what`` is ``begun`` (a contender is about to be made or to step), ``failed`` (on this
    rank), ``dropped``, ``built`` (with ``losses`` of the traced steps and ``peak_bytes`` by rank),
    ``ready`` (all are built; with this rank's ``pid``), ``looked`` (with ``slower``: time of the
    model's work relative to the profile) or ``stepped`` (with ``losses`` and ``seconds`` of one
    step; ``counted`` unless it is warm-up).
    """

    what: str
    name: str = ""
    pid: int = 0
    text: str = ""
    losses: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    seconds: float = 0.0
    slower: float = 0.0
    round: int = 0
    counted: bool = False


def global_batches(file: ModelFile, count: int) -> list[Any]:
    """Return the first ``count`` batches, the same in every process."""
    torch.manual_seed(file.seed + 1)
    return [file.batch() for _ in range(count)]


def race_rank(task: Task) -> None:
    """Make all contenders, then run rounds of one step each, in an order drawn for each round."""
    torch.zeros(HEAP_BYTES, dtype=torch.uint8)  # freed, and kept: see keep_memory
    course = _Course(task)
    alive: dict[str, Contender] = {}
    for name in task.names:
        found = course.build(name)
        if found is not None:
            alive[name] = found
    for number in range(-SETTLED, 0):
        course.round(alive, list(alive), number)
    gc.collect()
    gc.freeze()  # otherwise the collector scans all contenders in the midst of steps
    report(Said(what="ready", pid=os.getpid()))
    begun = time.monotonic()
    rounds: list[dict[str, float]] = []
    for number in range(task.warm_up + task.rounds):
        course.look(number)
        beaten = sits_out(rounds, task.sit_out) if number >= task.warm_up else set()
        if number < task.warm_up + task.least:
            beaten -= task.plans.keys()
        names = [name for name in alive if name not in beaten]
        random.Random(number).shuffle(names)  # alike on all ranks
        rounds.append(course.round(alive, names, number))
        late = time.monotonic() - begun > task.budget_s
        if course.any(late) and number + 1 >= task.warm_up + task.least:
            break


def sits_out(rounds: Sequence[Mapping[str, float]], times: float) -> set[str]:
    """Return the contenders that took over ``times`` times as long as the fastest in every round.

    Args:
        rounds: Contender -> seconds of its step, by round.
    """
    close = {name for r in rounds for name, s in r.items() if s <= times * min(r.values())}
    return {name for r in rounds for name in r} - close


class _Course:
    """Agreement among ranks, apart from the contenders' own communication."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._control = dist.new_group(timeout=datetime.timedelta(seconds=task.patience_s))
        self._first = dist.get_rank() == 0
        self._clock = Clock(task.ticks, dist.get_rank())
        self._batches = global_batches(task.file, task.steps)

    def build(self, name: str) -> Contender | None:
        """Make a contender and take its traced steps; return None if either fails."""
        self._say(Said(what="begun", name=name))
        made: list[Contender] = []
        losses: list[float | None] = []
        task = self._task
        setting = Setting(
            file=task.file, speeds=task.speeds, devices=task.devices, plan=task.plans.get(name)
        )

        def start() -> int:
            gc.collect()
            with traced() as trace:
                made.append(make(name, setting))
                with made[0].in_one_thread():
                    for number in range(TRACED):
                        if number == TRACED - 1:
                            trace.mark()
                        losses.append(made[0].step(self._batches[number]))
            return trace.peak_bytes

        peak = self._guarded(name, start)
        if peak is None:
            return None
        gathered = self._gather((peak, losses))
        told = next(each for _, each in gathered if None not in each)
        self._say(Said(
            what="built", name=name, losses=tuple(told), peak_bytes=tuple(b for b, _ in gathered)
        ))  # fmt: skip
        return made[0]

    def round(
        self, alive: dict[str, Contender], names: Sequence[str], number: int
    ) -> dict[str, float]:
        """Run one step of each contender, drop those that fail, and return name -> seconds.

        Args:
            number: The round; 0 is the first one with limits.
        """
        found: dict[str, float] = {}
        for name in names:
            seconds = self.step(alive[name], name, number)
            if seconds is None:
                del alive[name]
            else:
                found[name] = seconds
        return found

    def step(self, contender: Contender, name: str, number: int) -> float | None:
        """Return the seconds of one step, the same on all ranks; None if it failed on any.

        They count from the moment when all ranks that take part are ready until the last has ended,
        by the machine's clock, which all its processes share.
        """
        self._say(Said(what="begun", name=name))
        batch = self._batches[TRACED + SETTLED + number]

        def timed() -> tuple[float, float, float | None]:
            dist.barrier(self._control)
            start = time.monotonic()
            loss = contender.step(batch)
            return start, time.monotonic(), loss

        seen = self._guarded(name, timed)
        if seen is None:
            return None
        taking = [each for each in self._gather(seen) if each[2] is not None]
        starts, ends, losses = zip(*taking, strict=True)
        seconds = max(ends) - max(starts)
        self._say(Said(
            what="stepped", name=name, round=number, counted=number >= self._task.warm_up,
            seconds=seconds, losses=losses[:1],
        ))  # fmt: skip
        return seconds

    def look(self, number: int) -> None:
        """Report the machine's current speed, before a round."""
        if not self._task.ticks:
            return
        slower = settled(self._slower)
        self._say(Said(
            what="looked", round=number, counted=number >= self._task.warm_up,
            slower=slower,
        ))  # fmt: skip

    def _slower(self) -> float:
        """Return the median of :meth:`Clock.slower` over all ranks."""
        dist.barrier(self._control)
        return statistics.median(self._gather(self._clock.slower()))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(self._gather(flag))

    def _guarded(self, name: str, function: Callable[[], Any]) -> Any:
        """Return the result, or None on all ranks if any of them raised."""
        result, text = None, ""
        try:
            result = function()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            report(Said(what="failed", name=name, text=text))
        if self.any(bool(text)):
            self._say(Said(what="dropped", name=name))
            return None
        return result

    def _gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._control)
        return found

    def _say(self, said: Said) -> None:
        if self._first:
            report(said)
