"""A tighter lower bound over all shares: the shares of one axis are cut into boxes.

What :class:`hap.synthesizer.bound.AnyShares` gives away is mostly one thing: it lets a single
rank have all of an axis, which then needs no all-to-all and starts each operator once. A box says
of one axis, the one on which most of the arithmetic is split, how many units the most loaded
rank of each type has (:class:`Box`); the other axes stay free. The boxes cover everything, so
that the lowest bound of all of them holds for all programs and all shares. The box with
the lowest bound is cut in two, again and again (branch and bound; Land and Doig, 1960), until
the number of searches is spent or no box is below the plan.

Prices in a box, with ``n[k]`` devices of type ``k``, of which the most loaded has ``m[k]`` of
``u`` units, ``low[k] <= m[k] <= high[k]``. Each type has two weights, ``a[k]`` for its most
loaded rank and ``b[k]`` for the mean of all its ranks; (1) of the module above holds for any
weights of ranks. An operator that is split on the axis takes

* the most loaded rank at least ``t[k](low[k] / u)``;
* a rank with part ``p > 0`` at least ``launch[k] + slope[k] p``, where
  ``slope[k] = (t[k](h) - launch[k]) / h`` at ``h = high[k] / u``: operands that are read whole
  weigh least at the largest part. If ranks may have no part at all, at least ``t[k](h) / h p``.
  The mean part of a type is at least ``L[k] = (u - sum_{j != k} n[j] high[j]) / (n[k] u)``; what
  is left of the axis goes where it is cheapest (:meth:`BoxPrices._inside`).

An all-to-all from or to the axis crosses links whatever the other side's parts
(:meth:`hap.synthesizer.communication.Network.crossing_s`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hap.graph import Node, Tensor
from hap.placement import Placement
from hap.program import FUSIBLE, Compute, Program
from hap.synthesizer.bound import AnyShares, Floats, Relaxation, Weights, dearest
from hap.synthesizer.cost import CostModel, Machine, PerRank
from hap.synthesizer.labelling import Allowed
from hap.synthesizer.rules.base import Row
from hap.synthesizer.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Shares of an axis: of each type, the units of its most loaded rank lie in a range."""

    axis: str
    units: int
    sizes: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    def tightened(self) -> Box | None:
        """The same shares in as small a box as can be; ``None`` if it holds none."""
        room = sum(n * h for n, h in zip(self.sizes, self.high, strict=True))
        low = tuple(
            max(least, math.ceil((self.units - room + n * h) / n))
            for least, n, h in zip(self.low, self.sizes, self.high, strict=True)
        )
        taken = sum(low)
        high = tuple(min(h, self.units - taken + m) for m, h in zip(low, self.high, strict=True))
        if room < self.units or any(m > h for m, h in zip(low, high, strict=True)):
            return None
        return replace(self, low=low, high=high)

    def split(self, usual: tuple[float, ...]) -> tuple[Box, Box] | None:
        """Two boxes, cut on the type whose range is widest; ``None`` if it is a point.

        Args:
            usual: units of each type's ranks in shares proportional to speed. Ranges are
                measured by factors, from half of that on.
        """
        least = [max(m, u / 2) for m, u in zip(self.low, usual, strict=True)]
        width = [
            h / m if h > lo else 0.0 for h, m, lo in zip(self.high, least, self.low, strict=True)
        ]
        k = int(np.argmax(width))
        if not width[k]:
            return None
        cut = math.floor(math.sqrt(least[k] * self.high[k]))
        cut = min(max(cut, self.low[k]), self.high[k] - 1)

        def changed(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:k], value, *values[k + 1 :])

        return (
            replace(self, high=changed(self.high, cut)),
            replace(self, low=changed(self.low, cut + 1)),
        )


class _At(CostModel):
    """Times of every rank with a given part of one axis and all of the others."""

    def __init__(
        self, space: Space, machine: Machine, states: int, axis: str, part: PerRank
    ) -> None:
        super().__init__(space.graph, space.axes, machine, {}, states)
        self._axis, self._part = axis, part

    def parts(self, tensor: Tensor, placement: Placement) -> PerRank:
        on = placement.sharded and self._axes.of[tensor.name, placement.dim] == self._axis
        return self._part if on else self._one


