"""Branch and bound over the shares of one axis, for a tighter lower bound.

:class:`AnyShares` is loose because it lets a single rank have all of an axis. A :class:`Box` limits the
units of each type of devices on one axis. The boxes cover all shares; the box with the lowest bound
is split again and again (Land and Doig, 1960). docs/formulas.md derives the prices in a box.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from hap.cluster.work import Work
from hap.ir.graph import Node, Tensor
from hap.ir.placement import Placement
from hap.ir.program import FUSIBLE, Compute, Program
from hap.synthesizer.bounds.lower_bound import (
    AnyShares,
    Floats,
    Floors,
    OverlapPrice,
    Relaxation,
    Relaxed,
    Weights,
)
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.operator_work import node_work, update_work
from hap.synthesizer.cost.parts import AxisParts
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space

Range = tuple[int, int]
"""(least, largest) number of units, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A set of shares of an axis: per type of ``sizes`` devices, ranges of units.

    ``total``: of all its ranks together; ``most``: of its rank with the largest share.
    """

    axis: str
    units: int
    sizes: tuple[int, ...]
    total: tuple[Range, ...]
    most: tuple[Range, ...]

    @staticmethod
    def whole(axis: str, units: int, sizes: tuple[int, ...]) -> Box:
        """Return the box of all shares of an axis."""
        everything = ((0, units),) * len(sizes)
        box = Box(axis=axis, units=units, sizes=sizes, total=everything, most=everything)
        tight = box.tightened()
        assert tight is not None, "an axis has shares"
        return tight

    def tightened(self) -> Box | None:
        """Return the same shares in smaller ranges; ``None`` if the box is empty."""
        total, most = self.total, self.most
        for _ in range(2):
            total = tuple(
                (max(lo, least), min(hi, n * largest))
                for (lo, hi), (least, largest), n in zip(total, most, self.sizes, strict=True)
            )
            lows, highs = sum(lo for lo, _ in total), sum(hi for _, hi in total)
            total = tuple(
                (max(lo, self.units - highs + hi), min(hi, self.units - lows + lo))
                for lo, hi in total
            )
            most = tuple(
                (max(least, -(-lo // n)), min(largest, hi))
                for (least, largest), (lo, hi), n in zip(most, total, self.sizes, strict=True)
            )
        if any(lo > hi for lo, hi in (*total, *most)):
            return None
        return replace(self, total=total, most=most)

    def split(self) -> tuple[Box, Box] | None:
        """Return two boxes, cut in the widest range; ``None`` if the box is a point.

        Totals are compared by differences, because links carry them; loads by ratios.
        """
        wide = [
            (_TOTALS * (hi - lo) / self.units, "total", k) for k, (lo, hi) in enumerate(self.total)
        ]
        wide += [
            (math.log((hi + 1) / (lo + 1)) if hi > lo else 0.0, "most", k)
            for k, (lo, hi) in enumerate(self.most)
        ]
        width, which, k = max(wide, key=lambda entry: (entry[0], -entry[2]))
        if not width:
            return None
        lo, hi = (self.total if which == "total" else self.most)[k]
        cut = (lo + hi) // 2 if which == "total" else math.isqrt((lo + 1) * (hi + 1)) - 1
        cut = min(max(cut, lo), hi - 1)
        return self._changed(which, k, (lo, cut)), self._changed(which, k, (cut + 1, hi))

    def _changed(self, which: str, k: int, to: Range) -> Box:
        ranges = list(self.total if which == "total" else self.most)
        ranges[k] = to
        if which == "total":
            return replace(self, total=tuple(ranges))
        return replace(self, most=tuple(ranges))


_TOTALS = 8.0
"""Weight of a type's total relative to a ratio of loads when ranges are compared."""


