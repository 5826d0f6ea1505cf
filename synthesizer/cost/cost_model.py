"""The cost model: seconds and bytes of operators and conversions under given shares.

Computing: :meth:`hap.cluster.device.Device.seconds` of each device's own part of the work.
Communicating: :mod:`hap.synthesizer.cost.collective_cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hap.cluster.work import Work
from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.placement import LOCAL, Placement, conversion
from hap.ir.program import Convert
from hap.synthesizer.cost.collective_cost import Fractions, Quote
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank, PriceMemo
from hap.synthesizer.cost.operator_work import node_work, update_work
from hap.synthesizer.cost.parts import AxisParts, Parts, vectors_of
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.rules.rule_table import Row


class Network(Protocol):
    """Prices of collectives; usually :class:`hap.synthesizer.cost.collective_cost.NetworkModel`."""

    def choices(
        self, kind: str, nbytes: int, src: Fractions, dst: Fractions, *, start: bool = True
    ) -> list[Quote]:
        """Return implementations of a collective, the fastest first."""


class Crossing(Protocol):
    """Prices of the collectives between machines in a program inside them."""

    def cross(self, group: Sequence[tuple[Node, Row]]) -> tuple[float, int] | None:
        """Return (seconds, messages) of neighbours that run as one; ``None`` for other nodes."""

    def searched_s(self, node: Node, row: Row) -> float | None:
        """Return seconds of one collective in a search; without the start at the step's ends."""


class CostModel(Prices):
    """Prices on one graph, one cluster and one set of shares.

    Args:
        shares: units per rank of every axis, or the parts themselves.
        network: prices of conversions; default: the cluster's.
        crossing: prices of collectives between machines, if the graph has any.
    """

    def __init__(
        self, graph: Graph, axes: Axes, hardware: HardwareModel, shares: Shares | Parts,
        optimizer_states: int, network: Network | None = None, crossing: Crossing | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(shares, Parts):
            vectors = vectors_of(shares, hardware)
            shares = AxisParts(axes, hardware.cluster.world_size, vectors, one=hardware.one)
        super().__init__(graph, hardware, shares, optimizer_states)
        self._network, self._crossing = network or hardware.network, crossing
        self._computed: dict[object, PerRank] = {}
        known = hardware.known(graph) if shares.lasting else PriceMemo()
        self._computed_alike = known.computed
        self._converted = known.converted if network is None else {}

    def compute(self, node: Node, row: Row) -> PerRank:
        key = (node.name, row.outs, row.ins)
        seconds = self._computed.get(key)
        if seconds is None:
            seconds = self._computed[key] = self._compute(node, row)
        return seconds

    def _compute(self, node: Node, row: Row) -> PerRank:
        """Price a node by one of its rows; nodes with equal keys (layers repeat) are priced once."""
        crossing_s = self._crossing.searched_s(node, row) if self._crossing else None
        if crossing_s is not None:
            return np.full_like(self.parts.one, crossing_s)
        names, placements = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
        placed = [
            (self.graph.tensors[name], p)
            for name, p in zip(names, placements, strict=True)
            if name is not None and p is not None
        ]
        parts = tuple(id(self.parts.of(t.name, p)) for t, p in placed)
        key = (self.graph.alike[node.name], placements, parts)
        if key not in self._computed_alike:
            self._computed_alike[key] = self._operator_s(node, row, placed)
        return self._computed_alike[key]

    def _operator_s(self, node: Node, row: Row, placed: list[tuple[Tensor, Placement]]) -> PerRank:
        work = self._work(node)
        if not work.flops and not work.bytes:
            return np.zeros_like(self.parts.one)
        part = self.parts.of_work(node, row)
        nbytes = sum(self.local_bytes(t, p) for t, p in dict.fromkeys(placed))
        # A rank without a share reads nothing: its call has empty tensors.
        nbytes = np.where(part > 0, nbytes, 0.0)
        return self.hardware.seconds(work, work.flops * part, nbytes)

    def _work(self, node: Node) -> Work:
        known: dict[int, Work] = self.graph.memo.setdefault("work", {})
        kind = self.graph.alike[node.name]
        if kind not in known:
            known[kind] = node_work(node, self.graph)
        return known[kind]

    def cross(self, group: Sequence[tuple[Node, Row]]) -> tuple[float, int] | None:
        return self._crossing.cross(group) if self._crossing else None

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        """Return implementations of a conversion; local ones are priced as copies."""
        kind = conversion(src, dst)
        if kind is None or kind == "slice":  # a slice is a view
            return [Quote("", 0.0)]
        if kind in LOCAL:
            traffic = 2 * tensor.nbytes * self.parts.one
            work = Work("memory", tensor.dtype, tensor.numel, 0.0)
            return [Quote("", float(self.hardware.seconds(work, self.parts.one, traffic).max()))]
        parts = self.parts.of(tensor.name, src), self.parts.of(tensor.name, dst)
        key = kind, tensor.nbytes, *map(id, parts), fused
        if key not in self._converted:
            found = self._network.choices(kind, tensor.nbytes, *parts, start=not fused)
            self._converted[key] = found
        return self._converted[key]

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        steps = [(self.graph.tensors[s.tensor], s.src, s.dst) for s in group]
        if len(steps) == 1:
            return self.convert(*steps[0])
        nbytes = sum(t.nbytes for t, _, _ in steps)
        src = np.sum([t.nbytes * self.parts.of(t.name, p) for t, p, _ in steps], axis=0) / nbytes
        dst = np.sum([t.nbytes * self.parts.of(t.name, p) for t, _, p in steps], axis=0) / nbytes
        return self._network.choices(group[0].kind, nbytes, src, dst)

    def start_s(self, step: Convert) -> float:
        """Return the seconds of a collective that do not depend on its bytes."""
        tensor = self.graph.tensors[step.tensor]
        usual, traffic = (
            {q.implementation: q.seconds for q in self.convert(tensor, step.src, step.dst, fused=f)}
            for f in (False, True)
        )
        return max(0.0, usual[step.implementation] - traffic[step.implementation])

    def update(self, parameter: Tensor, stored: Placement) -> PerRank:
        elements = parameter.numel * self.parts.of(parameter.name, stored)
        work = update_work(parameter.dtype, self.optimizer_states)
        nbytes = work.bytes * self.local_bytes(parameter, stored)
        return self.hardware.seconds(work, work.flops * elements, nbytes)
