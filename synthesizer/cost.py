"""The cost model: seconds and bytes of everything that a program may do, under given shares.

Computing: launch + max(flops / rate, bytes / bandwidth) per device, on the device's own
part of the work. Communicating: :mod:`hap.synthesizer.communication`. Every figure is a
vector over ranks or a number of seconds; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hap.axes import Axes, Shares
from hap.cluster import Cluster, Work
from hap.graph import Graph, Node, Tensor
from hap.placement import LOCAL, Placement, conversion
from hap.program import Convert
from hap.synthesizer.communication import Choice, Network
from hap.synthesizer.rules.base import Row
from hap.synthesizer.work import node_work

PerRank = npt.NDArray[np.float64]


class Machine:
    """:meth:`hap.cluster.Device.seconds` for all ranks at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.network = Network(cluster)
        self._launch_s = np.array([d.launch_s for d in cluster.devices])
        self._memory = np.array([d.memory_bytes_per_s for d in cluster.devices])
        self._rates: dict[tuple[str, str], PerRank] = {}

    def seconds(self, work: Work, flops: PerRank, nbytes: PerRank) -> PerRank:
        """Time per rank of one operator, given each rank's operations and traffic."""
        key = (work.kind, work.dtype)
        if key not in self._rates:
            self._rates[key] = np.array([d.rate(*key) for d in self.cluster.devices])
        busy = np.maximum(flops / self._rates[key], nbytes / self._memory)
        seconds: PerRank = np.where((flops > 0) | (nbytes > 0), self._launch_s + busy, 0.0)
        return seconds

    @cached_property
    def speed(self) -> PerRank:
        """Relative speed of the ranks in float32 products; sums to 1."""
        rates = np.array([d.rate("matmul", "float32") for d in self.cluster.devices])
        speed: PerRank = rates / rates.sum()
        return speed


class CostModel:
    """Prices on one graph, one cluster and one set of shares."""

    def __init__(
        self, graph: Graph, axes: Axes, machine: Machine, shares: Shares, optimizer_states: int
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.network = machine.network
        self.optimizer_states = optimizer_states
        self._axes = axes
        self._one = np.ones(machine.cluster.world_size)
        vectors: dict[tuple[int, ...], PerRank] = {}  # axes with equal shares have one vector
        for units in shares.values():
            vectors.setdefault(units, np.array(units, dtype=np.float64) / sum(units))
        self._parts = {name: vectors[units] for name, units in shares.items()}
        self._cache: dict[object, PerRank] = {}

    def parts(self, tensor: Tensor, placement: Placement) -> PerRank:
        """Each rank's part of a tensor: 1 where it holds all of it."""
        if not placement.sharded:
            return self._one
        return self._parts[self._axes.of[tensor.name, placement.dim]]

    def local_bytes(self, tensor: Tensor, placement: Placement) -> PerRank:
        return tensor.nbytes * self.parts(tensor, placement)

    def compute(self, node: Node, row: Row) -> PerRank:
        """Seconds per rank of a node run by one of its rows."""
        tensors = self.graph.tensors
        placed = [
            (tensors[name], p)
            for name, p in zip((*node.inputs, *node.outputs), (*row.ins, *row.outs), strict=True)
            if name is not None and p is not None
        ]
        # Layers repeat: what looks alike to every formula is priced once.
        flags = tuple(a for a in node.args if isinstance(a, bool))
        alike = tuple(
            (t.shape, t.dtype, p, id(self.parts(t, p)) if p.sharded else 0) for t, p in placed
        )
        key = (node.op, flags, len(set(node.inputs)), alike)
        if key not in self._cache:
            self._cache[key] = self._compute(node, placed)
        return self._cache[key]

    def flops(self, node: Node, row: Row) -> PerRank:
        """Floating-point operations of each rank."""
        names = (*node.inputs, *node.outputs)
        for name, p in zip(names, (*row.ins, *row.outs), strict=True):
            if name is not None and p is not None and p.sharded:
                part = self.parts(self.graph.tensors[name], p)
                return node_work(node, self.graph).flops * part
        return node_work(node, self.graph).flops * self._one

    def _compute(self, node: Node, placed: list[tuple[Tensor, Placement]]) -> PerRank:
        work = node_work(node, self.graph)
        if not work.flops and not work.bytes:
            return np.zeros_like(self._one)
        sharded = [(t, p) for t, p in placed if p.sharded]
        part = self.parts(*sharded[0]) if sharded else self._one
        nbytes = sum(self.local_bytes(t, p) for t, p in dict.fromkeys(placed))
        # A rank without a share still reads nothing: its call is on empty tensors.
        nbytes = np.where(part > 0, nbytes, 0.0)
        return self.machine.seconds(work, work.flops * part, nbytes)

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Choice]:
        """Implementations of a conversion, the fastest first; local ones are priced as copies.

        ``fused``: the conversion will run with its neighbours, which pay for the start.
        """
        kind = conversion(src, dst)
        if kind is None or kind == "slice":  # a slice is a view of what is there
            return [Choice("", 0.0)]
        if kind in LOCAL:
            traffic = 2 * tensor.nbytes * self._one
            work = Work("memory", tensor.dtype, tensor.numel, 0.0)
            return [Choice("", float(self.machine.seconds(work, self._one, traffic).max()))]
        parts = self.parts(tensor, src), self.parts(tensor, dst)
        return self.network.choices(kind, tensor.nbytes, *parts, start=not fused)

    def alike(self, tensor: str) -> object:
        """What else the prices of a tensor's conversions depend on: here nothing."""
        return None

    def convert_group(self, group: Sequence[Convert]) -> list[Choice]:
        """Implementations of neighbouring collectives that run as one; see ``Program.groups``."""
        steps = [(self.graph.tensors[s.tensor], s.src, s.dst) for s in group]
        if len(steps) == 1:
            return self.convert(*steps[0])
        nbytes = sum(t.nbytes for t, _, _ in steps)
        src = np.sum([t.nbytes * self.parts(t, p) for t, p, _ in steps], axis=0) / nbytes
        dst = np.sum([t.nbytes * self.parts(t, p) for t, _, p in steps], axis=0) / nbytes
        return self.network.choices(group[0].kind, nbytes, src, dst)

    def update(self, parameter: Tensor, stored: Placement) -> PerRank:
        """Seconds per rank of the optimizer's elementwise step on the stored shard."""
        elements = parameter.numel * self.parts(parameter, stored)
        # Reads parameter, gradient and states; writes parameter and states.
        nbytes = (3 + 2 * self.optimizer_states) * self.local_bytes(parameter, stored)
        work = Work("memory", parameter.dtype, 0.0, 0.0)
        return self.machine.seconds(work, 4.0 * elements, nbytes)

    def stored_bytes(self, parameter: Tensor, stored: Placement, *, trained: bool) -> PerRank:
        """Parameter, gradient and optimizer states of a stored shard."""
        copies = 2 + self.optimizer_states if trained else 1
        return copies * self.local_bytes(parameter, stored)
