"""A lane that times its collectives, and how long the program waits for their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hap.runtime.lanes import Lane, Pending


class TimedLane(Lane):
    """Wraps a lane that runs collectives on CPUs: on CUDA the host does not see when they run.

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
        begun = time.perf_counter()
        tensor = self._lane.wait(pending)
        self.waited_s += time.perf_counter() - begun
        return tensor
