"""The part of a program's cost that is independent of its shares: computed once, priced many times.

The search for shares prices one program under many of them. The fused groups, the classes
of equal prices, and the live ranges of storages stay the same.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hap.ir.graph import Graph, Node, Tensor
from hap.ir.loss_chunks import CHUNKS
from hap.ir.program import Bounds, Compute, Convert, Instruction, Program, Value, reads, writes
from hap.synthesizer.cost.liveness import Indices, LiveRanges, storages
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.rules.rule_table import Row

Item = TypeVar("Item")


class EquivalenceClasses(Generic[Item]):
    """Items by the key that determines their price; the first of each class represents it."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.first: list[Item] = []

    def number(self, key: Hashable, item: Item) -> int:
        """Return the class of a key; store its first item."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.first)
            self.first.append(item)
        return found


class CostStructure:
    """The groups of a program's instructions, their classes, and the live ranges of storages.

    Attributes:
        bounds: per group of instructions that run as one, (start, stop).
        nodes: per group, its nodes and their rows; empty for a conversion.
        chunked: (group, node, row) of the operators that work piece by piece.
        moved: per group, its class in ``moving``; -1 if it computes.
        converts: the groups that do not compute.
        storages: the storages that instructions allocate.
        parts: classes of the values of inputs and storages by their parts.
        part_of_input, part_of_storage: the classes in ``parts``.
        bytes_of_input, bytes_of_storage: on one device.
        bytes_kept: kind -> per class of ``parts``, the bytes of storages that hold the graph's outputs.
        live: their live ranges without overlap.
    """

    def __init__(self, graph: Graph, program: Program, cost: Prices, bounds: Bounds) -> None:
        self.bounds = bounds
        self.axes = cost.axes
        self.storages = storages(graph, program)
        self.nodes: list[list[tuple[Node, Row]]] = []
        self.chunked: list[tuple[int, Node, Row]] = []
        self.moving: EquivalenceClasses[int] = EquivalenceClasses()
        self.moved: list[int] = []
        self.converts: list[int] = []
        self._work: ComputingClasses | None = None
        self._superstep_rows: tuple[tuple[int, ...], SuperstepRows] | None = None
        self._ends: Ends | None = None
        for at, (a, b) in enumerate(bounds):
            group = program.instructions[a:b]
            moves = tuple(_conversion_key(graph, cost, s) for s in group if isinstance(s, Convert))
            self.moved.append(self.moving.number(moves, at) if moves else -1)
            if moves:
                self.converts.append(at)
            nodes = nodes_and_rows(graph, group)
            self.nodes.append(nodes)
            self.chunked += [(at, node, row) for node, row in nodes if node.op in CHUNKS]
        self.parts: EquivalenceClasses[Value] = EquivalenceClasses()
        self.inputs = [Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs]
        values = [*self.inputs, *(storage.value for storage in self.storages)]
        where = [self.parts.number(cost.parts.value_key(*v), v) for v in values]
        self.part_of_input: Indices = np.array(where[: len(self.inputs)], dtype=np.int64)
        self.part_of_storage: Indices = np.array(where[len(self.inputs) :], dtype=np.int64)
        nbytes = np.array([graph.tensors[v.tensor].nbytes for v in values], dtype=np.float64)
        self.bytes_of_input, self.bytes_of_storage = np.split(nbytes, [len(self.inputs)])
        self.bytes_kept: dict[str, npt.NDArray[np.float64]] = {}
        for at, storage in enumerate(self.storages):
            if storage.kept:
                nothing = np.zeros(len(self.parts.first))
                kept = self.bytes_kept.setdefault(storage.kind, nothing)
                kept[self.part_of_storage[at]] += self.bytes_of_storage[at]

    @cached_property
    def live(self) -> LiveRanges:
        return self.live_until(None)

    def live_until(
        self, until: Sequence[int] | None, throughout: Collection[int] = ()
    ) -> LiveRanges:
        """Return the live ranges if each group holds its inputs until another has run.

        Args:
            until: per group, that other one; default: itself.
            throughout: instructions whose storages exist from the start to the end.
        """
        ends = range(len(self.bounds)) if until is None else until
        return LiveRanges(self.storages, self.bounds, ends, self._busy, throughout)

    @property
    def _busy(self) -> list[int]:
        return [*dict.fromkeys([*self.converts, *(at for at, _, _ in self.chunked)])]

    def work(self, graph: Graph, program: Program, cost: Prices) -> ComputingClasses:
        """Return the classes of computing; made when they are first read."""
        if self._work is None:
            self._work = ComputingClasses(graph, program, cost, self.nodes)
        return self._work

    def superstep_rows(
        self, graph: Graph, program: Program, cost: Prices, crossings: tuple[int, ...]
    ) -> SuperstepRows:
        """Return what is between collectives, ``crossings`` and others; made when first read."""
        if self._superstep_rows is None or self._superstep_rows[0] != crossings:
            self._superstep_rows = crossings, SuperstepRows(self, graph, program, cost, crossings)
        return self._superstep_rows[1]

    def ends(self, graph: Graph, program: Program) -> Ends:
        """Return the values of each group; made when they are first read."""
        if self._ends is None:
            self._ends = Ends(graph, program, self.bounds)
        return self._ends


class Ends:
    """The values that groups of instructions read and write, as numbers.

    Attributes:
        given: the inputs of the graph.
        ins, outs: per group, what it reads and what it writes.
        read: value -> the first group that reads it.
        made: value -> the last group that writes it.
    """

    def __init__(self, graph: Graph, program: Program, bounds: Bounds) -> None:
        self._values: dict[Value, int] = {}
        self.given = {*self._numbers([Value(t, p) for t, p in program.inputs.items()])}
        ends = [self.of(graph, program.instructions[a:b]) for a, b in bounds]
        self.ins, self.outs = [ins for ins, _ in ends], [outs for _, outs in ends]
        self.read: dict[int, int] = {}
        self.made: dict[int, int] = {}
        for place, (ins, outs) in enumerate(ends):
            for value in ins:
                self.read.setdefault(value, place)
            for value in outs:
                self.made[value] = place

    def of(self, graph: Graph, group: Sequence[Instruction]) -> tuple[list[int], list[int]]:
        """Return the numbers of the values that a group reads, and of those that it writes."""
        return self._numbers(reads(graph, group)), self._numbers(writes(graph, group))

    def _numbers(self, values: Sequence[Value]) -> list[int]:
        numbers = self._values
        return [numbers.setdefault(value, len(numbers)) for value in values]


class ComputingClasses:
    """Classes of a program's operators and updates.

    Attributes:
        of_group: per group, the classes of its nodes in ``computing``.
        updated: classes in ``updating`` of the trained parameters.
    """

    def __init__(
        self, graph: Graph, program: Program, cost: Prices,
        nodes: Sequence[Sequence[tuple[Node, Row]]],
    ) -> None:  # fmt: skip
        self.computing: EquivalenceClasses[tuple[Node, Row]] = EquivalenceClasses()
        self.updating: EquivalenceClasses[str] = EquivalenceClasses()
        self.of_group = [
            tuple(self.computing.number(_compute_key(graph, cost, *e), e) for e in group)
            for group in nodes
        ]
        self.updated = [
            self.updating.number(
                (_shape_and_dtype(graph.tensors[i.tensor]),
                 cost.parts.value_key(i.tensor, program.inputs[i.tensor])),
                i.tensor,
            )
            for i in graph.role("parameter") if i.target in graph.gradients
        ]  # fmt: skip


class SuperstepRows:
    """The computing between collectives, as rows of a table of seconds.

    The table has a row of zeros, one for each class of operators, one for each class of updates, and one for
    each class of conversions without communication.

    Attributes:
        work: the classes of operators and updates.
        local: a group of each class of conversions without communication.
        collectives: the groups that communicate; a superstep ends with each, and one after the last.
        rows: rows of the table, superstep by superstep.
        starts: the first of ``rows`` of each superstep.
    """

    def __init__(
        self, structure: CostStructure, graph: Graph, program: Program, cost: Prices,
        crossings: Collection[int],
    ) -> None:  # fmt: skip
        self.work = work = structure.work(graph, program, cost)
        updates = 1 + len(work.computing.first)
        conversions = updates + len(work.updating.first)
        self.local: list[int] = []
        self.collectives: list[int] = []
        place: dict[int, int] = {}  # class of a conversion without communication -> its row
        rows, starts = [0], [0]  # each superstep has a row
        for at, (first, end) in enumerate(structure.bounds):
            moved = structure.moved[at]
            if at not in crossings:
                rows += [1 + k for k in work.of_group[at]]
            if moved >= 0 and _is_local(program.instructions[first:end]):
                if moved not in place:
                    place[moved] = conversions + len(self.local)
                    self.local.append(at)
                rows.append(place[moved])
            elif moved >= 0 or at in crossings:
                self.collectives.append(at)
                starts.append(len(rows))
                rows.append(0)
        rows += [updates + k for k in work.updated]
        self.rows: Indices = np.array(rows, dtype=np.int64)
        self.starts: Indices = np.array(starts, dtype=np.int64)


def _is_local(group: Sequence[Instruction]) -> bool:
    return next(s for s in group if isinstance(s, Convert)).local


def nodes_and_rows(graph: Graph, group: Sequence[Instruction]) -> list[tuple[Node, Row]]:
    """Return the nodes of a group of instructions, with their rows."""
    return [(graph.by_name[s.node], Row(s.outs, s.ins)) for s in group if isinstance(s, Compute)]


def structure_of(graph: Graph, program: Program, cost: Prices) -> CostStructure:
    """Return the structure of a program, cached in its memo."""
    return _memoized("structure", graph, program, cost)


def unimplemented_structure_of(graph: Graph, program: Program, cost: Prices) -> CostStructure:
    """Return the structure before implementations are chosen, which may split groups."""
    return _memoized("unimplemented structure", graph, program, cost)


def _memoized(name: str, graph: Graph, program: Program, cost: Prices) -> CostStructure:
    found = program.memo.get(name)
    if found is not None and found[0] is graph and found[1].axes == cost.axes:
        structure: CostStructure = found[1]
        return structure
    bounds = program.bounds(graph, named=name == "structure")
    other = program.memo.get("unimplemented structure" if name == "structure" else "structure")
    if other and other[0] is graph and other[1].axes == cost.axes and other[1].bounds == bounds:
        structure = other[1]
    else:
        structure = CostStructure(graph, program, cost, bounds)
    program.memo[name] = graph, structure
    return structure


def _shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype


def _compute_key(graph: Graph, cost: Prices, node: Node, row: Row) -> Hashable:
    """Return a key that is equal for nodes and rows with equal costs under any shares."""
    names, placements = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
    values = tuple(
        cost.parts.value_key(name, p)
        for name, p in zip(names, placements, strict=True)
        if name is not None and p is not None
    )
    return graph.alike[node.name], placements, values, cost.parts.node_key(node)


def _conversion_key(graph: Graph, cost: Prices, step: Convert) -> Hashable:
    """Return the key of a conversion's price and buffers, without its implementation."""
    sides = [(p.kind, cost.parts.value_key(step.tensor, p)) for p in (step.src, step.dst)]
    return _shape_and_dtype(graph.tensors[step.tensor]), tuple(sides)
