"""Plan over two mesh axes: a program between the machines, then one inside each.

The search is exact per axis. The program between is the best of its space with whole machines
as devices; of several such programs (:func:`_between`), each gets the cheapest program inside
under the prices of the whole cluster, collectives between machines included, and the best pair
under the simulator wins. That no other pair is better is not proved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hap.cluster.link import messages
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.mesh import Mesh, divide, ends, is_mesh_op, origin
from hap.ir.placement import LOCAL, Placement
from hap.ir.program import BETWEEN, Program
from hap.synthesizer.baselines import data_parallel, expert_parallel, sharded_storage
from hap.synthesizer.candidate import Candidate, fastest
from hap.synthesizer.cost.collective_cost import Fractions, NetworkModel, Quote
from hap.synthesizer.cost.cost_model import CostModel, Machine, PerRank
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.engines import eliminate
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.shares.share_solver import proportional
from hap.synthesizer.synthesize import Synthesizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """A program between machines and its shares, in units per machine."""

    mesh: Mesh
    graph: Graph
    program: Program
    shares: Shares

    def inside(self) -> Graph:
        """The step that is left to a machine, with the sizes of the whole."""
        return divide(self.graph, self.program, self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCandidate:
    """A pair of programs; ``pair`` is the one inside, its timeline that of the whole step."""

    between: Between
    pair: Candidate
    cost: CostModel


class MeshNetwork:
    """What :class:`NetworkModel` tells of one ring, for the machines' rings side by side.

    Parts are those of the whole tensor, for all ranks; every machine converts its own part of
    it at the same time, and the slowest machine counts.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._rings = [NetworkModel(mesh.inside(m)) for m in range(len(mesh.machines))]

    def choices(
        self, kind: str, nbytes: int, src: Fractions, dst: Fractions, *, start: bool = True
    ) -> list[Quote]:
        """As :meth:`NetworkModel.choices`; the implementations of which all machines run one."""
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


