"""Plan over two mesh axes: a program between the machines, then one inside each.

Each search is exact on its axis. Several programs between machines (:func:`_between`) each get the
cheapest program inside under the prices of the whole cluster; the best pair under the simulator
wins. Optimality of the pair is not proved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hap.cluster.topology import Cluster
from hap.errors import HapError, NoProgramError
from hap.ir.axes import Axes, Shares
from hap.ir.mesh import Mesh, origin
from hap.ir.placement import Placement
from hap.ir.program import Program
from hap.synthesizer.baselines import data_parallel, expert_parallel, sharded_storage
from hap.synthesizer.candidate import Candidate, Objective, fastest
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.mesh_cost import Between, mesh_cost
from hap.synthesizer.pins import pinned
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.engines import bound, eliminate, eliminate_or_bound
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.shares.share_solver import proportional
from hap.synthesizer.synthesize import Synthesizer

RESTRICTIONS = {
    "data parallel": data_parallel,
    "ZeRO": sharded_storage,
    "expert parallel": expert_parallel,
}
"""Restricted programs between machines, tried besides the best one."""

WAYS = ("the best", *RESTRICTIONS)
"""Programs between machines, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCandidate:
    """A pair of programs; ``pair`` is the one inside, with the timeline of the whole step."""

    between: Between
    pair: Candidate
    cost: CostModel


class InsideSynthesizer(Synthesizer):
    """Searches the step inside a machine, priced on the whole cluster.

    Args:
        pins: placements that programs must have, by the names of the divided graph.
    """

    def __init__(
        self, between: Between, cluster: Cluster, optimizer_states: int, engine: Engine = eliminate,
        exponent: int | None = None, pins: Mapping[str, Placement] | None = None,
    ) -> None:  # fmt: skip
        space = build_space(between.inside())
        allowed = pinned(space, pins) if pins else None
        super().__init__(space, cluster, optimizer_states, allowed, engine, exponent)
        self._between = between

    def starts(self) -> Iterator[Shares]:
        """Yield each machine's part of an axis, in proportion to its devices' speeds.

        Collectives between machines need equal cuts in all of them, by the columns' mean speeds.
        """
        mesh = self._between.mesh
        speeds = self.hardware.speed.reshape(-1, mesh.width)
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
        """Return each machine's units of an axis; ``None`` if every machine has all of it."""
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
        """Return the program; its storage keeps the axes of computing, cut to the machines' parts."""
        return program

    def balance(self, pair: Candidate) -> Shares:
        """Return the pair's shares: those between machines are already balanced."""
        return pair.shares

    def _model(self, axes: Axes, shares: Shares) -> CostModel:
        graph, states = self.space.graph, self._states
        return mesh_cost(self._between, graph, axes, self.hardware, shares, states)


def best_on_mesh(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine = eliminate,
    progress: Callable[[str], None] = lambda text: None,
    beat: Callable[[], Objective | None] = lambda: None,
    exponent: int | None = None, allowed: Allowed | None = None, ways: Sequence[str] = WAYS,
) -> MeshCandidate | None:  # fmt: skip
    """Return the best pair of programs over the two axes; ``None`` if there is none.

    Args:
        beat: the objective of a known candidate. Programs between machines are skipped if their
            optimistic time, with each machine as one device, is not below it.
        exponent: first guess of the price of memory.
        allowed: restricts the placements between machines.
        ways: some of :data:`WAYS`.
    """
    mesh = Mesh(cluster)
    found: list[MeshCandidate] = []
    pairs = list(
        _between(space, mesh, optimizer_states, engine, progress, beat, exponent, allowed, ways)
    )
    for name, pair in sorted(pairs, key=lambda named: named[1].least_objective[0] > 0):
        limit = beat()
        if limit and pair.least_objective >= limit:
            continue
        if pair.least_objective[0] and any(not c.pair.least_objective[0] for c in found):
            continue  # it lacks memory even with each machine as one device
        progress(f"search inside the machines, with {name} between them")
        between = Between(mesh=mesh, graph=space.graph, program=pair.program, shares=_used(pair))
        inside = InsideSynthesizer(between, cluster, optimizer_states, engine, exponent)
        try:
            best = inside.search(next(inside.starts()), beat())
        except HapError as error:
            progress(f"{name} between machines: no program inside them ({error.what})")
            continue
        if inside.gap:
            progress(f"a search was cut short, at most {inside.gap:.2%} above the optimum")
        found.append(MeshCandidate(between=between, pair=best, cost=inside.cost(best)))
    return _fastest(found, beat())


def _fastest(found: Sequence[MeshCandidate], limit: Objective | None) -> MeshCandidate | None:
    """Return the one of the least objective that may be below ``limit``; schedules take long."""
    best = None
    for candidate in sorted(found, key=lambda c: c.pair.least_objective):
        if limit and candidate.pair.least_objective >= limit:
            break  # even with all communication hidden
        objective = candidate.pair.objective
        if best is None or not limit or objective < limit:
            best, limit = candidate, min(limit or objective, objective)
    return best


def _both(first: Allowed, second: Allowed | None) -> Allowed:
    """Allow what both restrictions allow."""
    if second is None:
        return first
    return lambda tensor, p, stored: first(tensor, p, stored) and second(tensor, p, stored)


def _used(pair: Candidate) -> Shares:
    return {axis: pair.shares[axis] for axis in pair.program.used_axes()}


def _between(
    space: Space, mesh: Mesh, optimizer_states: int, engine: Engine, progress: Callable[[str], None],
    beat: Callable[[], Objective | None], exponent: int | None, allowed: Allowed | None = None,
    ways: Sequence[str] = WAYS,
) -> Iterator[tuple[str, Candidate]]:  # fmt: skip
    """Yield programs between machines that deserve a search inside, without repetitions."""
    seen = []
    restricted: dict[str, Allowed | None] = {"the best": allowed}
    for name, restriction in RESTRICTIONS.items():
        with contextlib.suppress(HapError):  # the model has no batch dim, or no experts
            restricted[name] = _both(restriction(space), allowed)
    for name in (name for name in ways if name in restricted):
        way = restricted[name]
        # A restricted space is small, even where the whole one is too entangled.
        own = eliminate_or_bound if way and engine is bound else engine
        synthesizer = Synthesizer(space, mesh.between, optimizer_states, way, own, exponent)
        try:
            pair = synthesizer.search(next(synthesizer.starts()), beat())
        except HapError as error:
            if not isinstance(error, NoProgramError):
                progress(f"{name} between machines: no program ({error.what})")
            continue
        exponent = synthesizer.exponent
        balanced = synthesizer.judge(pair.program, synthesizer.balance(pair))
        # A machine with an empty share of some axis has no step to run.
        pairs = [p for p in (pair, balanced) if all(map(all, _used(p).values()))]
        pair = fastest(pairs or [pair])
        if pairs and (pair.program, pair.shares) not in seen:
            seen.append((pair.program, pair.shares))
            yield name, pair
