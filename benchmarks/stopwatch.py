"""Time each operator and collective of a rank's step."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from hap.runtime.compiled import runnable
from hap.runtime.hap_module import HapModule, emit
from hap.runtime.lanes import InlineLane
from hap.runtime.timed_lane import TimedLane

WAIT, REST = "(waiting)", "(between)"
"""Time spent waiting for collectives, and time outside of operators and waits."""


@dataclass(slots=True)
class Stopwatch:
    """Seconds of one step, by the tensor that was computed, :data:`WAIT` or :data:`REST`.

    Attributes:
        wall_s: Wall time.
        processor_s: Processor time of this thread; less than wall time if the kernel paused it.
        collectives: (begin, end) of each collective, in the order in which they ran.
    """

    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    processor_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    collectives: list[tuple[float, float]] = field(default_factory=list)
    _last: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Clear all times, and begin."""
        self.wall_s.clear()
        self.processor_s.clear()
        self.collectives.clear()
        self._last = time.perf_counter(), time.thread_time()

    def look(self, what: str) -> None:
        """Add the time since the last call to ``what``."""
        now = time.perf_counter(), time.thread_time()
        self.wall_s[what] += now[0] - self._last[0]
        self.processor_s[what] += now[1] - self._last[1]
        self._last = now


def watched(module: HapModule, *, in_turn: bool = False) -> Stopwatch:
    """Time a module's steps from now on, at a small cost, and return their stopwatch.

    Args:
        in_turn: also run each collective synchronously from now on.
    """
    watch = Stopwatch()
    emitted = emit(module._plan, module._comm.rank, module._device)
    for code in (emitted.forward, emitted.backward):
        _look_around(code, in_turn)
    module._code = runnable(emitted, "eager", module._device)
    context: Any = module._ctx
    context.look = watch.look
    lane = TimedLane(InlineLane() if in_turn else context._lane)
    context._lane, lane.collectives = lane, watch.collectives
    return watch


def _look_around(code: fx.Graph, in_turn: bool) -> None:
    """Insert a call of ``look`` after each call, with the name to which its time belongs."""
    ctx = next(n for n in code.nodes if n.op == "placeholder")
    calls = [n for n in code.nodes if n.op in ("call_function", "call_method")]
    with code.inserting_before(next(n for n in code.nodes if n.op != "placeholder")):
        code.call_method("look", (ctx, REST))
    for place, node in enumerate(calls):
        if node.target == "wait" or (in_turn and node.target == "issue"):
            what = WAIT
        elif node.target == "issue":
            what = REST
        else:  # a helper call belongs to the next value
            ahead = (n.meta["value"].tensor for n in calls[place:] if "value" in n.meta)
            what = next(ahead, REST)
        with code.inserting_after(node):
            code.call_method("look", (ctx, what))
