"""The cost model of a program inside the machines, for all ranks of the cluster at once.

A rank's part of a tensor is its machine's part times its own part of that. Machines convert
their parts in parallel; collectives between machines are operators of the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hap.cluster.link import messages
from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph, Node
from hap.ir.mesh import Mesh, divide, is_mesh_op, origin, step_ends
from hap.ir.placement import LOCAL, Placement
from hap.ir.program import BETWEEN, Program
from hap.synthesizer.cost.collective_cost import Fractions, NetworkModel, Quote
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.parts import Parts
from hap.synthesizer.rules.rule_table import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """A program between machines and its shares, in units per machine."""

    mesh: Mesh
    graph: Graph
    program: Program
    shares: Shares

    def inside(self) -> Graph:
        """The step that remains for a machine, with the sizes of the whole."""
        return divide(self.graph, self.program, self.shares)


class MeshNetwork:
    """:class:`NetworkModel` for the machines' rings in parallel; the slowest machine counts.

    Parts are those of the whole tensor, for all ranks; every machine converts its own part.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._rings = [NetworkModel(mesh.inside(m)) for m in range(len(mesh.machines))]

    def choices(
        self, kind: str, nbytes: int, src: Fractions, dst: Fractions, *, start: bool = True
    ) -> list[Quote]:
        """Return implementations of a collective; all machines run the same one."""
        slowest: dict[str, float] = {}
        asked = set()
        width = self._mesh.width
        for ring, ranks in zip(self._rings, self._mesh.machines, strict=True):
            mine = slice(ranks[0], ranks[0] + width)
            s, d = src[mine], dst[mine]
            key = (ring.bytes_per_s, ring.latency_s, s.tobytes(), d.tobytes())
            if key in asked:
                continue
            asked.add(key)
            split = d if kind == "reduce_scatter" else s
            whole = float(split.sum() if _splits(kind) else split[0])
            if not whole:
                continue
            part = round(nbytes * whole)
            scale = 1 / whole if _splits(kind) else 1.0
            for how, seconds in ring.choices(kind, part, s * scale, d * scale, start=start):
                slowest[how] = max(slowest.get(how, 0.0), seconds)
        found = [Quote(how, seconds) for how, seconds in slowest.items()]
        return sorted(found, key=lambda choice: choice.seconds)


def _splits(kind: str) -> bool:
    return kind in ("all_gather", "reduce_scatter", "all_to_all")


class MeshParts(Parts):
    """Parts of the whole tensor per rank: the machine's part times the rank's part of that.

    Args:
        shares: units per rank of the whole cluster, as in :class:`hap.ir.mesh.Inside`.
    """

    def __init__(self, between: Between, axes: Axes, world_size: int, shares: Shares) -> None:
        width = between.mesh.width
        super().__init__(axes, world_size, width)
        self._between = between
        vectors: dict[tuple[int, ...], PerRank] = {}
        for units in shares.values():
            if units not in vectors:
                own = np.array(units, dtype=np.float64).reshape(-1, width)
                total = own.sum(axis=1, keepdims=True)
                vectors[units] = (own / np.maximum(total, 1)).ravel()
        self._inner = {name: vectors[units] for name, units in shares.items()}
        self._of_machine: dict[tuple[int, ...], PerRank] = {}
        self._outer: dict[str, PerRank] = {}
        self._product: dict[tuple[int, int], PerRank] = {}

    def of(self, tensor: str, placement: Placement) -> PerRank:
        outer = self._machines(tensor)
        if not placement.sharded:
            return outer
        inner = self._inner[self.axes.of[tensor, placement.dim]]
        key = (id(outer), id(inner))
        if key not in self._product:
            self._product[key] = outer * inner
        return self._product[key]

    def of_work(self, node: Node, row: Row) -> PerRank:
        outer = inner = self.one
        names = (*node.inputs, *node.outputs)
        for name, p in zip(names, (*row.ins, *row.outs), strict=True):
            if name is None or p is None:
                continue
            outer = self._machines(name) if outer is self.one else outer
            if p.sharded and inner is self.one:
                inner = self._inner[self.axes.of[name, p.dim]]
        return outer * inner

    def axis_key(self, axis: str) -> Hashable:
        return id(self._inner[axis])

    def tensor_key(self, tensor: str) -> Hashable:
        return id(self._machines(tensor))

    def _machines(self, tensor: str) -> PerRank:
        """Return each rank's machine's part of a tensor."""
        found = self._outer.get(tensor)
        if found is None:
            found = self._outer[tensor] = self._machines_part(tensor)
        return found

    def _machines_part(self, tensor: str) -> PerRank:
        value = origin(tensor)
        if not value.placement.sharded:
            return self.one
        axis = self._between.program.axis(value.tensor, value.placement.dim)[0]
        units = self._between.shares[axis]
        if units not in self._of_machine:
            parts = np.array(units, dtype=np.float64) / sum(units)
            self._of_machine[units] = np.repeat(parts, self._between.mesh.width)
        return self._of_machine[units]


