"""The order of a stage's instructions in which collectives of a microbatch run beside its computing.

The search puts a gather of a weight right before its first reader, and what reads a reduced gradient right
after the reduction. Here the gather is issued while an earlier weight is in use (as FSDP prefetches: Zhao et
al., "PyTorch FSDP", VLDB 2023), and the readers of a reduction move behind later computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hap.ir.graph import Graph
from hap.ir.last_turn import after_microbatches
from hap.ir.placement import P
from hap.ir.program import Compute, Convert, Instruction, Program, Value, reads, writes
from hap.ir.weight_gathers import before_microbatches, forward_gathers
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.stages.turn_seconds import TimedProgram

DEPTHS = (1, 2, 4)
"""Numbers of collectives that are under way at once, of which one is tried after the other."""

WORTH = 0.995
"""Ratio of seconds of a microbatch from which on another order is taken."""


def overlapped(graph: Graph, program: Program, cost: CostModel) -> Program:
    """Return a stage's program in the order whose forward and backward are the fastest."""
    if cost.hardware.cluster.world_size == 1:
        return program
    found, least_s = program, _microbatch_s(graph, program, cost)
    for depth in DEPTHS:
        tried = with_depth(graph, program, depth)
        if tried is program:
            break
        if (seconds := _microbatch_s(graph, tried, cost)) < WORTH * least_s:
            found, least_s = tried, seconds
    return found


def _microbatch_s(graph: Graph, program: Program, cost: CostModel) -> float:
    """Return the seconds of a microbatch that gathers weights in its forward."""
    timed, once = TimedProgram(graph, program, cost), _once(graph, program)
    turns: tuple[list[int], list[int]] = [], []
    for k, step in enumerate(program.instructions):
        if k not in once:
            turns[step.backward].append(k)
    return sum(timed.turn_s(frozenset(turn)) for turn in turns)


def _once(graph: Graph, program: Program) -> frozenset[int]:
    """Return the instructions outside the microbatches."""
    before = before_microbatches(graph, program, forward_gathers(graph, program))
    return before.union(*after_microbatches(graph, program))


def with_depth(graph: Graph, program: Program, depth: int) -> Program:
    """Return the program with gathers of weights earlier, and what reads reductions later; ``depth`` 0 changes nothing.

    Args:
        depth: a gather is issued before the first reader of the ``depth``-th one before it. What reads a
            reduction comes before the ``depth``-th one after it.
    """
    if not depth:
        return program
    program = _urgent_first(graph, program)
    moved = _Moves(graph, program, depth)
    for backward in (False, True):
        moved.issue_early(backward)
        moved.read_late(backward)
    if not moved.gone:
        return program
    order = [*moved.order()]
    assert len(order) == len(program.instructions), "an instruction was moved twice"
    return replace(program, instructions=tuple(order))


def _urgent_first(graph: Graph, program: Program) -> Program:
    """Return the program in which what a collective of activations does not need comes behind it.

    Between two such collectives, products that make gradients of weights then run beside the second one.
    """
    moves, bounds = _Moves(graph, program, 1), program.bounds(graph)
    order, region, backward = list[tuple[int, int]](), list[tuple[int, int]](), False
    for group in bounds:
        if program.instructions[group[0]].backward is not backward:
            backward = not backward
            order, region = order + region, []
        if moves.urgent(group[0]):
            needed = moves.needed(group, region)
            order += [*(g for g in region if g in needed), group]
            region = [g for g in region if g not in needed]
        else:
            region.append(group)
    order += region
    return program if order == [*bounds] else _ordered(program, order)


def _ordered(program: Program, groups: Sequence[tuple[int, int]]) -> Program:
    """Return the program in another order of its groups, which stay apart."""
    steps = [
        replace(step, bucket=first + 1) if isinstance(step, Convert) else step
        for first, end in groups
        for step in program.instructions[first:end]
    ]
    return replace(program, instructions=tuple(steps))


