"""The part of every tensor that each rank holds, and keys of tensors and axes with equal parts.

Layers repeat, so few tables and prices differ. Two keys decide: :meth:`Parts.axis_key` is
equal for axes with equal splits under the given shares, :meth:`Parts.tensor_key` for tensors
whose prices differ only by shape, dtype, placements and axes. The other keys follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping

import numpy as np

from hap.ir.axes import Axes, Shares
from hap.ir.graph import Node
from hap.ir.mesh import is_mesh_op
from hap.ir.placement import Placement
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.rules.rule_table import Row


class Parts(ABC):
    """Parts between 0 and 1, per rank.

    Attributes:
        ring_size: the number of ranks that convert placements among each other.
        one: the vector of a tensor that every rank holds whole.
    """

    lasting = False
    """Whether the hardware model keeps all vectors, so that prices can be cached by their identity."""

    def __init__(
        self, axes: Axes, world_size: int, ring_size: int, one: PerRank | None = None
    ) -> None:
        self.axes, self.ring_size = axes, ring_size
        self.one: PerRank = np.ones(world_size) if one is None else one

    @abstractmethod
    def of(self, tensor: str, placement: Placement) -> PerRank:
        """Return each rank's part of a tensor. Equal parts are the same object."""

    @abstractmethod
    def of_work(self, node: Node, row: Row) -> PerRank:
        """Return each rank's part of an operator's arithmetic."""

    @abstractmethod
    def axis_key(self, axis: str) -> Hashable:
        """Return a key that is equal for axes under which all prices are equal."""

    @abstractmethod
    def tensor_key(self, tensor: str) -> Hashable:
        """Return the properties of a tensor that prices depend on, besides shape and dtype."""

    def value_key(self, tensor: str, placement: Placement) -> Hashable:
        """Return the properties of a value that its parts depend on, besides the shares."""
        axis = self.axes.of[tensor, placement.dim] if placement.sharded else None
        return axis, self.tensor_key(tensor)

    def node_key(self, node: Node) -> Hashable:
        """Return the properties of an operator that its price depends on, besides its arguments."""
        if is_mesh_op(node.op):  # a collective between machines has separate arguments
            return node.name
        return tuple(self.tensor_key(name) for name in (*node.inputs, *node.outputs) if name)


class AxisParts(Parts):
    """One vector of parts per axis.

    Args:
        vectors: parts by axis, each of shape [world_size].
        tensor_keys: results of :meth:`tensor_key` if prices depend on more than parts.
        one: see :class:`Parts`; given if the machine keeps it and ``vectors``.
        ring_size: see :class:`Parts`; default: all ranks.
    """

    def __init__(
        self, axes: Axes, world_size: int, vectors: Mapping[str, PerRank],
        tensor_keys: Mapping[str, Hashable] | None = None, one: PerRank | None = None,
        ring_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(axes, world_size, ring_size or world_size, one)
        self.lasting = one is not None
        self._vectors, self._tensor_keys = vectors, tensor_keys or {}

    def of(self, tensor: str, placement: Placement) -> PerRank:
        if not placement.sharded:
            return self.one
        return self._vectors[self.axes.of[tensor, placement.dim]]

    def of_work(self, node: Node, row: Row) -> PerRank:
        names = (*node.inputs, *node.outputs)
        for name, p in zip(names, (*row.ins, *row.outs), strict=True):
            if name is not None and p is not None and p.sharded:
                return self.of(name, p)
        return self.one

    def axis_key(self, axis: str) -> Hashable:
        return id(self._vectors[axis])

    def tensor_key(self, tensor: str) -> Hashable:
        return self._tensor_keys.get(tensor)

    def node_key(self, node: Node) -> Hashable:
        if not self._tensor_keys and not is_mesh_op(node.op):
            return None  # the tensors' keys are all the same
        return super().node_key(node)


def vectors_of(shares: Shares, hardware: HardwareModel) -> dict[str, PerRank]:
    """Return parts by axis of shares in units; equal shares have one vector, which the machine keeps."""
    known = hardware.vectors
    for units in set(shares.values()) - known.keys():
        known[units] = np.array(units, dtype=np.float64) / sum(units)
    return {name: known[units] for name, units in shares.items()}