class MeshCrossing:
    """Prices of collectives between machines; tensors not sharded inside cross once per column."""

    def __init__(self, mesh: Mesh, graph: Graph) -> None:
        self._mesh, self._graph = mesh, graph
        self._network = NetworkModel(mesh.between)
        self._ends = step_ends(graph)

    def cross(self, group: Sequence[tuple[Node, Row]]) -> tuple[float, int] | None:
        """Return (seconds, messages) of neighbours that run as one; ``None`` for other nodes."""
        seconds = self._seconds(group, start=True)
        if seconds is None:
            return None
        return seconds, messages(group[0][0].op.removeprefix(BETWEEN), len(self._mesh.machines))

    def searched_s(self, node: Node, row: Row) -> float | None:
        """Return seconds of one collective in a search; without the start at the step's ends."""
        start = bool(node.inputs[:1]) and node.inputs[0] not in self._ends
        return self._seconds([(node, row)], start=start)

    def _seconds(self, group: Sequence[tuple[Node, Row]], *, start: bool) -> float | None:
        op = group[0][0].op
        if not is_mesh_op(op) or op.removeprefix(BETWEEN) in LOCAL:
            return None
        cuts = [self._cut(node) for node, _ in group]
        nbytes = np.array([self._crossing_bytes(node, row) for node, row in group])
        total = float(nbytes.sum())
        src, dst = (
            np.sum([n * cut[side] for n, cut in zip(nbytes, cuts, strict=True)], axis=0) / total
            for side in (0, 1)
        )
        how = str(group[0][0].args[-1])
        kind = op.removeprefix(BETWEEN)
        choices = self._network.choices(kind, round(total), src, dst, start=start)
        return next(c.seconds for c in choices if c.implementation == how)

    def _crossing_bytes(self, node: Node, row: Row) -> float:
        columns = 1 if row.ins[0].sharded else self._mesh.width
        return float(self._graph.tensors[node.inputs[0]].nbytes * columns)

    def _cut(self, node: Node) -> tuple[PerRank, PerRank]:
        """Return the machines' parts of a tensor before and after a collective, if sharded."""
        vectors = [np.array(a, dtype=np.float64) for a in node.args[1:] if isinstance(a, tuple)]
        parts = [v / v.sum() for v in vectors]
        one = np.ones(len(self._mesh.machines))
        if node.op == "mesh.all_to_all":
            return parts[0], parts[1]
        if node.op == "mesh.all_gather":
            return parts[0], one
        return one, parts[0] if parts else one


def mesh_cost(
    between: Between, graph: Graph, axes: Axes, hardware: HardwareModel, shares: Shares,
    optimizer_states: int,
) -> CostModel:  # fmt: skip
    """Return the cost model of a program inside, under shares as for :class:`MeshParts`."""
    mesh = between.mesh
    parts = MeshParts(between, axes, hardware.cluster.world_size, shares)
    network, crossing = MeshNetwork(mesh), MeshCrossing(mesh, graph)
    return CostModel(graph, axes, hardware, parts, optimizer_states, network, crossing)