class BoxPrices(AnyShares):
    """Prices below those of all shares in a box. Two classes per type: most loaded, mean."""

    def __init__(self, space: Space, machine: Machine, states: int, box: Box) -> None:
        super().__init__(space, machine, states)
        self._box = box
        types = machine.cluster.types()
        low, high, least = (np.zeros_like(self._one) for _ in range(3))
        room = sum(n * h for n, h in zip(box.sizes, box.high, strict=True))
        for k, ranks in enumerate(types):
            low[list(ranks)] = box.low[k] / box.units
            high[list(ranks)] = box.high[k] / box.units
            others = room - box.sizes[k] * box.high[k]
            least[list(ranks)] = max(0.0, (box.units - others) / (box.sizes[k] * box.units))
        self._low = _At(space, machine, states, box.axis, low)
        self._high = _At(space, machine, states, box.axis, high)
        self._most = high
        self._part = np.maximum(high[self._ranks], 1e-300)
        self._least = least[self._ranks]
        # Has every rank of a type a unit at least, though all others have the most?
        alone = [box.units - room + h >= 1 for h in box.high]
        launch = np.array([machine.cluster.devices[r].launch_s for r in self._ranks])
        self._launch = np.where(alone, launch, 0.0)
        self._boxed: dict[object, Floats] = {}

    @property
    def classes(self) -> int:
        return 2 * len(self._ranks)

    def alike(self, tensor: str) -> object:
        rank = len(self.graph.tensors[tensor].shape)
        inside = tuple(d for d in range(rank) if self._axes.of.get((tensor, d)) == self._box.axis)
        return super().alike(tensor), inside

    def compute(self, node: Node, row: Row) -> Floats:
        names = (*node.inputs, *node.outputs)
        placed = zip(names, (*row.ins, *row.outs), strict=True)
        if any(n and p and self._inside(n, p) for n, p in placed):
            return self._ways_inside(self._low.compute(node, row), self._high.compute(node, row))
        return self._doubled(super().compute(node, row))

    def update(self, parameter: Tensor, stored: Placement) -> Floats:
        if self._inside(parameter.name, stored):
            times = (model.update(parameter, stored) for model in (self._low, self._high))
            return self._ways_inside(*times)
        return self._doubled(super().update(parameter, stored))

    def _inside(self, tensor: str, p: Placement) -> bool:
        return p.sharded and self._axes.of[tensor, p.dim] == self._box.axis

    def _doubled(self, ways: Floats) -> Floats:
        """Times outside of the axis: the most loaded rank may have no part of others."""
        key = id(ways)
        if key not in self._boxed:
            most = ways if ways.ndim == 1 else np.zeros_like(ways)
            self._boxed[key] = np.concatenate([most, ways], axis=-1)
        return self._boxed[key]

    def _ways_inside(self, low_s: PerRank, high_s: PerRank) -> Floats:
        """Times on the axis: one row per type that may have what is left of it."""
        most, whole = low_s[self._ranks], high_s[self._ranks]
        start = np.where(whole > 0, self._launch, 0.0)
        slope = (whole - start) / self._part
        left = max(0.0, 1.0 - float(self._sizes @ self._least))
        mean = start + slope * self._least + np.diag(left * slope / self._sizes)
        return np.concatenate([np.broadcast_to(most, mean.shape), mean], axis=1)

    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        start = self._starts[tensor.name] if kind in FUSIBLE else 1.0
        crossing = 0.0
        if any(self._inside(tensor.name, p) for p in (src, dst)):
            crossing = self.network.crossing_s(tensor.nbytes, self._most)
        return self.network.floor_s(kind, tensor.nbytes, start=start, crossing=crossing)


@dataclass(slots=True, kw_only=True)
class _Leaf:
    box: Box
    bound_s: float
    hope_s: float
    """What other weights could still raise the bound to, as far as is known."""


class Branching:
    """The bound over all shares, box by box.

    Args:
        root: the bound without boxes, and the programs behind it.
        prices: of ``root``.
        axis: the one whose shares are cut.
    """

    def __init__(
        self, space: Space, machine: Machine, states: int, allowed: Allowed | None,
        root: Relaxation, axis: str,
    ) -> None:  # fmt: skip
        self._space, self._machine, self._states, self._allowed = space, machine, states, allowed
        self._known = [f.labelling for f in root.found]
        units = space.axes.axes[axis].units
        types = machine.cluster.types()
        sizes = tuple(len(ranks) for ranks in types)
        self._usual = tuple(units * float(machine.speed[ranks[0]]) for ranks in types)
        whole = Box(
            axis=axis, units=units, sizes=sizes, low=(0,) * len(types), high=(units,) * len(types)
        ).tightened()
        assert whole is not None, "all shares are in a box"
        self._leaves = [_Leaf(box=whole, bound_s=root.bound_s, hope_s=root.bound_s)]
        self.searches = 0

    @property
    def bound_s(self) -> float:
        return min(leaf.bound_s for leaf in self._leaves)

    def run(self, searches: int, step_s: float) -> None:
        """Cut the lowest box until the searches are spent or no box is below ``step_s``."""
        while self.searches < searches:
            leaf = min(self._leaves, key=lambda leaf: leaf.bound_s)
            if leaf.bound_s >= step_s:
                return
            if leaf.hope_s > leaf.bound_s * (1 + 1e-3):
                self._search(leaf)
                continue
            halves = leaf.box.split(self._usual)
            if halves is None:
                return
            self._leaves.remove(leaf)
            for half in halves:
                box = half.tightened()
                if box is not None:
                    child = _Leaf(box=box, bound_s=leaf.bound_s, hope_s=leaf.bound_s)
                    self._search(child)
                    self._leaves.append(child)

    def _search(self, leaf: _Leaf) -> None:
        prices = BoxPrices(self._space, self._machine, self._states, leaf.box)
        relaxation = Relaxation(self._space, prices, self._allowed)
        for labelling in self._known:
            relaxation.adopt(labelling)
        weights: Weights = dearest(relaxation.found, prices.classes)
        found = relaxation.search(weights)
        self.searches += 1
        leaf.bound_s = max(leaf.bound_s, relaxation.bound_s)
        if found is None:
            leaf.bound_s = leaf.hope_s = np.inf
            return
        self._known.append(found.labelling)
        weights = relaxation.weights()
        leaf.hope_s = min(f.at(weights) for f in relaxation.found)


def busiest_axis(space: Space, machine: Machine, states: int, program: Program) -> str | None:
    """The axis on which most of a program's time, if done whole, is split; or ``None``."""
    prices = AnyShares(space, machine, states)
    total: dict[str, float] = {}
    for step in program.instructions:
        if not isinstance(step, Compute):
            continue
        node = space.graph.by_name[step.node]
        placed = zip((*node.inputs, *node.outputs), (*step.ins, *step.outs), strict=True)
        axis = next((space.axes.of[n, p.dim] for n, p in placed if n and p and p.sharded), None)
        if axis is not None:
            seconds = float(prices.compute(node, Row(step.outs, step.ins)).sum())
            total[axis] = total.get(axis, 0.0) + seconds
    return max(total, key=lambda name: total[name], default=None)
