"""A performance model of a cluster: the seconds of an operator on every device, and its network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hap.cluster.topology import Cluster
from hap.cluster.work import Work
from hap.ir.graph import Graph
from hap.ir.loss_chunks import CHUNK
from hap.synthesizer.cost.collective_cost import NetworkModel, Quote

PerRank = npt.NDArray[np.float64]
"""One number per rank, shape [world_size]."""


class PriceMemo:
    """Prices that were computed already: by kind of operator, or of conversion, and parts."""

    def __init__(self) -> None:
        self.computed: dict[object, PerRank] = {}
        self.converted: dict[object, list[Quote]] = {}


class HardwareModel:
    """:meth:`hap.cluster.device.Device.seconds` for all ranks at once.

    Args:
        products: operations of a step's products by dtype, which decide :attr:`speed`.

    Attributes:
        interference: per rank, the part of a collective's time that simultaneous computing loses.
        drag: per rank, duration of a collective while the rank computes over its usual duration.
        host_s: per rank, seconds in which the host issues one operator.
        delay_s: per rank, seconds by which computing delays each message of a collective.
        chunk: per rank, the number of elements that a loss processes at once.
        on_gpu: per rank, 1 if its device is a GPU, 0 if it is a CPU.
        vectors: units per rank -> parts per rank; kept, so that their identity is a key.
        one: the parts of a tensor that every rank holds whole. ``one_apart`` equals it, but is
            another object.
    """

    def __init__(self, cluster: Cluster, products: Mapping[str, float] | None = None) -> None:
        self.cluster = cluster
        self._products = products or {"float32": 1.0}
        self.network = NetworkModel(cluster)
        self._memory = np.array([d.memory_bytes_per_s for d in cluster.devices])
        self._rates: dict[tuple[str, str, bool, int], tuple[PerRank, PerRank, PerRank]] = {}
        self.interference, self.drag = _contention_of_all(cluster)
        self.delay_s: PerRank = np.array([d.contention.delay_s for d in cluster.devices])
        self.host_s: PerRank = np.array([d.host_s for d in cluster.devices])
        self.vectors: dict[tuple[int, ...], PerRank] = {}
        self.one: PerRank = np.ones(cluster.world_size)
        self.one_apart = self.one.copy()
        self._known: dict[int, tuple[Graph, PriceMemo]] = {}
        kinds = ["cpu" if d.kind.endswith("cpu") else "cuda" for d in cluster.devices]
        self.chunk = np.array([CHUNK[kind] for kind in kinds])
        self.on_gpu: PerRank = np.array([float(kind == "cuda") for kind in kinds])

    def seconds(self, work: Work, flops: PerRank, nbytes: PerRank) -> PerRank:
        """Return the time per rank of one operator, given each rank's operations and traffic."""
        key = (work.kind, work.dtype, work.small, work.launches)
        if key not in self._rates:
            devices = self.cluster.devices
            rates = np.array([d.rate(work.kind, work.dtype) for d in devices])
            operand_s = np.array([d.operand_s(work.kind) for d in devices])
            self._rates[key] = rates, operand_s, np.array([d.launch_of(work) for d in devices])
        rates, operand_s, launch_s = self._rates[key]
        busy = np.maximum(flops / rates + nbytes * operand_s, nbytes / self._memory)
        seconds: PerRank = np.where((flops > 0) | (nbytes > 0), launch_s + busy, 0.0)
        return seconds

    def known(self, graph: Graph) -> PriceMemo:
        """Return the prices of a graph under the parts in :attr:`vectors`, known so far."""
        return self._known.setdefault(id(graph), (graph, PriceMemo()))[1]

    @cached_property
    def types(self) -> tuple[tuple[int, ...], ...]:
        """:meth:`hap.cluster.topology.Cluster.types`."""
        return self.cluster.types()

    @cached_property
    def speed(self) -> PerRank:
        """Relative speed of the ranks in the step's products; sums to 1."""
        total = sum(self._products.values())
        rates = np.array([
            1 / sum(n / total / d.rate("matmul", dtype) for dtype, n in self._products.items())
            for d in self.cluster.devices
        ])  # fmt: skip
        speed: PerRank = rates / rates.sum()
        return speed


def _contention_of_all(cluster: Cluster) -> tuple[PerRank, PerRank]:
    """Return (interference, drag) per rank in collectives of all devices.

    A device's own figures were measured in collectives with faster devices. Slower devices make a
    collective longer, but not the device's work for it: interference and drag are at most those
    of any slower device, interference in proportion to speed.
    """
    rate = np.array([d.rate("matmul", "float32") for d in cluster.devices])
    lost = np.array([d.contention.interference for d in cluster.devices])
    drag = np.array([d.contention.drag for d in cluster.devices])
    slower = rate[None, :] <= rate[:, None]
    return (
        np.where(slower, (lost * rate)[None, :], np.inf).min(axis=1) / rate,
        np.where(slower, drag[None, :], np.inf).min(axis=1),
    )
