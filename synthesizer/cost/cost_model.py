"""The cost model: seconds and bytes of operators and conversions under given shares.

Computing: :meth:`hap.cluster.device.Device.seconds` of each device's own part of the work.
Communicating: :mod:`hap.synthesizer.cost.collective_cost`. Every figure is a vector over ranks or a
number of seconds; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hap.cluster.link import messages
from hap.cluster.topology import Cluster
from hap.cluster.work import Work
from hap.ir.axes import Axes, Shares
from hap.ir.graph import ITEM_BYTES, Graph, Node, Tensor
from hap.ir.loss_chunks import CHUNK, CHUNKS
from hap.ir.placement import LOCAL, Placement, conversion
from hap.ir.program import Convert
from hap.synthesizer.cost.collective_cost import NetworkModel, Quote
from hap.synthesizer.cost.operator_work import node_work, update_work
from hap.synthesizer.rules.rule_table import Row

PerRank = npt.NDArray[np.float64]


class Machine:
    """:meth:`hap.cluster.device.Device.seconds` for all ranks at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.network = NetworkModel(cluster)
        self._memory = np.array([d.memory_bytes_per_s for d in cluster.devices])
        self._rates: dict[tuple[str, str], tuple[PerRank, PerRank, PerRank]] = {}
        self._sooner = np.array([d.relaunch_s for d in cluster.devices])
        self.interference, self.drag = _among_all(cluster)
        """Per rank, the part of a collective's time that computing beside it loses; and how many
        times as long a collective takes while the rank computes."""
        self.delay_s: PerRank = np.array([d.contention.delay_s for d in cluster.devices])
        """Per rank, seconds by which each of its messages is later still meanwhile."""
        self.chunk = np.array(
            [CHUNK["cpu" if d.kind.endswith("cpu") else "cuda"] for d in cluster.devices]
        )
        """Per rank, elements that a loss works on at once."""

    def seconds(
        self, work: Work, flops: PerRank, nbytes: PerRank, *, sooner: bool = False
    ) -> PerRank:
        """Time per rank of one operator, given each rank's operations and traffic.

        ``sooner``: it follows a small one (:attr:`hap.ir.graph.Graph.after_small`).
        """
        key = (work.kind, work.dtype)
        if key not in self._rates:
            devices = self.cluster.devices
            rates = np.array([d.rate(*key) for d in devices])
            operand_s = np.array([d.operand_s(work.kind) for d in devices])
            self._rates[key] = rates, operand_s, np.array([d.launch_of(work.kind) for d in devices])
        rates, operand_s, launch_s = self._rates[key]
        busy = np.maximum(flops / rates + nbytes * operand_s, nbytes / self._memory)
        start_s = self._sooner if sooner else launch_s
        seconds: PerRank = np.where((flops > 0) | (nbytes > 0), start_s + busy, 0.0)
        return seconds

    @cached_property
    def speed(self) -> PerRank:
        """Relative speed of the ranks in float32 products; sums to 1."""
        rates = np.array([d.rate("matmul", "float32") for d in self.cluster.devices])
        speed: PerRank = rates / rates.sum()
        return speed


def _among_all(cluster: Cluster) -> tuple[PerRank, PerRank]:
    """(interference, drag) per rank in collectives of all devices.

    A device's own figures are of collectives among it and faster ones. Where slower ones take part
    as well, these last longer, and the device does as much for them as before: no more than a slower
    one does, in less of its time. Nor does it hold them up by more than a slower one does.
    """
    rate, lost, drag = (
        np.array(figures)
        for figures in zip(
            *(
                (d.rate("matmul", "float32"), d.contention.interference, d.contention.drag)
                for d in cluster.devices
            ),
            strict=True,
        )
    )
    slower = rate[None, :] <= rate[:, None]
    return (
        np.where(slower, (lost * rate)[None, :], np.inf).min(axis=1) / rate,
        np.where(slower, drag[None, :], np.inf).min(axis=1),
    )


