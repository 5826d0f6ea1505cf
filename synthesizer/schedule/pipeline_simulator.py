"""Simulate a pipeline: forwards and backwards of microbatches on stages, transfers between them.

Each stage computes one turn at a time, in the order of :func:`hap.ir.pipeline_order.turns`. Beside
computing it sends one transfer at a time and receives one: those to the next stage and to the one before use
the same links, in the order in which their turns end. A stage that computes meanwhile loses a part of that
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hap.ir.pipeline_order import Turn, turns


class OnceTransfer(NamedTuple):
    """A transfer to a stage once per step, beside computing.

    It carries a weight before the microbatches or, ``backward``, the sum of the weight's gradients
    after the last microbatch of stage ``src``, which sends it.
    """

    src: int
    seconds: float
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage.

    Attributes:
        forward_s, backward_s: of one microbatch.
        send_s: of its activations to the next stage; 0 for the last one.
        return_s: of their gradients from the next stage; 0 for the last one.
        before_s, after_s: once per step, before and after the microbatches.
        shared_s: once per step, when weights of other stages have arrived.
        early_s: part of ``after_s`` that needs no sums of other stages.
        hidden_s: part of ``early_s`` that passes beside the last turn.
        weights_hidden_s: the same if gradients of weights are delayed.
        weights_s: part of ``backward_s`` that no other stage waits for.
        split_s: seconds that both parts take longer, one after the other, than ``backward_s``.
        delay: of that part, see :func:`hap.ir.pipeline_order.turns`.
        in_flight: microbatches whose activations it may hold.
        interference: part of a transfer's time that its computing loses, at either end.
        awaits: transfers to it once per step.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    return_s: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0
    shared_s: float = 0.0
    early_s: float = 0.0
    hidden_s: float = 0.0
    weights_hidden_s: float = 0.0
    weights_s: float = 0.0
    split_s: float = 0.0
    delay: int = 0
    interference: float = 0.0
    awaits: tuple[OnceTransfer, ...] = ()
    in_flight: int

    @property
    def beside_s(self) -> float:
        """Seconds of ``after_s`` that pass beside the last turn."""
        return self.weights_hidden_s if self.delay else self.hidden_s

    @property
    def rest_s(self) -> float:
        """Seconds after the last turn, if no other stage's sums are awaited."""
        return self.after_s - self.beside_s

    def turn_s(self, turn: Turn) -> float:
        """Return the seconds of a turn."""
        if turn.weights:
            return self.weights_s + self.split_s
        late_s = self.weights_s if self.delay else 0.0
        return self.backward_s - late_s if turn.backward else self.forward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """A simulated step: its seconds, and the end of each stage."""

    step_s: float
    end_s: tuple[float, ...]


class TurnTimes(NamedTuple):
    """A turn of a stage, or the transfer of its result to the next stage that needs it."""

    stage: int
    turn: Turn
    transfer: bool
    start_s: float
    end_s: float


def simulate_pipeline(
    stages: Sequence[StageSeconds], microbatches: int, *, blocking: bool = False,
    record: list[TurnTimes] | None = None,
) -> PipelineTimes:  # fmt: skip
    """Return the times of a step.

    Args:
        blocking: a transfer occupies its sender, as with synchronous sends.
        record: gets the times of all turns and transfers.

    Raises:
        ValueError: the stages wait for each other: some stage has fewer microbatches in flight than
            the one after it.
    """
    count = len(stages)
    todo = [list(turns(microbatches, s.in_flight, s.delay)) for s in stages]
    at = [0] * count
    free = [s.before_s for s in stages]
    leaving, arriving = [0.0] * count, [0.0] * count  # when each stage's links are free
    there: dict[tuple[int, Turn], float] = {}  # (stage, turn) -> its input has arrived
    weights: dict[tuple[int, int], float] = {}  # (from, to) -> the weight has arrived
    for k, s in enumerate(stages):
        for t in (t for t in s.awaits if not t.backward):
            src = stages[t.src]  # it may send what it makes of weights of others
            first = [w + src.shared_s for (_, to), w in weights.items() if to == t.src]
            weights[t.src, k] = max([src.before_s, *first]) + t.seconds
    unsent: dict[int, Turn] = {}  # stage -> the turn that it has ended, whose result it sends next

    def next_s(k: int) -> float:
        """Return when a stage sends, or begins its next turn; infinite if it waits or has ended."""
        if k in unsent:
            return free[k]
        if at[k] == len(todo[k]):
            return math.inf
        turn = todo[k][at[k]]
        own = turn.weights or k == (count - 1 if turn.backward else 0)
        return max(free[k], 0.0 if own else there.get((k, turn), math.inf))

    nexts = [next_s(k) for k in range(count)]
    while (time_s := min(nexts)) < math.inf:
        k = nexts.index(time_s)
        stage = stages[k]
        if k in unsent:
            turn = unsent.pop(k)
            to = k - 1 if turn.backward else k + 1
            took = stages[to].return_s if turn.backward else stage.send_s
            begin = max(leaving[k], arriving[to], free[k])
            if not turn.backward:
                took = _shared(weights, k, begin, took)
            leaving[k] = arriving[to] = there[to, turn] = begin + took
            if record is not None:
                record.append(TurnTimes(k, turn, True, begin, begin + took))
            lost = begin + took - free[k] if blocking else stage.interference * took
            free[k] += lost
            nexts[to] = next_s(to)
        else:
            turn = todo[k][at[k]]
            if not at[k]:
                arrived = [w for (_, to), w in weights.items() if to == k]
                free[k] = max([free[k], *arrived]) + stage.shared_s
            came = there.get((k, turn), 0.0)
            if (k, turn) in there:
                took = stage.return_s if turn.backward else stages[k - 1].send_s
                lost = stage.interference * min(max(free[k] - (came - took), 0.0), took)
                free[k] += lost
            start, seconds = max(free[k], came), stage.turn_s(turn)
            free[k] = start + seconds
            at[k] += 1
            if record is not None:
                record.append(TurnTimes(k, turn, False, start, free[k]))
            if not turn.weights and k != (0 if turn.backward else count - 1):
                unsent[k] = turn
        nexts[k] = next_s(k)
    if any(a < len(t) for a, t in zip(at, todo, strict=True)):
        raise ValueError("the stages wait for each other")
    ready = list(free)
    for k in reversed(range(count)):
        for t in (t for t in stages[k].awaits if t.backward):
            begin = max(ready[t.src], leaving[t.src])
            ready[k] = max(ready[k], begin + t.seconds)
    ends = tuple(
        max(r, f + s.early_s - s.beside_s) + s.after_s - s.early_s
        for r, f, s in zip(ready, free, stages, strict=True)
    )
    return PipelineTimes(step_s=max(ends), end_s=ends)


def _shared(weights: dict[tuple[int, int], float], src: int, begin: float, took: float) -> float:
    """Return the seconds of a transfer beside those of weights, which it delays."""
    beside = [pair for pair, end in weights.items() if pair[0] == src and begin < end]
    for pair in beside:
        weights[pair] += took
    return took * (1 + len(beside))
