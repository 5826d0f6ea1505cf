"""Logical axes: classes of dims that must be sharded together, and their granularity.

An operator that shards two dims by one row ties them: both must be cut at the same
places. The ties divide the dims of a graph into classes, the *axes*: the batch, the heads
of a layer, the width of another. An axis has a number of *units*, the blocks into which all its
dims can be cut, and each dim a *granule*, its elements per unit: merging (12 heads, 64) into
768 leaves an axis of 12 units with dims of granules 1 and 64.

Shares are integer units per rank. :func:`shard_sizes` is the only function that turns them
into sizes of shards; cost, emission and runtime all call it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hap.ir.graph import Tensor

Dim = tuple[str, int]
"""A dim of a tensor: (tensor name, dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A class of dims that are split together into at most ``units`` blocks."""

    name: str
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of a graph, and the axis of every dim that can be split."""

    axes: Mapping[str, Axis]
    of: Mapping[Dim, str]

    def axis(self, tensor: str, dim: int) -> Axis | None:
        name = self.of.get((tensor, dim))
        return None if name is None else self.axes[name]


Shares = Mapping[str, tuple[int, ...]]
"""Axis name -> units per rank; they sum to the axis's units, and zero is legal."""


def shard_sizes(size: int, units: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return elements per rank of a dim of ``size`` elements on an axis of ``units`` blocks."""
    if sum(shares) != units or (size % units if units else size):
        raise ValueError(f"shares {shares} don't fit {units} blocks of a dim of size {size}")
    granule = size // max(units, 1)
    return tuple(share * granule for share in shares)


class Ties:
    """Union-find over dims; builds the axes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._parent: dict[Dim, Dim] = {}
        self._units: dict[Dim, int] = {}

    def _find(self, dim: Dim) -> Dim:
        parent = self._parent.setdefault(dim, dim)
        if parent == dim:
            self._units.setdefault(dim, self._tensors[dim[0]].shape[dim[1]])
            return dim
        root = self._parent[dim] = self._find(parent)
        return root

    def tie(self, dims: Iterable[Dim], units: int) -> bool:
        """Tie dims that one row shards; return ``False`` (and change nothing) if no cut is left."""
        roots = list(dict.fromkeys(self._find(d) for d in dims))
        common = math.gcd(units, *(self._units[r] for r in roots))
        if common < 2:
            return False
        for root in roots:
            self._parent[root] = roots[0]
        self._units[roots[0]] = common
        return True

    def build(self, names: Mapping[Dim, str]) -> Axes:
        """Return the axes, each named by the first entry of ``names`` among its dims."""
        members: dict[Dim, list[Dim]] = {}
        for dim in self._parent:
            members.setdefault(self._find(dim), []).append(dim)
        named: dict[Dim, str] = {}
        for dim, text in names.items():
            if dim in self._parent:
                named.setdefault(self._find(dim), text)
        axes: dict[str, Axis] = {}
        of: dict[Dim, str] = {}
        for root, dims in members.items():
            given = named.get(root)
            name = given or f"{root[0]}[{root[1]}]"
            copies = 1
            while name in axes:
                copies += 1
                name = f"{given} ({copies})"
            axes[name] = Axis(name=name, units=self._units[root])
            of.update((d, name) for d in dims)
        return Axes(axes=axes, of=of)
