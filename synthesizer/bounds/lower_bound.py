"""Proved lower bounds of the step time, and the programs that attain them.

A step is at least any weighted mean of its ranks' computing and of all its communication. One exact
search under the weighted prices bounds every program from below; cutting planes find the best
weights (Kelley, 1960). :class:`FixedShares` holds for every program under given shares,
:class:`AnyShares` for every pair of program and shares. Collectives are priced by their floors;
memory is ignored. docs/formulas.md derives the bound; it numbers the inequalities (1) to (3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ortools.linear_solver import pywraplp

from hap.ir.axes import Shares
from hap.ir.graph import FREE, Graph, Node, Tensor
from hap.ir.placement import LOCAL, Placement, R, conversion
from hap.ir.program import FUSIBLE, Convert, Program
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.parts import AxisParts, vectors_of
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs, Labelling
from hap.synthesizer.search.cost_tables import PICOSECONDS, Allowed, Problem
from hap.synthesizer.search.engines import eliminate_or_bound
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.search.search_result import Engine, SearchStatus

Floats = npt.NDArray[np.float64]

Weights = Floats
"""One weight per class of ranks, and one for the links: see :meth:`OverlapPrice.mean`."""

_SAFE = 1.0 - 1e-9
"""Factor that exceeds the rounding errors of a sum, so that the bound stays valid."""


def start_parts(space: Space) -> dict[str, float]:
    """Return tensor -> the part of a collective's start that its conversion pays at least.

    A conversion may be fused with those of its reader's other inputs of the same dtype: each of
    ``k`` then pays ``1/k``; likewise for outputs. Parameters and gradients, which are converted
    together at the ends of the step, pay nothing.
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
class OverlapPrice:
    """The price of overlap: ``pace`` is ``1/d`` of (2), ``lost`` per class of ranks ``l`` of (1)."""

    pace: float
    lost: Floats

    def mean(self, computing: Floats, communicating: Floats) -> Weights:
        """Return the weights of a mean of (1) and (2), proportional to the given ones per class."""
        w = computing + (1 - self.pace) * communicating
        v = computing @ self.lost + communicating.sum()
        total: Weights = np.append(w, v) / (computing.sum() + communicating.sum())
        return total


class Floors(Prices, ABC):
    """Prices that never exceed the simulator's; conversions of unread tensors are free.

    The times of a label are given per *class* of ranks, as a vector or as a matrix with one row
    per possible outcome of the shares, of which the cheapest counts (:func:`_weighted`).
    """

    def __init__(
        self, space: Space, hardware: HardwareModel, vectors: Mapping[str, PerRank], states: int,
        keys: Mapping[str, Hashable] | None = None,
    ) -> None:  # fmt: skip
        graph, world = space.graph, hardware.cluster.world_size
        self._starts = start_parts(space)
        self._ranks: list[int] = []
        """One rank of each class."""
        self._read = {o.tensor for o in graph.outputs}
        self._read |= {name for name, readers in graph.consumers.items() if readers}
        own = {name: (self._starts[name], name in self._read) for name in graph.tensors}
        tensor_keys = {name: (key, keys and keys[name]) for name, key in own.items()}
        parts = AxisParts(space.axes, world, vectors, tensor_keys, hardware.one)
        super().__init__(graph, hardware, parts, states)
        self.network = hardware.network
        self._exact = CostModel(graph, space.axes, hardware, parts, states)

    @property
    def overlap_price(self) -> OverlapPrice:
        """The price of overlap, for the weights of :meth:`OverlapPrice.mean`."""
        return OverlapPrice(
            1.0 / float(self.hardware.drag.min()), self.hardware.interference[self._ranks]
        )

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        kind = conversion(src, dst)
        if kind is None or tensor.name not in self._read:
            return [Quote("", 0.0)]
        if kind in LOCAL:
            return [Quote("", 0.0)]  # a local copy, negligible compared with products
        return [Quote("", self._collective(kind, tensor, src, dst))]

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        """Price a group; each member pays for its part of the start: see :func:`start_parts`."""
        tensors = self.graph.tensors
        each = [self.convert(tensors[c.tensor], c.src, c.dst)[0].seconds for c in group]
        return [Quote("", sum(each))]

    @abstractmethod
    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        """Return seconds of a collective that do not exceed the simulator's price."""


