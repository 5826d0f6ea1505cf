"""Dependencies of a stage's instructions within the forward or the backward of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hap.ir.graph import Graph
from hap.ir.last_turn import all_after
from hap.ir.placement import P
from hap.ir.program import Compute, Convert, Program, Value, reads, writes

Group = tuple[int, int]
"""(start, stop) of instructions that run as one."""


class TurnDependencies:
    """The dependencies of a stage's instructions, which are given by their numbers.

    Attributes:
        bounds: start -> stop of each group of instructions that run as one.
        of_weights: what follows from weights alone: instruction -> those on which it depends, and itself.
    """

    def __init__(self, graph: Graph, program: Program) -> None:
        self._graph, self._steps = graph, program.instructions
        self._after = all_after(graph, program)
        self._readers: dict[Value, list[int]] = {}
        for k, step in enumerate(self._steps):
            for value in step.reads(graph):
                self._readers.setdefault(value, []).append(k)
        ends = zip(graph.outputs, program.outputs, strict=True)
        self._sent = {Value(o.tensor, p) for o, p in ends if o.role in ("sent", "returned")}
        self._of_reductions = {k for side in (False, True) for k in self._found_of_reductions(side)}
        self.bounds = dict(program.bounds(graph))
        self.of_weights = self._found_of_weights(program)

    def collectives(self, backward: bool) -> Iterator[int]:
        """Yield the first instruction of each collective of one side, in order."""
        return (k for k in self.bounds if self._side(k, backward) and not self.computes(k))

    def read_by(self, first: int) -> list[int]:
        """Return the instructions of its side that read the results of a group."""
        return [n for k in range(first, self.bounds[first]) for n in self._read_by(k)]

    def follows(self, numbers: Sequence[int]) -> set[int]:
        """Return instructions, and all of their side that depend on them."""
        todo, found = [*numbers], set[int]()
        while todo:
            if (n := todo.pop()) not in found:
                found.add(n)
                todo += self._read_by(n)
        return found

    def read_later(self, k: int) -> list[int]:
        """Return the other instructions that read the results of one, such as sums over the microbatches."""
        backward = self._steps[k].backward
        return [n for n in self._all_read_by(k) if not self._side(n, backward)]

    def reduces_alone(self, first: int) -> bool:
        """Return whether a group is a reduction, and only what follows from reductions reads it on its side."""
        return self._reduces(first) and self._of_reductions.issuperset(self.read_by(first))

    def awaited(self, first: int) -> bool:
        """Return whether a group is a collective of activations that computing on its side awaits."""
        step = self._steps[first]
        if self.computes(first) or not self._side(first, step.backward) or first in self.of_weights:
            return False
        return not self._of_reductions.issuperset(self.read_by(first))

    def needed(self, group: Group, among: Sequence[Group]) -> set[Group]:
        """Return those of some groups, in order, on which another one depends."""
        values, found = {*reads(self._graph, self._steps[slice(*group)])}, set[Group]()
        for other in reversed(among):
            steps = self._steps[slice(*other)]
            if not values.isdisjoint(writes(self._graph, steps)):
                found.add(other)
                values.update(reads(self._graph, steps))
        return found

    def computes(self, k: int) -> bool:
        """Return whether an instruction communicates nothing."""
        step = self._steps[k]
        return isinstance(step, Compute) or step.local

    def _side(self, k: int, backward: bool) -> bool:
        return self._steps[k].backward is backward and k not in self._after

    def _reduces(self, k: int) -> bool:
        step = self._steps[k]
        return isinstance(step, Convert) and not step.local and step.src == P

    def _all_read_by(self, k: int) -> list[int]:
        values = self._steps[k].writes(self._graph)
        return [n for v in values for n in self._readers.get(v, ())]

    def _read_by(self, k: int) -> list[int]:
        backward = self._steps[k].backward
        return [n for n in self._all_read_by(k) if self._side(n, backward)]

    def _found_of_weights(self, program: Program) -> dict[int, frozenset[int]]:
        inputs = (i for i in self._graph.inputs if i.role not in ("input", "tangent", "received"))
        maker: dict[Value, int | None] = {
            Value(i.tensor, program.inputs[i.tensor]): None for i in inputs
        }
        found: dict[int, frozenset[int]] = {}
        for k, step in enumerate(self._steps):
            read = step.reads(self._graph)
            if k not in self._after and all(v in maker for v in read):
                made = (maker[v] for v in read)
                found[k] = frozenset({k}).union(*(found[m] for m in made if m is not None))
                maker.update(dict.fromkeys(step.writes(self._graph), k))
        return found

    def _found_of_reductions(self, backward: bool) -> set[int]:
        """Return the computing of a side that follows from reductions alone, and that nothing else reads."""
        alone, found = set[Value](), list[int]()
        for k, step in enumerate(self._steps):
            if self._side(k, backward):
                follows = self.computes(k) and alone.issuperset(step.reads(self._graph))
                if follows or self._reduces(k):
                    alone.update(step.writes(self._graph))
                    found += [k] if follows else []
        last = set[int]()
        for k in reversed(found):
            sent = self._sent.intersection(self._steps[k].writes(self._graph))
            if not sent and last.issuperset(self._read_by(k)):
                last.add(k)
        return last
