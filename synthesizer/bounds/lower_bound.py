"""Proved lower bounds of the step time, and the programs that attain them.

A step (:mod:`hap.synthesizer.schedule.event_simulator`) is as long as each of its streams at least: what a rank
``r`` computes, ``T[r]``, and what the collectives take together, ``C``. Hiding one behind the other
has its price (:mod:`hap.synthesizer.cost.contention`). Each second of a collective takes the rank's
``interference``, ``l[r]`` of a second, from what it computes meanwhile, or passes while it does not
compute::

    step  >=  T[r] + l[r] C                                                             (1)

Let ``d`` be the least ``drag`` of the ranks. While some rank computes, collectives advance at ``1/d``
of their pace at most; what is left then takes time in which nobody computes. If some rank computes
for ``X`` of the step, ``X >= T[r]`` for all ``r``::

    step  >=  X + (C - X/d)  >=  (1 - 1/d) T[r] + C                                     (2)

So the step is at least any mean of these, with weights ``a, b >= 0`` that sum to 1 (:class:`Hiding`)::

    step  >=  sum_r w[r] T[r] + v C,   w[r] = a[r] + (1 - 1/d) b[r],   v = sum_r a[r] l[r] + b[r]

The right side adds up over operators, so *one exact search* under these prices
(:meth:`Relaxation.search`) gives the least of it over *all* programs, however they overlap: a
lower bound on every one of them. ``v`` is the price that communication has when computing can
hide it. The dual of the maximum is to choose the weights: :meth:`Relaxation.weights` takes those
under which the programs found so far look worst, by cutting planes (Kelley, "The cutting-plane
method for solving convex programs", 1960), and every program on the way is a candidate.

Two sets of prices:

* :class:`FixedShares`: the shares are given, ``T`` is exact. The bound holds for every program
  under these shares.
* :class:`AnyShares`: every axis may have any shares of its own. An operator that is split with
  parts ``p`` takes rank ``r`` at least ``p[r] t[r]``, where ``t[r]`` is its time for the whole
  operator: arithmetic and traffic grow linearly, and what does not (the start, operands that
  are read whole) is paid by whoever has a part. As the parts sum to 1,

      sum_r w[r] p[r] t[r]  >=  min_r w[r] t[r]                                         (3)

  whatever the parts. So it is a bound on every *pair* of program and shares.

Collectives are priced from below (:meth:`hap.synthesizer.cost.collective_cost.NetworkModel.floor_s` for any
shares). The simulator runs neighbouring collectives of one kind as one, which then pay for one
start. Bytes add up; of the start each is charged a part, such that no group that can form is
charged more than one (:func:`start_parts`). Floors are sums or minima of sums of what is linear
in bytes and starts, so that those of a group's members never exceed the group's. Under fixed
shares, what can run fused is priced by its floor as well, since the largest part of several is
less than the sum of the largest; and so is what may lie in shares of its own between steps
(:func:`_storable`): the shares that are fixed are those of computing.

Memory is ignored: a plan that must also fit is no faster. Prices are rounded to picoseconds;
:meth:`Relaxation.search` takes off what rounding may have added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ortools.linear_solver import pywraplp

from hap.ir.axes import Shares
from hap.ir.graph import FREE, Graph, Node, Tensor
from hap.ir.placement import LOCAL, Placement, R, conversion
from hap.ir.program import FUSIBLE, Program
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.cost_model import CostModel, Machine, PerRank
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs, Labelling
from hap.synthesizer.search.cost_tables import PICOSECONDS, Aims, Allowed, Problem
from hap.synthesizer.search.engines import eliminate_or_bound
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.search.search_result import SearchStatus

Floats = npt.NDArray[np.float64]

Weights = Floats
"""One number per class of ranks, and one for the links: see :meth:`Hiding.mean`."""

_SAFE = 1.0 - 1e-9
"""Takes off what floating point may have added to a sum; far more than it can."""


def start_parts(space: Space) -> dict[str, float]:
    """Tensor -> the part of a collective's start that its conversion surely pays for.

    A conversion stands right before its tensor's first reader, so what can run as one with it
    are conversions of that reader's other inputs of one dtype: of ``k`` each pays for ``1/k``.
    Those of all outputs stand together as well. Parameters, which are gathered together at
    the start of the step, and gradients, reduced at its end, pay nothing.
    """
    graph = space.graph
    outputs = [o.tensor for o in graph.outputs if o.role != "gradient"]
    parameters = {i.tensor for i in graph.role("parameter")}
    fixed = {name for name, held in space.holdings.items() if len(held) == 1}
    parts: dict[str, float] = {}
    for name, tensor in graph.tensors.items():
        groups = [n.inputs for n in graph.consumers[name]] + [outputs] * (name in outputs)
        rivals = [
            sum(graph.tensors[m].dtype == tensor.dtype for m in set(group) - parameters - fixed)
            for group in groups
        ]
        parts[name] = 1.0 / max(1, *rivals, 1)
    parts.update(dict.fromkeys(parameters, 0.0))
    parts.update(dict.fromkeys(graph.gradients.values(), 0.0))
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Hiding:
    """What hiding costs: ``pace`` is ``1/d`` of (2), ``lost`` per class of ranks ``l`` of (1)."""

    pace: float
    lost: Floats

    def mean(self, computing: Floats, communicating: Floats) -> Weights:
        """The weights of a mean of (1) and (2), in proportion to what is given per class."""
        w = computing + (1 - self.pace) * communicating
        v = computing @ self.lost + communicating.sum()
        total: Weights = np.append(w, v) / (computing.sum() + communicating.sum())
        return total


class Floors(CostModel, ABC):
    """Prices that are never above the simulator's; what is never read is converted for nothing.

    The times of a label are given per *class* of ranks, as a vector or as a matrix: one row
    per way in which the shares may turn out, of which the cheapest counts (:func:`_weighted`).
    """

    def __init__(self, space: Space, machine: Machine, shares: Shares, states: int) -> None:
        super().__init__(space.graph, space.axes, machine, shares, states)
        self._starts = start_parts(space)
        self._ranks: list[int] = []
        """One of each class."""
        graph = space.graph
        self._read = {o.tensor for o in graph.outputs}
        self._read |= {name for name, readers in graph.consumers.items() if readers}

    @property
    def hiding(self) -> Hiding:
        """What the weights of :meth:`Hiding.mean` depend on."""
        return Hiding(1.0 / float(self.machine.drag.min()), self.machine.interference[self._ranks])

    def alike(self, tensor: str) -> object:
        return self._starts[tensor], tensor in self._read

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        kind = conversion(src, dst)
        if kind is None or tensor.name not in self._read:
            return [Quote("", 0.0)]
        if kind in LOCAL:
            return [Quote("", 0.0)]  # a copy, beside the products that a step is made of
        return [Quote("", self._collective(kind, tensor, src, dst))]

    @abstractmethod
    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        """Seconds of a collective, at most what the simulator charges for it."""


class FixedShares(Floors):
    """The prices of given shares. Ranks with alike devices and equal parts are one class."""

    def __init__(self, space: Space, machine: Machine, shares: Shares, states: int) -> None:
        super().__init__(space, machine, shares, states)
        names = list(space.axes.axes)
        type_of = {r: k for k, ranks in enumerate(machine.cluster.types()) for r in ranks}
        alike = [(type_of[r], *(shares[name][r] for name in names)) for r in sorted(type_of)]
        first = {key: rank for rank, key in reversed(list(enumerate(alike)))}
        self._ranks = sorted(first.values())
        self._class_of = [self._ranks.index(first[key]) for key in alike]
        self._sizes = np.bincount(self._class_of)
        self._first = {n for node in space.graph.nodes[:1] for n in node.inputs}
        self._apart = _storable(space.graph)

    @property
    def proportional(self) -> Weights:
        """Weights in proportion to the ranks' speed, summed over each class; half is the links'."""
        speed = np.bincount(self._class_of, self.machine.speed, len(self._ranks)).astype(np.float64)
        return self.hiding.mean(speed, speed)

    def per_class(self, per_rank: PerRank) -> Floats:
        """A vector over ranks as one over classes, whose ranks are all alike in it."""
        chosen: Floats = per_rank[self._ranks]
        return chosen

    def compute(self, node: Node, row: Row) -> Floats:
        return self.per_class(super().compute(node, row))

    def update(self, parameter: Tensor, stored: Placement) -> Floats:
        if not stored.sharded:
            return self.per_class(super().update(parameter, stored))
        whole = self.per_class(super().update(parameter, R))  # the shares of storing are free
        return np.diag(whole / self._sizes)

    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        start = self._starts[tensor.name] if kind in FUSIBLE else 1.0
        fused = start < 1 or tensor.name in self._first
        if tensor.name in self._apart or (kind in FUSIBLE and fused):
            return self.network.floor_s(kind, tensor.nbytes, start=start)
        sides = self.parts(tensor, src), self.parts(tensor, dst)
        return self.network.choices(kind, tensor.nbytes, *sides, start=start)[0].seconds


def _storable(graph: Graph) -> frozenset[str]:
    """What may lie in shares of storing: parameters, gradients, and all that looks at them."""
    found = {i.tensor for i in graph.role("parameter")} | set(graph.gradients.values())
    for node in graph.nodes:
        if node.op in FREE and found.intersection(node.inputs):
            found.update(o for o in node.outputs if o)
    for node in reversed(graph.nodes):
        if node.op in FREE and found.intersection(o for o in node.outputs if o):
            found.update(node.inputs)
    return frozenset(found)


class AnyShares(Floors):
    """Prices below those of all shares. Ranks with alike devices are one class."""

    def __init__(self, space: Space, machine: Machine, states: int) -> None:
        one = np.ones(machine.cluster.world_size, dtype=int)
        shares = {name: tuple(one.tolist()) for name in space.axes.axes}
        super().__init__(space, machine, shares, states)
        types = machine.cluster.types()
        self._ranks = [ranks[0] for ranks in types]
        self._sizes = np.array([len(ranks) for ranks in types], dtype=np.float64)
        self._made: dict[tuple[int, bool], Floats] = {}

    @property
    def proportional(self) -> Weights:
        """Weights in proportion to the classes' speed, under which a product costs the same on
        any shares; half is the links'."""
        speed = self.machine.speed[self._ranks] * self._sizes
        return self.hiding.mean(speed, speed)

    def parts(self, tensor: Tensor, placement: Placement) -> PerRank:
        return self._one  # each rank as if it did all of it: t[r] of (3)

    def lies(self, axis: str) -> Hashable:
        return None

    def compute(self, node: Node, row: Row) -> Floats:
        split = any(p is not None and p.sharded for p in (*row.ins, *row.outs))
        return self._ways(super().compute(node, row), split)

    def update(self, parameter: Tensor, stored: Placement) -> Floats:
        return self._ways(super().update(parameter, stored), stored.sharded)

    def _ways(self, whole_s: PerRank, split: bool) -> Floats:
        """The whole on every rank, or all of it on one class, shared evenly inside of it."""
        key = (id(whole_s), split)
        if key not in self._made:
            each = whole_s[self._ranks]
            self._made[key] = np.diag(each / self._sizes) if split else each
        return self._made[key]

    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        start = self._starts[tensor.name] if kind in FUSIBLE else 1.0
        return self.network.floor_s(kind, tensor.nbytes, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundResult:
    """A program and what it costs as a function of the weights: :meth:`at`.

    The sum of ``whole_s`` weighted, the communicating last, and for every entry of ``ways``
    (entry, way, class) of the cheapest way.
    """

    labelling: Labelling
    whole_s: Floats
    ways: Floats

    def at(self, weights: Weights) -> float:
        """Seconds under given weights; concave in them."""
        return float(weights @ self.cut(weights))

    def cut(self, weights: Weights) -> Floats:
        """The seconds per class of the ways that are cheapest there: a supergradient."""
        if not len(self.ways):
            return self.whole_s
        cheapest = (self.ways @ weights[:-1]).argmin(axis=1)
        ways = self.ways[np.arange(len(cheapest)), cheapest].sum(axis=0)
        total: Floats = self.whole_s + np.append(ways, 0.0)
        return total


class Relaxation:
    """Searches under weighted prices; the best lower bound and all programs found.

    Args:
        allowed: as of :class:`hap.synthesizer.search.cost_tables.Problem`.
    """

    def __init__(self, space: Space, prices: Floors, allowed: Allowed | None = None) -> None:
        self._space, self._prices = space, prices
        self._problem = Problem(space, prices, Aims(time=lambda v: 0.0), allowed)
        self._timed = list(self._problem.timed())
        # Every entry is rounded once; no label's cost has more than this many entries.
        degree = 2 * len(space.graph.nodes) + sum(len(n.inputs) for n in space.graph.nodes)
        self._rounding = degree + 4 * len(space.graph.tensors)
        self.found: list[BoundResult] = []
        self.bound_s = 0.0
        self.searches = 0

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that were found, the first first."""
        unlike = {f.labelling.labels: f.labelling for f in self.found}
        return tuple(self._problem.program(labelling) for labelling in unlike.values())

    def search(self, weights: Weights) -> BoundResult | None:
        """The cheapest program under given weights; raises ``bound_s`` if it is a better bound.

        ``None`` if the allowed placements admit no program, or none was found.
        """
        link = float(weights[-1])
        scaled: dict[int, Costs] = {}  # by identity: what looks alike has one table
        unary = [_scaled(costs, link, scaled) for costs in self._problem.unary]
        pairs = {at: _scaled(table, link, scaled) for at, table in self._problem.pairs.items()}
        alike: dict[int, Costs] = {}
        for variable, seconds in self._timed:
            if id(seconds) not in alike:
                alike[id(seconds)] = _weighted(seconds, weights[:-1])
            unary[variable] = alike[id(seconds)]
        outcome = eliminate_or_bound(unary, pairs)
        self.searches += 1
        if outcome.status is SearchStatus.INFEASIBLE:
            return None
        bound_s = (outcome.bound - self._rounding) / PICOSECONDS * _SAFE
        self.bound_s = max(self.bound_s, bound_s)
        return self.adopt(outcome.labelling) if outcome.labelling else None

    def adopt(self, labelling: Labelling) -> BoundResult:
        """Price a program of the same space, found under whatever prices."""
        classes = len(self._prices.hiding.lost)
        labels = labelling.labels
        chosen = [seconds[labels[v]] for v, seconds in self._timed]
        whole = [s for s in chosen if s.ndim == 1]
        ways = [s for s in chosen if s.ndim == 2]
        unary, pairs = self._problem.unary, self._problem.pairs
        constant = sum(int(costs[x]) for costs, x in zip(unary, labels, strict=True))
        constant += sum(int(table[labels[u], labels[v]]) for (u, v), table in pairs.items())
        found = BoundResult(
            labelling=labelling,
            whole_s=np.append(
                np.sum([np.zeros(classes), *whole], axis=0), constant / PICOSECONDS
            ),
            ways=np.array(ways) if ways else np.zeros((0, 1, classes)),
        )  # fmt: skip
        self.found.append(found)
        return found

    def weights(self) -> Weights:
        """The weights under which the cheapest of the programs found is dearest."""
        return dearest(self.found, self._prices.hiding)

    def run(self, start: Weights, searches: int, enough_s: float = np.inf) -> None:
        """Search from ``start`` on, until nothing can be gained or the bound is enough."""
        weights = start
        for _ in range(searches):
            found = self.search(weights)
            if found is None or self.bound_s >= enough_s:
                return
            weights = self.weights()
            best = min(f.at(weights) for f in self.found)
            if best <= self.bound_s * (1 + 1e-6):
                return


def dearest(found: Sequence[BoundResult], hiding: Hiding) -> Weights:
    """Maximise the least of ``found`` over the weights, which is concave: cutting planes again.

    The programs are known, so that this costs no search; a few linear programs with a variable
    per class.
    """
    ones = np.ones_like(hiding.lost)
    weights = hiding.mean(ones, ones)
    scale = 1.0 / min(f.at(weights) for f in found)
    cuts: list[Floats] = []
    best, best_s = weights, 0.0
    claimed = np.inf  # what the linear programs still hope for
    for _ in range(_CUTS):
        reached = min(f.at(weights) for f in found) * scale
        if reached > best_s:
            best, best_s = weights, reached
        if claimed - best_s < _CLOSE:
            break
        cuts += [
            f.cut(weights) * scale for f in found
            if f.at(weights) * scale < claimed - _CLOSE / 2  # else its cut says nothing new
        ]  # fmt: skip
        highest = _highest(cuts, hiding)
        if highest is None:
            break
        weights, claimed = highest
    return best


def _highest(cuts: Sequence[Floats], hiding: Hiding) -> tuple[Weights, float] | None:
    """The weights where the lowest of planes is highest, and its height.

    Planes are ``slopes @ weights``. ``None`` if they are so nearly parallel that the solver
    gives up: any weights give a true bound, so that no more than its height is lost.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    classes = len(hiding.lost)
    parts = [solver.NumVar(0.0, 1.0, f"part{k}") for k in range(2 * classes)]
    least = solver.NumVar(0.0, solver.infinity(), "least")
    solver.Add(solver.Sum(parts) == 1)
    one = np.eye(2 * classes)
    corners = np.array([hiding.mean(*np.split(corner, 2)) for corner in one])
    for slopes in cuts:
        heights = (corners @ slopes).tolist()
        solver.Add(least <= solver.Sum([h * x for h, x in zip(heights, parts, strict=True)]))
    solver.Maximize(least)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    found = np.maximum([x.solution_value() for x in parts], 0.0)
    return hiding.mean(*np.split(found, 2)), float(least.solution_value())


_CLOSE = 1e-6
"""Relative difference below which two values of the master problem are one."""

_CUTS = 40
"""Linear programs of one master problem; two to five classes take about ten."""


def _scaled(costs: Costs, factor: float, known: dict[int, Costs]) -> Costs:
    """Costs of communicating by the weight of the links; what is forbidden stays so."""
    if id(costs) not in known:
        part = np.round(costs * factor).astype(np.int64)
        known[id(costs)] = np.where(costs >= FORBIDDEN, costs, part)
    return known[id(costs)]


def _weighted(seconds: Sequence[Floats], weights: Floats) -> Costs:
    """The costs of a variable's labels in integer picoseconds."""
    costs = [float(np.min(s @ weights)) for s in seconds]
    return np.array(np.round(np.array(costs) * PICOSECONDS), dtype=np.int64)
