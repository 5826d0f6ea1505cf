"""Lanes that time their collectives, and how long the program waits for their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hap.runtime.lanes import Lane, Pending, Result


class TimedStreamLane(Lane):
    """Wraps a lane of a CUDA stream: how long the computing stream waits for others.

    The host does not see when collectives run, so only the stream's waits are timed, by events.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def waited_s(self) -> float:
        """Seconds of all waits; call it when the stream has been synchronized."""
        return float(sum(begin.elapsed_time(end) for begin, end in self._waits)) / 1e3

    def clear(self) -> None:
        """Forget all times."""
        self._waits.clear()

    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        return self._lane.issue(run, *args)

    def wait(self, pending: Pending) -> Tensor:
        return self.idle(lambda: self._lane.wait(pending))

    def idle(self, wait: Callable[[], Result]) -> Result:
        if (
            torch.cuda.is_current_stream_capturing()
        ):  # such an event measures no replay of the graph
            return wait()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = wait()
        end.record()
        self._waits.append((begin, end))
        return result


class TimedLane(Lane):
    """Wraps a lane that runs collectives on CPUs, where the host sees when they run.

    Attributes:
        collectives: (begin, end) of each collective, in the order in which they ran.
        waited_s: seconds in which the program waited for results.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.collectives: list[tuple[float, float]] = []
        self.waited_s = 0.0

    def clear(self) -> None:
        """Forget all times."""
        self.collectives.clear()
        self.waited_s = 0.0

    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        def timed(*resolved: Any) -> Any:
            begun = time.perf_counter()
            result = run(*resolved)
            self.collectives.append((begun, time.perf_counter()))
            return result

        return self._lane.issue(timed, *args)

    def wait(self, pending: Pending) -> Tensor:
        return self.idle(lambda: self._lane.wait(pending))

    def idle(self, wait: Callable[[], Result]) -> Result:
        begun = time.perf_counter()
        result = wait()
        self.waited_s += time.perf_counter() - begun
        return result