class CostModel:
    """Prices on one graph, one cluster and one set of shares."""

    def __init__(
        self, graph: Graph, axes: Axes, machine: Machine, shares: Shares, optimizer_states: int
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.network = machine.network
        self.optimizer_states = optimizer_states
        self.axes = axes
        self._one = np.ones(machine.cluster.world_size)
        self.ring_size = machine.cluster.world_size
        """Ranks that convert placements among each other."""
        vectors: dict[tuple[int, ...], PerRank] = {}  # axes with equal shares have one vector
        for units in shares.values():
            vectors.setdefault(units, np.array(units, dtype=np.float64) / sum(units))
        self._parts = {name: vectors[units] for name, units in shares.items()}
        self._computed: dict[object, PerRank] = {}
        self._computed_alike: dict[object, PerRank] = {}
        self._converted: dict[object, tuple[list[Quote], object]] = {}
        self._local_bytes: dict[tuple[str, Placement], PerRank] = {}

    def where(self, tensor: str, placement: Placement) -> Hashable:
        """What :meth:`parts` depends on beside the shares."""
        return self.axes.of[tensor, placement.dim] if placement.sharded else None

    def lies(self, axis: str) -> Hashable:
        """Equal for axes under which all prices are equal; layers repeat."""
        return id(self._parts[axis])

    def kind(self, node: Node, row: Row) -> Hashable:
        """Equal for nodes and rows that cost the same whatever the shares."""
        names, placements = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
        lie = tuple(
            self.where(name, p)
            for name, p in zip(names, placements, strict=True)
            if name is not None and p is not None
        )
        return self.graph.alike[node.name], placements, lie, self.around(node)

    def around(self, node: Node) -> Hashable:
        """What else the price of a node depends on: here nothing."""
        return None

    def parts(self, tensor: Tensor, placement: Placement) -> PerRank:
        """Each rank's part of a tensor: 1 where it holds all of it."""
        if not placement.sharded:
            return self._one
        return self._parts[self.axes.of[tensor.name, placement.dim]]

    def whole_bytes(self, tensor: Tensor) -> PerRank:
        """What each rank holds of a tensor that is whole in its ring."""
        return tensor.nbytes * self._one

    def local_bytes(self, tensor: Tensor, placement: Placement) -> PerRank:
        key = (tensor.name, placement)
        if key not in self._local_bytes:
            self._local_bytes[key] = tensor.nbytes * self.parts(tensor, placement)
        return self._local_bytes[key]

    def compute(self, node: Node, row: Row) -> PerRank:
        """Seconds per rank of a node run by one of its rows."""
        key = (node.name, row.outs, row.ins)
        seconds = self._computed.get(key)
        if seconds is None:
            seconds = self._computed[key] = self._compute_alike(node, row)
        return seconds

    def _compute_alike(self, node: Node, row: Row) -> PerRank:
        """Layers repeat: what looks alike to every formula is priced once."""
        tensors = self.graph.tensors
        names, placements = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
        placed = [
            (tensors[name], p)
            for name, p in zip(names, placements, strict=True)
            if name is not None and p is not None
        ]
        shares = tuple(id(self.parts(t, p)) for t, p in placed)
        key = (self.graph.alike[node.name], placements, shares)
        if key not in self._computed_alike:
            self._computed_alike[key] = self._compute(node, row, placed)
        return self._computed_alike[key]

    def share(self, node: Node, row: Row) -> PerRank:
        """Each rank's part of an operator's arithmetic."""
        names = (*node.inputs, *node.outputs)
        for name, p in zip(names, (*row.ins, *row.outs), strict=True):
            if name is not None and p is not None and p.sharded:
                return self.parts(self.graph.tensors[name], p)
        return self._one

    def flops(self, node: Node, row: Row) -> PerRank:
        """Floating-point operations of each rank."""
        return node_work(node, self.graph).flops * self.share(node, row)

    def _compute(self, node: Node, row: Row, placed: list[tuple[Tensor, Placement]]) -> PerRank:
        work = node_work(node, self.graph)
        if not work.flops and not work.bytes:
            return np.zeros_like(self._one)
        part = self.share(node, row)
        nbytes = sum(self.local_bytes(t, p) for t, p in dict.fromkeys(placed))
        # A rank without a share still reads nothing: its call is on empty tensors.
        nbytes = np.where(part > 0, nbytes, 0.0)
        sooner = node.name in self.graph.after_small
        return self.machine.seconds(work, work.flops * part, nbytes, sooner=sooner)

    def workspace(self, node: Node, row: Row) -> PerRank:
        """Bytes that a node's kernels hold beside what it reads and what it makes."""
        pieces = CHUNKS.get(node.op, 0)
        if not pieces:
            return np.zeros_like(self._one)
        tensors = self.graph.tensors
        ins = [(tensors[name], p) for name, p in zip(node.inputs, row.ins, strict=True)]
        logits, placed = max(ins, key=lambda each: each[0].numel)
        part = self.parts(logits, placed)
        elements, rows = logits.numel * part, logits.shape[0] * (part if placed.dim == 0 else 1)
        line = np.divide(elements, rows, out=np.zeros_like(elements), where=elements > 0)
        piece = np.minimum(elements, np.maximum(line, self.machine.chunk))
        width = max(4, ITEM_BYTES[logits.dtype])
        pieces += width > ITEM_BYTES[logits.dtype]
        found: PerRank = pieces * width * piece
        return found

    def cross(self, group: Sequence[tuple[Node, Row]]) -> float | None:
        """Seconds of neighbouring operators that are collectives; ``None`` if they compute."""
        return None

    def messages(self, kind: str) -> int:
        """How many messages of a collective in a ring go one after the other."""
        return messages(kind, self.ring_size)

    def crossing_messages(self, group: Sequence[tuple[Node, Row]]) -> int:
        """The same of what :meth:`cross` prices; 0 if they compute."""
        return 0

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        """Implementations of a conversion, the fastest first; local ones are priced as copies.

        ``fused``: the conversion will run with its neighbours, which pay for the start.
        """
        kind = conversion(src, dst)
        if kind is None or kind == "slice":  # a slice is a view of what is there
            return [Quote("", 0.0)]
        if kind in LOCAL:
            traffic = 2 * tensor.nbytes * self._one
            work = Work("memory", tensor.dtype, tensor.numel, 0.0)
            return [Quote("", float(self.machine.seconds(work, self._one, traffic).max()))]
        parts = self.parts(tensor, src), self.parts(tensor, dst)
        key = kind, tensor.nbytes, *map(id, parts), fused
        if key not in self._converted:
            found = self.network.choices(kind, tensor.nbytes, *parts, start=not fused)
            self._converted[key] = found, parts  # kept, so that their identities stay their own
        return self._converted[key][0]

    def alike(self, tensor: str) -> object:
        """What else the prices of a tensor's conversions depend on: here nothing."""
        return None

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
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
        work = update_work(parameter.dtype, self.optimizer_states)
        nbytes = work.bytes * self.local_bytes(parameter, stored)
        return self.machine.seconds(work, work.flops * elements, nbytes)

    def stored_bytes(self, parameter: Tensor, stored: Placement, *, trained: bool) -> PerRank:
        """Parameter, gradient and optimizer states of a stored shard."""
        copies = 2 + self.optimizer_states if trained else 1
        return copies * self.local_bytes(parameter, stored)