class FixedShares(Floors):
    """The prices of given shares. Ranks with equal devices and equal parts form one class."""

    def __init__(self, space: Space, hardware: HardwareModel, shares: Shares, states: int) -> None:
        super().__init__(space, hardware, vectors_of(shares, hardware), states)
        names = list(space.axes.axes)
        type_of = {r: k for k, ranks in enumerate(hardware.types) for r in ranks}
        alike = [(type_of[r], *(shares[name][r] for name in names)) for r in sorted(type_of)]
        first = {key: rank for rank, key in reversed(list(enumerate(alike)))}
        self._ranks = sorted(first.values())
        self._class_of = [self._ranks.index(first[key]) for key in alike]
        self._sizes = np.bincount(self._class_of)
        self._moved: dict[object, float] = {}
        self._first = {n for node in space.graph.nodes[:1] for n in node.inputs}
        self._apart = _storable(space.graph)

    @property
    def proportional(self) -> Weights:
        """Weights proportional to the ranks' speed, summed over each class; half is the links'."""
        speed = np.bincount(self._class_of, self.hardware.speed, len(self._ranks)).astype(
            np.float64
        )
        return self.overlap_price.mean(speed, speed)

    def per_class(self, per_rank: PerRank) -> Floats:
        """Sum up a vector over ranks by class; ranks of a class have equal entries."""
        chosen: Floats = per_rank[self._ranks]
        return chosen

    def compute(self, node: Node, row: Row) -> Floats:
        return self.per_class(self._exact.compute(node, row))

    def update(self, parameter: Tensor, stored: Placement) -> Floats:
        if not stored.sharded:
            return self.per_class(self._exact.update(parameter, stored))
        whole = self.per_class(self._exact.update(parameter, R))  # storage shares are free
        return np.diag(whole / self._sizes)

    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        start = self._starts[tensor.name] if kind in FUSIBLE else 1.0
        fused = start < 1 or tensor.name in self._first
        if tensor.name in self._apart or (kind in FUSIBLE and fused):
            return self.network.floor_s(kind, tensor.nbytes, start=start)
        sides = self.parts.of(tensor.name, src), self.parts.of(tensor.name, dst)
        key = kind, tensor.nbytes, *map(id, sides), start
        if key not in self._moved:
            choices = self.network.choices(kind, tensor.nbytes, *sides, start=start)
            self._moved[key] = choices[0].seconds
        return self._moved[key]


def _storable(graph: Graph) -> frozenset[str]:
    """Return the tensors that may have storage shares: parameters, gradients, and their views."""
    found = {i.tensor for i in graph.role("parameter")} | set(graph.gradients.values())
    for node in graph.nodes:
        if node.op in FREE and found.intersection(node.inputs):
            found.update(o for o in node.outputs if o)
    for node in reversed(graph.nodes):
        if node.op in FREE and found.intersection(o for o in node.outputs if o):
            found.update(node.inputs)
    return frozenset(found)