class MeshCost(CostModel):
    """Prices of the program inside, for all ranks of the cluster at once.

    A rank's part of a tensor is its machine's part times its own part of that.

    Args:
        shares: units per rank of the whole cluster, as :class:`hap.ir.mesh.Inside` has them.
    """

    def __init__(
        self, between: Between, graph: Graph, axes: Axes, machine: Machine, shares: Shares,
        optimizer_states: int,
    ) -> None:  # fmt: skip
        super().__init__(graph, axes, machine, {}, optimizer_states)
        mesh = between.mesh
        self.network = MeshNetwork(mesh)  # type: ignore[assignment]
        self.ring_size = mesh.width
        self._between = between
        self._slow = NetworkModel(mesh.between)
        self._ends = ends(graph)
        vectors: dict[tuple[int, ...], PerRank] = {}
        for units in shares.values():
            if units not in vectors:
                own = np.array(units, dtype=np.float64).reshape(-1, mesh.width)
                total = own.sum(axis=1, keepdims=True)
                vectors[units] = (own / np.maximum(total, 1)).ravel()
        self._parts = {name: vectors[units] for name, units in shares.items()}
        self._of_machine: dict[tuple[int, ...], PerRank] = {}
        self._origin: dict[str, PerRank] = {}
        self._product: dict[tuple[int, int], PerRank] = {}

    def outer(self, tensor: str) -> PerRank:
        """Each rank's machine's part of a tensor."""
        found = self._origin.get(tensor)
        if found is None:
            found = self._origin[tensor] = self._outer(tensor)
        return found

    def _outer(self, tensor: str) -> PerRank:
        value = origin(tensor)
        if not value.placement.sharded:
            return self._one
        axis = self._between.program.axis(value.tensor, value.placement.dim)[0]
        units = self._between.shares[axis]
        if units not in self._of_machine:
            parts = np.array(units, dtype=np.float64) / sum(units)
            self._of_machine[units] = np.repeat(parts, self._between.mesh.width)
        return self._of_machine[units]

    def where(self, tensor: str, placement: Placement) -> Hashable:
        return super().where(tensor, placement), self.alike(tensor)

    def alike(self, tensor: str) -> Hashable:
        """The machines' parts of it."""
        return id(self.outer(tensor))

    def around(self, node: Node) -> Hashable:
        if is_mesh_op(node.op):  # what crosses between machines has arguments of its own
            return node.name
        return tuple(id(self.outer(name)) for name in (*node.inputs, *node.outputs) if name)

    def parts(self, tensor: Tensor, placement: Placement) -> PerRank:
        outer = self.outer(tensor.name)
        if not placement.sharded:
            return outer
        inner = self._parts[self.axes.of[tensor.name, placement.dim]]
        key = (id(outer), id(inner))
        if key not in self._product:
            self._product[key] = outer * inner
        return self._product[key]

    def whole_bytes(self, tensor: Tensor) -> PerRank:
        return tensor.nbytes * self.outer(tensor.name)

    def share(self, node: Node, row: Row) -> PerRank:
        """Each rank's part of an operator's arithmetic."""
        outer = inner = self._one
        names = (*node.inputs, *node.outputs)
        for name, p in zip(names, (*row.ins, *row.outs), strict=True):
            if name is None or p is None:
                continue
            outer = self.outer(name) if outer is self._one else outer
            if p.sharded and inner is self._one:
                inner = self._parts[self.axes.of[name, p.dim]]
        return outer * inner

    def compute(self, node: Node, row: Row) -> PerRank:
        start = node.inputs[:1] and node.inputs[0] not in self._ends
        seconds = self.cross([(node, row)], start=bool(start))
        return super().compute(node, row) if seconds is None else np.full_like(self._one, seconds)

    def cross(self, group: Sequence[tuple[Node, Row]], *, start: bool = True) -> float | None:
        """Seconds of neighbouring collectives between machines, run as one.

        All columns use their machine's adapter at once: what is split inside crosses once,
        what is not once per device.
        """
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
        choices = self._slow.choices(op.removeprefix(BETWEEN), round(total), src, dst, start=start)
        return next(c.seconds for c in choices if c.implementation == how)

    def crossing_messages(self, group: Sequence[tuple[Node, Row]]) -> int:
        kind = group[0][0].op.removeprefix(BETWEEN)
        return messages(kind, len(self._between.mesh.machines))

    def _crossing_bytes(self, node: Node, row: Row) -> float:
        columns = 1 if row.ins[0].sharded else self._between.mesh.width
        return float(self.graph.tensors[node.inputs[0]].nbytes * columns)

    def _cut(self, node: Node) -> tuple[PerRank, PerRank]:
        """The machines' parts of a tensor before and after a collective, where it is sharded."""
        vectors = [np.array(a, dtype=np.float64) for a in node.args[1:] if isinstance(a, tuple)]
        parts = [v / v.sum() for v in vectors]
        one = np.ones(len(self._between.mesh.machines))
        if node.op == "mesh.all_to_all":
            return parts[0], parts[1]
        if node.op == "mesh.all_gather":
            return parts[0], one
        return one, parts[0] if parts else one