class _Moves:
    """Places to which instructions move: before another one, by its number."""

    def __init__(self, graph: Graph, program: Program, depth: int) -> None:
        self._graph, self._steps, self._depth = graph, program.instructions, depth
        self._bounds = dict(program.bounds(graph))
        self._after = frozenset[int]().union(*after_microbatches(graph, program))
        self._readers: dict[Value, list[int]] = {}
        for k, step in enumerate(self._steps):
            for value in step.reads(graph):
                self._readers.setdefault(value, []).append(k)
        self._chains = self._of_weights(program)
        ends = zip(graph.outputs, program.outputs, strict=True)
        self._sent = {Value(o.tensor, p) for o, p in ends if o.role in ("sent", "returned")}
        self._loose = {side: self._of_reductions(side) for side in (False, True)}
        self._before: dict[int, list[int]] = {}
        self.gone = set[int]()

    def _of_weights(self, program: Program) -> dict[int, frozenset[int]]:
        """Return what follows from weights alone: instruction -> those on which it depends, and itself."""
        inputs = (i for i in self._graph.inputs if i.role not in ("input", "tangent", "received"))
        maker: dict[Value, int | None] = {
            Value(i.tensor, program.inputs[i.tensor]): None for i in inputs
        }
        found: dict[int, frozenset[int]] = {}
        for k, step in enumerate(self._steps):
            if k in self._after or any(v not in maker for v in step.reads(self._graph)):
                continue
            made = (maker[v] for v in step.reads(self._graph))
            found[k] = frozenset({k}).union(*(found[m] for m in made if m is not None))
            maker.update(dict.fromkeys(step.writes(self._graph), k))
        return found

    def _collectives(self, backward: bool) -> Iterator[int]:
        """Yield the first instruction of each collective of one side of a microbatch."""
        for k in self._bounds:
            step = self._steps[k]
            collective = isinstance(step, Convert) and not step.local and k not in self._after
            if collective and step.backward is backward:
                yield k

    def _read_by(self, k: int) -> list[int]:
        """Return the instructions of the same side that read the results of one."""
        found = (n for v in self._steps[k].writes(self._graph) for n in self._readers.get(v, ()))
        side = self._steps[k].backward
        return [n for n in found if self._steps[n].backward is side and n not in self._after]

    def issue_early(self, backward: bool) -> None:
        """Move each gather of a weight before the first reader of an earlier one."""
        gathers = []
        for k in self._collectives(backward):
            chain = self._chains.get(k, frozenset())
            alone = self._bounds[k] == k + 1 and all(self._computes(n) for n in chain - {k})
            if chain and alone and (read := self._read_by(k)):
                gathers.append((min(read), k))
        gathers.sort()
        for number, (_, k) in enumerate(gathers):
            at = gathers[max(0, number - self._depth)][0]
            if number < self._depth:
                at = min(n for n, step in enumerate(self._steps) if step.backward is backward)
            if at < k:
                self._move(sorted(n for n in self._chains[k] if n >= at), at)

    def read_late(self, backward: bool) -> None:
        """Move what follows from a reduction alone before a later reduction."""
        loose, reductions = self._loose[backward], []
        for k in self._collectives(backward):
            read = [n for m in range(k, self._bounds[k]) for n in self._read_by(m)]
            if self._reduces(k) and loose.issuperset(read):
                reductions.append((k, read))
        end = 1 + max((k for k, s in enumerate(self._steps) if s.backward is backward), default=-1)
        place: dict[int, int] = {}
        for number, (_, read) in enumerate(reductions):
            later = reductions[number + self._depth :]
            follows = self._follows(read)
            last = min((n for m in follows for n in self._once(m)), default=end)
            at = min(later[0][0] if later else end, last)
            place.update((n, max(at, place.get(n, 0))) for n in follows if n < at)
        for n in sorted(place):
            self._move([n], place[n])

    def _follows(self, numbers: Sequence[int]) -> set[int]:
        """Return instructions, and all of their side that depend on them."""
        todo, found = [*numbers], set[int]()
        while todo:
            if (n := todo.pop()) not in found:
                found.add(n)
                todo += self._read_by(n)
        return found

    def _once(self, k: int) -> list[int]:
        """Return the instructions after the microbatches that read the results of one."""
        read = (n for v in self._steps[k].writes(self._graph) for n in self._readers.get(v, ()))
        return [
            n
            for n in read
            if n in self._after or self._steps[n].backward is not self._steps[k].backward
        ]

    def _of_reductions(self, backward: bool) -> set[int]:
        """Return the computing of a side that follows from reductions alone, and that nothing else reads."""
        alone, found = set[Value](), list[int]()
        for k, step in enumerate(self._steps):
            if step.backward is backward and k not in self._after:
                follows = self._computes(k) and alone.issuperset(step.reads(self._graph))
                if follows or self._reduces(k):
                    alone.update(step.writes(self._graph))
                    found += [k] if follows else []
        last = set[int]()
        for k in reversed(found):
            sent = self._sent.intersection(self._steps[k].writes(self._graph))
            if not sent and last.issuperset(self._read_by(k)):
                last.add(k)
        return last

    def urgent(self, k: int) -> bool:
        """Return whether an instruction begins a collective that computing on its side waits for."""
        step = self._steps[k]
        if not isinstance(step, Convert) or step.local or k in self._after or k in self._chains:
            return False
        read = [n for m in range(k, self._bounds[k]) for n in self._read_by(m)]
        return not self._loose[step.backward].issuperset(read)

    def needed(
        self, group: tuple[int, int], among: Sequence[tuple[int, int]]
    ) -> set[tuple[int, int]]:  # fmt: skip
        """Return those of some groups, in order, on which another one depends."""
        values, found = {*reads(self._graph, self._steps[slice(*group)])}, set[tuple[int, int]]()
        for other in reversed(among):
            steps = self._steps[slice(*other)]
            if not values.isdisjoint(writes(self._graph, steps)):
                found.add(other)
                values.update(reads(self._graph, steps))
        return found

    def _reduces(self, k: int) -> bool:
        step = self._steps[k]
        return isinstance(step, Convert) and not step.local and step.src == P

    def _computes(self, k: int) -> bool:
        step = self._steps[k]
        return isinstance(step, Compute) or step.local

    def _move(self, numbers: Sequence[int], at: int) -> None:
        new = [n for n in numbers if n not in self.gone]
        self._before.setdefault(at, []).extend(new)
        self.gone.update(new)

    def order(self) -> Iterator[Instruction]:
        """Yield the instructions in their new order; none is fused with others than before."""
        bucket = {
            k: 1 + number for number, (first, end) in enumerate(self._bounds.items())
            for k in range(first, end)
        }  # fmt: skip
        for k in range(len(self._steps) + 1):
            here = [k] if k < len(self._steps) and k not in self.gone else []
            for n in (*self._before.get(k, ()), *here):
                step = self._steps[n]
                yield replace(step, bucket=bucket[n]) if isinstance(step, Convert) else step
