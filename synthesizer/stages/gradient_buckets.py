"""Buckets of gradients that a stage reduces beside its last backward: their order, and what it hides.

A bucket is reduced as soon as the last of its gradients is complete, as in DistributedDataParallel (Li et al.,
"PyTorch Distributed", VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hap.ir.delayed_weights import delayable
from hap.ir.graph import Graph
from hap.ir.last_turn import after_microbatches, beside_last
from hap.ir.program import Convert, Instruction, Program, Value
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.stages.turn_seconds import TimedProgram

BUCKETS = (3, 8, 24)
"""Numbers of buckets that are tried, besides the search's own."""

WORTH = 0.99
"""Ratio of seconds of the last turn from which on more buckets are taken."""


class LastTurn(NamedTuple):
    """Seconds of the reductions that may run beside the last turn, and the parts that it hides.

    ``weights_hidden_s``: if gradients of weights have turns of their own, so that the last one has
    these alone.
    """

    early_s: float = 0.0
    hidden_s: float = 0.0
    weights_hidden_s: float = 0.0


def last_turn(timed: TimedProgram) -> LastTurn:
    """Return the seconds of a stage's last turn."""
    graph, program = timed.graph, timed.program
    beside = beside_last(graph, program)
    if not beside:
        return LastTurn()
    early_s = timed.turn_s(beside, overlap=False)
    late = delayable(graph, program)

    def hidden_s(turn: frozenset[int]) -> float:
        apart_s = timed.turn_s(turn - beside) + early_s
        return min(early_s, max(0.0, apart_s - timed.turn_s(turn)))

    whole_s = hidden_s(turn := _backward(graph, program))
    return LastTurn(early_s, whole_s, hidden_s(turn & (late | beside)) if late else whole_s)


def in_buckets(graph: Graph, program: Program, cost: CostModel) -> Program:
    """Return a stage's program with its reductions in the buckets that hide most of their time."""
    if cost.hardware.cluster.world_size == 1 or not beside_last(graph, program):
        return program

    def backward_s(tried: Program) -> float:
        return TimedProgram(graph, tried, cost).turn_s(_backward(graph, tried))

    found, least_s = program, backward_s(program)
    for count in BUCKETS:
        tried = with_buckets(graph, program, cost, count)
        if (step_s := backward_s(tried)) < WORTH * least_s:
            found, least_s = tried, step_s
    return found


def _backward(graph: Graph, program: Program) -> frozenset[int]:
    """Return the instructions of a backward, with those that may run beside the last one."""
    _, late = after_microbatches(graph, program)
    return frozenset(k for k, s in enumerate(program.instructions) if s.backward) - late


def with_buckets(graph: Graph, program: Program, cost: CostModel, count: int) -> Program:
    """Return the program with its reductions in buckets, each right after its last gradient.

    Args:
        count: buckets in the place of each fused reduction.
    """
    beside = beside_last(graph, program)
    if not beside:
        return program
    steps, moved = program.instructions, _Moved(graph, program, beside)
    bucket = 1 + max(s.bucket for s in steps if isinstance(s, Convert))
    after: dict[int, list[Instruction]] = {}
    for first, end in program.bounds(graph):
        alike = [k for k in range(first, end) if k in beside and moved.reduces(k)]
        for part in _parts(
            sorted(alike, key=moved.ready), count, lambda k: _nbytes(graph, steps[k])
        ):
            sent = [s for k in part if isinstance(s := steps[k], Convert)]
            how = cost.convert_group(sent)[0].implementation
            found = after.setdefault(max(map(moved.ready, part)), [])
            found += [steps[n] for k in part for n in moved.take(k)]
            found += [replace(s, implementation=how, bucket=bucket) for s in sent]
            moved.done.update(part)
            bucket += 1
    order = [
        step for k, own in enumerate(steps)
        for step in (*([] if k in moved.done else [own]), *after.get(k, ()))
    ]  # fmt: skip
    return replace(program, instructions=tuple(order))


class _Moved:
    """The instructions beside the last backward that move to where their gradients are complete."""

    def __init__(self, graph: Graph, program: Program, beside: frozenset[int]) -> None:
        self._read = dict[int, list[int]]()  # only instructions beside the last backward
        self._ready = dict[int, int]()
        self._reduces, behind_reduction = set[int](), set[int]()
        self.done = set[int]()
        steps, maker = program.instructions, dict[Value, int]()
        for k, step in enumerate(steps):
            if k in beside:
                made = {maker[v] for v in step.reads(graph) if v in maker}
                read = self._read[k] = sorted(made & beside)
                ready = [*(made - beside), *(self._ready[n] for n in read)]
                last = self._ready[k] = max(ready, default=-1)
                if any(n in behind_reduction or _reduces(steps[n]) for n in read):
                    behind_reduction.add(k)
                elif _reduces(step) and last >= 0 and steps[last].backward:
                    self._reduces.add(k)
            maker.update(dict.fromkeys(step.writes(graph), k))

    def reduces(self, k: int) -> bool:
        """Return whether an instruction is a collective of gradients that follows no other one."""
        return k in self._reduces

    def ready(self, k: int) -> int:
        """Return the last instruction of the backward on which one depends."""
        return self._ready[k]

    def take(self, k: int) -> list[int]:
        """Return what must move before an instruction, in order, once."""
        todo, found = [*self._read[k]], list[int]()
        while todo:
            if (n := todo.pop()) not in self.done:
                self.done.add(n)
                found.append(n)
                todo += self._read[n]
        return sorted(found)


def _reduces(step: Instruction) -> bool:
    return isinstance(step, Convert) and not step.local


def _nbytes(graph: Graph, step: Instruction) -> int:
    (value,) = step.reads(graph)
    return max(graph.tensors[value.tensor].nbytes, 1)


def _parts(items: Sequence[int], count: int, nbytes: Callable[[int], int]) -> list[list[int]]:
    """Return neighbouring items in parts of about equal bytes."""
    sizes = np.array([nbytes(k) for k in items], dtype=np.float64)
    middle = (np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1.0)
    numbers = np.minimum(middle * count, count - 1).astype(int).tolist()
    found: dict[int, list[int]] = {}
    for number, k in zip(numbers, items, strict=True):
        found.setdefault(number, []).append(k)
    return list(found.values())