class InsideSynthesizer(Synthesizer):
    """Searches the step that is left to a machine, priced on the whole cluster."""

    def __init__(
        self, between: Between, cluster: Cluster, optimizer_states: int, engine: Engine = eliminate,
        exponent: int | None = None,
    ) -> None:  # fmt: skip
        space = build_space(between.inside())
        super().__init__(space, cluster, optimizer_states, engine=engine, exponent=exponent)
        self._between = between

    def starts(self) -> Iterator[Shares]:
        """Each machine's part of an axis in proportion to its devices' speeds.

        What crosses between machines must be cut alike in all of them: there the columns'
        mean speeds decide.
        """
        mesh = self._between.mesh
        speeds = self.machine.speed.reshape(-1, mesh.width)
        columns = (speeds / speeds.sum(axis=1, keepdims=True)).mean(axis=0)
        shares = {}
        for name, axis in self.space.axes.axes.items():
            units = self._units_of(name)
            if units is None:
                shares[name] = proportional(axis.units, columns) * len(mesh.machines)
            else:
                own = [proportional(n, s) for n, s in zip(units, speeds, strict=True)]
                shares[name] = tuple(n for machine in own for n in machine)
        yield shares

    def _units_of(self, axis: str) -> tuple[int, ...] | None:
        """Units that each machine has of an axis; ``None`` if every machine has all of it."""
        tensor, dim = next(d for d, name in self.space.axes.of.items() if name == axis)
        value = origin(tensor)
        if not value.placement.sharded or value.placement.dim != dim:
            return None
        name, total = self._between.program.axis(value.tensor, dim)
        units = self.space.axes.axes[axis].units
        if units % total:
            raise HapError(f"the machines' parts of {name} can't be cut on between {axis}")
        return tuple(n * (units // total) for n in self._between.shares[name])

    def _apart(self, program: Program) -> Program:
        """Storing keeps the axes of computing: they are cut to the machines' parts already."""
        return program

    def balance(self, pair: Candidate) -> Shares:
        """The shares stay as they are: between machines they were balanced before."""
        return pair.shares

    def _cost(self, program: Program | None, shares: Shares) -> CostModel:
        return MeshCost(
            self._between, self.space.graph, self.space.axes, self.machine, shares, self._states
        )


def best_on_mesh(
    space: Space,
    cluster: Cluster,
    optimizer_states: int,
    engine: Engine = eliminate,
    progress: Callable[[str], None] = lambda text: None,
    beat: Candidate | None = None,
    exponent: int | None = None,
) -> MeshCandidate | None:
    """The best pair of programs found over the two axes; ``None`` if there is none.

    Args:
        beat: programs between machines that do not beat it with each machine as one device of
            the sum of its devices' rates, which is the most that a program inside can make of
            them, are not looked into.
        exponent: of the price of memory, where to look for it first.
    """
    mesh = Mesh(cluster)
    found: list[MeshCandidate] = []
    for name, pair in _between(space, mesh, optimizer_states, engine, exponent):
        if beat and pair.floor >= beat.rank:
            continue
        progress(f"search inside the machines, {name} between them")
        between = Between(mesh=mesh, graph=space.graph, program=pair.program, shares=_used(pair))
        inside = InsideSynthesizer(between, cluster, optimizer_states, engine, exponent)
        try:
            best = inside.search(next(inside.starts()))
        except HapError as error:
            progress(f"{name} between machines leads nowhere: {error.what}")
            continue
        exponent = inside.exponent
        found.append(MeshCandidate(between=between, pair=best, cost=inside.cost(best)))
    return min(found, key=lambda c: c.pair.rank, default=None)


RESTRICTIONS = {
    "data parallel": data_parallel,
    "ZeRO": sharded_storage,
    "expert parallel": expert_parallel,
}
"""Programs between machines that are looked for beside the best one."""


def _used(pair: Candidate) -> Shares:
    return {axis: pair.shares[axis] for axis in pair.program.used_axes()}


def _between(
    space: Space, mesh: Mesh, optimizer_states: int, engine: Engine, exponent: int | None
) -> Iterator[tuple[str, Candidate]]:
    """Programs between machines worth a search inside, without repetitions."""
    seen = []
    ways: dict[str, Allowed | None] = {"the best": None}
    for name, restriction in RESTRICTIONS.items():
        with contextlib.suppress(HapError):  # the model has no batch dim, or no experts
            ways[name] = restriction(space)
    for name, allowed in ways.items():
        synthesizer = Synthesizer(
            space, mesh.between, optimizer_states, allowed, engine, exponent
        )  # fmt: skip
        try:
            pair = synthesizer.search(next(synthesizer.starts()))
        except HapError:
            continue  # the model has no such program
        exponent = synthesizer.exponent
        balanced = synthesizer.judge(pair.program, synthesizer.balance(pair))
        # A machine without a share of something has no step to run.
        pairs = [p for p in (pair, balanced) if all(map(all, _used(p).values()))]
        pair = fastest(pairs or [pair])
        if pairs and (pair.program, pair.shares) not in seen:
            seen.append((pair.program, pair.shares))
            yield name, pair