class AnyShares(Floors):
    """Prices below those of all shares. Ranks with equal devices form one class."""

    def __init__(self, space: Space, hardware: HardwareModel, states: int) -> None:
        one = hardware.one  # every rank does the whole: t[r] of (3)
        super().__init__(space, hardware, dict.fromkeys(space.axes.axes, one), states)
        types = hardware.types
        self._ranks = [ranks[0] for ranks in types]
        self._sizes: Floats = np.array([len(ranks) for ranks in types], dtype=np.float64)
        self._made: dict[tuple[int, bool], tuple[Floats, PerRank]] = {}

    @property
    def proportional(self) -> Weights:
        """Weights proportional to the classes' speed, under which a product costs the same on
        any shares; half is the links'."""
        speed = self.hardware.speed[self._ranks] * self._sizes
        return self.overlap_price.mean(speed, speed)

    def compute(self, node: Node, row: Row) -> Floats:
        split = any(p is not None and p.sharded for p in (*row.ins, *row.outs))
        return self._ways(self._exact.compute(node, row), split)

    def update(self, parameter: Tensor, stored: Placement) -> Floats:
        return self._ways(self._exact.update(parameter, stored), stored.sharded)

    def _ways(self, whole_s: PerRank, split: bool) -> Floats:
        """Return the whole on every rank, or all of it on one class, shared evenly inside."""
        key = (id(whole_s), split)
        if key not in self._made:  # with the array of the key, whose identity must stay its own
            each = whole_s[self._ranks]
            self._made[key] = np.diag(each / self._sizes) if split else each, whole_s
        return self._made[key][0]

    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        start = self._starts[tensor.name] if kind in FUSIBLE else 1.0
        return self.network.floor_s(kind, tensor.nbytes, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundResult:
    """A program and its cost by the weights: ``whole_s`` (communicating last) plus the cheapest
    way of every entry of ``ways``, with dims entry, way, class.
    """

    labelling: Labelling
    whole_s: Floats
    ways: Floats

    def at(self, weights: Weights) -> float:
        """Return seconds under given weights; concave in them."""
        return float(weights @ self.cut(weights))

    def cut(self, weights: Weights) -> Floats:
        """Return the seconds per class of the cheapest ways: a supergradient."""
        if not len(self.ways):
            return self.whole_s
        cheapest = (self.ways @ weights[:-1]).argmin(axis=1)
        ways = self.ways[np.arange(len(cheapest)), cheapest].sum(axis=0)
        total: Floats = self.whole_s + np.append(ways, 0.0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """The best lower bound of some searches, and what they found, with all programs in order."""

    found: Sequence[BoundResult]
    programs: tuple[Program, ...]
    bound_s: float
    searches: int


class Relaxation:
    """Searches under weighted prices by an engine; the best lower bound and all programs found."""

    def __init__(
        self, space: Space, prices: Floors, allowed: Allowed | None = None,
        engine: Engine = eliminate_or_bound,
    ) -> None:  # fmt: skip
        self._space, self._prices, self._engine = space, prices, engine
        self._problem = Problem(space, prices, allowed, time=lambda v: 0.0)
        self._timed = list(self._problem.timed())
        given = (*self._problem.unary, *self._problem.pairs.values())
        self._tables = {id(table): table for table in given}
        # Every entry is rounded once; no label's cost has more than this number of entries.
        degree = 2 * len(space.graph.nodes) + sum(len(n.inputs) for n in space.graph.nodes)
        self._rounding = degree + 4 * len(space.graph.tensors)
        self.found: list[BoundResult] = []
        self.bound_s = 0.0
        self.searches = 0

    def search(self, weights: Weights) -> BoundResult | None:
        """Find the cheapest program under given weights; raise ``bound_s`` to a better bound.

        ``None`` if the allowed placements admit no program, or none was found.
        """
        link = float(weights[-1])
        # By identity: equal costs have one table.
        scaled = {key: _scaled(table, link) for key, table in self._tables.items()}
        unary = [scaled[id(costs)] for costs in self._problem.unary]
        pairs = {at: scaled[id(table)] for at, table in self._problem.pairs.items()}
        alike: dict[int, Costs] = {}
        for variable, seconds in self._timed:
            if id(seconds) not in alike:
                alike[id(seconds)] = _weighted(seconds, weights[:-1])
            unary[variable] = alike[id(seconds)]
        outcome = self._engine(unary, pairs)
        self.searches += 1
        if outcome.status is SearchStatus.INFEASIBLE:
            return None
        bound_s = (outcome.bound - self._rounding) / PICOSECONDS * _SAFE
        self.bound_s = max(self.bound_s, bound_s)
        return self.evaluate(outcome.labelling) if outcome.labelling else None

    def evaluate(self, labelling: Labelling) -> BoundResult:
        """Price a program of the same space that was found under other prices."""
        classes = len(self._prices.overlap_price.lost)
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
        """Return the weights that maximise the cost of the cheapest program found."""
        return best_weights(self.found, self._prices.overlap_price)

    def run(
        self, start: Weights, searches: int, known: Iterable[BoundResult] = ()
    ) -> Relaxed:  # fmt: skip
        """Search from ``start`` on, until no gain is possible that is worth another search.

        Args:
            known: results under other prices; the first search is by the weights that are best for them.
        """
        for result in known:
            self.evaluate(result.labelling)
        before = len(self.found)
        weights = self.weights() if self.found else start
        for _ in range(searches):
            if self.search(weights) is None:
                break
            weights = self.weights()
            if min(f.at(weights) for f in self.found) <= self.bound_s * (1 + _WORTH):
                break
        unlike = {f.labelling.labels: f.labelling for f in self.found[before:]}
        programs = tuple(self._problem.program(labelling) for labelling in unlike.values())
        return Relaxed(
            found=self.found, programs=programs, bound_s=self.bound_s, searches=self.searches
        )


def best_weights(found: Sequence[BoundResult], overlap_price: OverlapPrice) -> Weights:
    """Maximise the minimum of ``found`` over the weights, which is concave, by cutting planes."""
    ones = np.ones_like(overlap_price.lost)
    weights = overlap_price.mean(ones, ones)
    scale = 1.0 / min(f.at(weights) for f in found)
    cuts: list[Floats] = []
    best, best_s = weights, 0.0
    claimed = np.inf  # upper bound from the linear programs
    for _ in range(_CUTS):
        reached = min(f.at(weights) for f in found) * scale
        if reached > best_s:
            best, best_s = weights, reached
        if claimed - best_s < _CLOSE:
            break
        cuts += [
            f.cut(weights) * scale for f in found
            if f.at(weights) * scale < claimed - _CLOSE / 2  # else its cut is redundant
        ]  # fmt: skip
        highest = _highest(cuts, overlap_price)
        if highest is None:
            break
        weights, claimed = highest
    return best


def _highest(cuts: Sequence[Floats], overlap_price: OverlapPrice) -> tuple[Weights, float] | None:
    """Return the weights that maximise the lowest plane, and its height.

    Planes are ``slopes @ weights``. ``None`` if the solver fails because they are nearly
    parallel: any weights give a valid bound, so only the gain is lost.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    classes = len(overlap_price.lost)
    parts = [solver.NumVar(0.0, 1.0, f"part{k}") for k in range(2 * classes)]
    least = solver.NumVar(0.0, solver.infinity(), "least")
    solver.Add(solver.Sum(parts) == 1)
    one = np.eye(2 * classes)
    corners = np.array([overlap_price.mean(*np.split(corner, 2)) for corner in one])
    for slopes in cuts:
        heights = (corners @ slopes).tolist()
        solver.Add(least <= solver.Sum([h * x for h, x in zip(heights, parts, strict=True)]))
    solver.Maximize(least)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    found = np.maximum([x.solution_value() for x in parts], 0.0)
    return overlap_price.mean(*np.split(found, 2)), float(least.solution_value())


_WORTH = 1e-3
"""Relative gain of a bound that is worth another search."""

_CLOSE = 1e-6
"""Relative difference below which two values of the master problem count as equal."""

_CUTS = 40
"""Limit of linear programs per master problem; two to five classes take about ten."""


def _scaled(costs: Costs, factor: float) -> Costs:
    """Scale communication costs by the weight of the links; forbidden entries stay forbidden."""
    return np.where(costs >= FORBIDDEN, costs, np.round(costs * factor).astype(np.int64))


def _weighted(seconds: Sequence[Floats], weights: Floats) -> Costs:
    """Return the costs of a variable's labels in integer picoseconds."""
    costs = [float(np.min(s @ weights)) for s in seconds]
    return np.array(np.round(np.array(costs) * PICOSECONDS), dtype=np.int64)
