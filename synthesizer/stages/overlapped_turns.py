"""The order of a stage's instructions in which collectives of a microbatch run beside its computing.

The search puts a gather of a weight right before its first reader, and what reads a reduced gradient right
after the reduction. Here the gather is issued while an earlier weight is in use (as FSDP prefetches: Zhao et
al., "PyTorch FSDP", VLDB 2023), the readers of a reduction move behind later computing, and what a collective
of activations does not need runs beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hap.ir.graph import Graph
from hap.ir.last_turn import all_after
from hap.ir.program import Convert, Program
from hap.ir.weight_gathers import before_microbatches, forward_gathers
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.stages.turn_dependencies import Group, TurnDependencies
from hap.synthesizer.stages.turn_seconds import TimedProgram

DEPTHS = (1, 2, 4)
"""Numbers of collectives that are under way at once, of which one is tried after the other."""

WORTH = 0.995
"""Ratio of seconds of a microbatch from which on another order is taken."""


def overlapped(graph: Graph, program: Program, cost: CostModel) -> Program:
    """Return a stage's program in the order whose forward and backward are the fastest."""
    if cost.hardware.cluster.world_size == 1:
        return program
    timed = TimedProgram(graph, program, cost)
    found, least_s = program, _microbatch_s(timed)
    for depth in DEPTHS:
        tried = with_depth(timed, depth)
        if tried is program:
            break
        if (seconds := _microbatch_s(TimedProgram(graph, tried, cost))) < WORTH * least_s:
            found, least_s = tried, seconds
    return found


def _microbatch_s(timed: TimedProgram) -> float:
    """Return the seconds of a microbatch that gathers weights in its forward."""
    graph, program = timed.graph, timed.program
    once = before_microbatches(graph, program, forward_gathers(graph, program))
    once |= all_after(graph, program)
    turns: tuple[list[int], list[int]] = [], []
    for k, step in enumerate(program.instructions):
        if k not in once:
            turns[step.backward].append(k)
    return sum(timed.turn_s(frozenset(turn)) for turn in turns)


def with_depth(timed: TimedProgram, depth: int) -> Program:
    """Return a stage's program in an order in which collectives of a microbatch overlap.

    Args:
        depth: a gather of a weight is issued before the first reader of the ``depth``-th one before it. What
            reads a reduction comes before the ``depth``-th one after it. 0 changes nothing.
    """
    if not depth:
        return timed.program
    graph, program = timed.graph, _awaited_first(timed)
    moved = _Moves(program, TurnDependencies(graph, program), depth)
    for backward in (False, True):
        moved.issue_early(backward)
        moved.read_late(backward)
    return _ordered(graph, program, [*moved.order()])


def _awaited_first(timed: TimedProgram) -> Program:
    """Return the program in which a collective of activations precedes computing that it does not need.

    As much computing comes behind it as runs beside it, such as products that make gradients of weights. It
    was before the collective, and after the one before.
    """
    graph, program = timed.graph, timed.program
    depends, seconds = TurnDependencies(graph, program), dict[Group, float]()
    order, region, backward = list[Group](), list[Group](), False
    for first, end, each_s, messages in timed.groups:
        group = first, end
        if program.instructions[first].backward is not backward:
            backward = not backward
            order, region = order + region, []
        if not depends.awaited(first):
            region.append(group)
            seconds[group] = 0.0 if messages else float(each_s.max())
            continue
        needed, left_s = depends.needed(group, region), float(each_s.max())
        later = list[Group]()
        for other in reversed([g for g in region if g not in needed]):
            if left_s <= 0:
                break
            later.insert(0, other)
            left_s -= seconds[other]
        order += [*(g for g in region if g not in later), group]
        region = later
    return _ordered(graph, program, [k for group in order + region for k in range(*group)])


def _ordered(graph: Graph, program: Program, order: Sequence[int]) -> Program:
    """Return the program in another order; no collective is fused with others than before."""
    steps, own = program.instructions, [*range(len(program.instructions))]
    if [*order] == own:
        return program
    assert sorted(order) == own, "an instruction was moved twice"
    bucket = {k: 1 + first for first, end in program.bounds(graph) for k in range(first, end)}
    return replace(
        program,
        instructions=tuple(
            replace(step, bucket=bucket[k]) if isinstance(step := steps[k], Convert) else step
            for k in order
        ),
    )


class _Moves:
    """Instructions that move before others, by their numbers."""

    def __init__(self, program: Program, depends: TurnDependencies, depth: int) -> None:
        self._steps, self._depends, self._depth = program.instructions, depends, depth
        self._before: dict[int, list[int]] = {}
        self._gone = set[int]()

    def issue_early(self, backward: bool) -> None:
        """Move each gather of a weight before the first reader of an earlier one."""
        gathers = []
        for k in self._depends.collectives(backward):
            chain = self._depends.of_weights.get(k, frozenset())
            alone = self._depends.bounds[k] == k + 1
            alone &= all(self._depends.computes(n) for n in chain - {k})
            if chain and alone and (read := self._depends.read_by(k)):
                gathers.append((min(read), k))
        gathers.sort()
        start = min((k for k, s in enumerate(self._steps) if s.backward is backward), default=0)
        for number, (_, k) in enumerate(gathers):
            at = gathers[number - self._depth][0] if number >= self._depth else start
            if at < k:
                self._move(sorted(n for n in self._depends.of_weights[k] if n >= at), at)

    def read_late(self, backward: bool) -> None:
        """Move what follows from a reduction alone before a later reduction."""
        every = self._depends.collectives(backward)
        reductions = [k for k in every if self._depends.reduces_alone(k)]
        end = 1 + max((k for k, s in enumerate(self._steps) if s.backward is backward), default=-1)
        place: dict[int, int] = {}
        for number, k in enumerate(reductions):
            later = reductions[number + self._depth :]
            follows = self._depends.follows(self._depends.read_by(k))
            needed = [n for m in follows for n in self._depends.read_later(m)]
            at = min([later[0] if later else end, *needed])
            place.update((n, max(at, place.get(n, 0))) for n in follows if n < at)
        for n in sorted(place):
            self._move([n], place[n])

    def _move(self, numbers: Sequence[int], at: int) -> None:
        new = [n for n in numbers if n not in self._gone]
        self._before.setdefault(at, []).extend(new)
        self._gone.update(new)

    def order(self) -> Iterator[int]:
        """Yield the instructions in their new order."""
        for k in range(len(self._steps) + 1):
            yield from self._before.get(k, ())
            if k < len(self._steps) and k not in self._gone:
                yield k