class BoxPrices(Floors):
    """Prices below those of all shares in a box. Two classes per type: most loaded, mean."""

    def __init__(self, space: Space, hardware: HardwareModel, states: int, box: Box) -> None:
        axes, types = space.axes, hardware.types
        one = hardware.one
        whole = dict.fromkeys(axes.axes, one)
        keys: dict[str, Hashable] = {
            name: tuple(d for d in range(len(t.shape)) if axes.of.get((name, d)) == box.axis)
            for name, t in space.graph.tensors.items()
        }
        super().__init__(space, hardware, {**whole, box.axis: hardware.one_apart}, states, keys)
        self._box, self._outside = box, AnyShares(space, hardware, states)
        self._ranks = [ranks[0] for ranks in types]
        self._sizes = np.array(box.sizes, dtype=np.float64)
        low, high, starts = (np.zeros_like(one) for _ in range(3))
        for k, (n, ranks) in enumerate(zip(box.sizes, map(list, types), strict=True)):
            low[ranks], high[ranks] = np.array(box.most[k]) / box.units
            # Does each of its ranks have at least one unit, even if all others have the most?
            if box.total[k][0] - (n - 1) * box.most[k][1] >= 1:
                starts[ranks] = 1.0
        self._low, self._high = (
            CostModel(
                space.graph, axes, hardware, AxisParts(axes, len(one), {**whole, box.axis: part}),
                states,
            )
            for part in (low, high)
        )  # fmt: skip
        self._part = np.maximum(high[self._ranks], 1e-300)
        self._launches = starts[self._ranks]
        self._least = np.array([lo for lo, _ in box.total]) / box.units / self._sizes
        self._parts_between = _per_machine(box, types, hardware)
        self._boxed: dict[object, Floats] = {}

    @property
    def overlap_price(self) -> OverlapPrice:
        own = self._outside.overlap_price
        return replace(own, lost=np.tile(own.lost, 2))

    def compute(self, node: Node, row: Row) -> Floats:
        names = (*node.inputs, *node.outputs)
        placed = zip(names, (*row.ins, *row.outs), strict=True)
        if any(n and p and self._inside(n, p) for n, p in placed):
            low_s, high_s = (model.compute(node, row) for model in (self._low, self._high))
            return self._ways_inside(low_s, high_s, node_work(node, self.graph))
        return self._doubled(self._outside.compute(node, row))

    def update(self, parameter: Tensor, stored: Placement) -> Floats:
        if self._inside(parameter.name, stored):
            low_s, high_s = (model.update(parameter, stored) for model in (self._low, self._high))
            work = update_work(parameter.dtype, self.optimizer_states)
            return self._ways_inside(low_s, high_s, work)
        return self._doubled(self._outside.update(parameter, stored))

    def _inside(self, tensor: str, p: Placement) -> bool:
        return p.sharded and self.axes.of[tensor, p.dim] == self._box.axis

    def _doubled(self, ways: Floats) -> Floats:
        """Return times outside the axis: the most loaded rank may have no part of other axes."""
        key = id(ways)
        if key not in self._boxed:
            most = ways if ways.ndim == 1 else np.zeros_like(ways)
            self._boxed[key] = np.concatenate([most, ways], axis=-1)
        return self._boxed[key]

    def _ways_inside(self, low_s: PerRank, high_s: PerRank, work: Work) -> Floats:
        """Return times on the axis: one row per type that may have the remainder of it."""
        most, whole = low_s[self._ranks], high_s[self._ranks]
        launch_s = [self.hardware.cluster.devices[rank].launch_of(work) for rank in self._ranks]
        start = np.where(whole > 0, self._launches * launch_s, 0.0)
        slope = (whole - start) / self._part
        left = max(0.0, 1.0 - float(self._sizes @ self._least))
        mean = start + slope * self._least + np.diag(left * slope / self._sizes)
        return np.concatenate([np.broadcast_to(most, mean.shape), mean], axis=1)

    def _collective(self, kind: str, tensor: Tensor, src: Placement, dst: Placement) -> float:
        start = self._starts[tensor.name] if kind in FUSIBLE else 1.0
        crossing = 0.0
        if any(self._inside(tensor.name, p) for p in (src, dst)):
            crossing = self.network.crossing_s(tensor.nbytes, *self._parts_between)
        return self.network.floor_s(kind, tensor.nbytes, start=start, crossing=crossing)


def _per_machine(
    box: Box, types: tuple[tuple[int, ...], ...], hardware: HardwareModel
) -> tuple[Floats, Floats]:
    """Return the least and the largest part of the axis that each machine may have."""
    cluster = hardware.cluster
    low, high = [], []
    for node in cluster.nodes:
        here = [sum(cluster.devices[r].node == node for r in ranks) for ranks in types]
        rows = list(zip(here, box.sizes, box.total, box.most, strict=True))
        low.append(sum(max(0, lo - (n - m) * most) for m, n, (lo, _), (_, most) in rows))
        high.append(sum(min(hi, m * most) for m, _, (_, hi), (_, most) in rows))
    return np.array(low) / box.units, np.minimum(np.array(high) / box.units, 1.0)


@dataclass(slots=True, kw_only=True)
class _Leaf:
    box: Box
    bound_s: float
    hope_s: float
    """The highest bound that other weights could still give, as far as known."""


class Branching:
    """The bound over all shares of ``axis``, box by box; ``root``: the bound without boxes."""

    def __init__(
        self, space: Space, hardware: HardwareModel, states: int, allowed: Allowed | None,
        root: Relaxed, axis: str,
    ) -> None:  # fmt: skip
        self._space, self._hardware, self._states, self._allowed = space, hardware, states, allowed
        self._known = [f.labelling for f in root.found]
        units = space.axes.axes[axis].units
        sizes = tuple(len(ranks) for ranks in hardware.types)
        whole = Box.whole(axis, units, sizes)
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
            halves = leaf.box.split()
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
        prices = BoxPrices(self._space, self._hardware, self._states, leaf.box)
        relaxation = Relaxation(self._space, prices, self._allowed)
        for labelling in self._known:
            relaxation.evaluate(labelling)
        weights: Weights = relaxation.weights()
        found = relaxation.search(weights)
        self.searches += 1
        leaf.bound_s = max(leaf.bound_s, relaxation.bound_s)
        if found is None:
            leaf.bound_s = leaf.hope_s = np.inf
            return
        self._known.append(found.labelling)
        weights = relaxation.weights()
        leaf.hope_s = min(f.at(weights) for f in relaxation.found)


def busiest_axis(
    space: Space, hardware: HardwareModel, states: int, program: Program
) -> str | None:
    """Return the axis that splits most of a program's time, or ``None``."""
    prices = AnyShares(space, hardware, states)
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
