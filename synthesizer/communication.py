"""What a conversion between placements costs on the cluster's links, by implementation.

The ranks form a ring in rank order, which crosses every machine's adapter once each way, so
that the slowest link of the ring bounds all its traffic (alpha-beta model; Thakur et al.,
"Optimization of collective communication operations in MPICH", 2005). Shards may be uneven:
a *padded* collective moves the largest shard for everyone, a *grouped* one sends each shard
with an operation of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hap.cluster import Cluster

Fractions = npt.NDArray[np.float64]
"""Per rank, its part of a sharded dim; sums to 1."""


class Choice(NamedTuple):
    """One implementation of a conversion and its predicted time."""

    implementation: str
    seconds: float


class Network:
    """The figures of the ring and of each machine's adapter."""

    def __init__(self, cluster: Cluster) -> None:
        self.world_size = cluster.world_size
        nodes = [d.node for d in cluster.devices]
        hops = [
            cluster.intra[a] if a == b else cluster.inter
            for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)
        ]
        self.latency_s = max(h.latency_s for h in hops)
        self.bytes_per_s = min(h.bandwidth_bytes_per_s for h in hops)
        self._many = len(cluster.nodes) > 1
        self._adapter = cluster.inter.bandwidth_bytes_per_s
        self._inner = np.array([cluster.intra[n].bandwidth_bytes_per_s for n in nodes])
        self._member = np.array([[n == m for n in nodes] for m in cluster.nodes], dtype=np.float64)

    def choices(
        self, kind: str, nbytes: int, src: Fractions, dst: Fractions, *, start: float = 1.0
    ) -> list[Choice]:
        """All implementations of a collective, the fastest first.

        Args:
            kind: as :func:`hap.placement.conversion` names it.
            nbytes: size of the whole tensor.
            src, dst: parts of the ranks before and after, where that side is sharded.
            start: which part of the latency to count: 0 for the traffic alone.
        """
        alpha = self.latency_s * start
        found = getattr(self, f"_{kind}")(float(nbytes), src, dst, alpha)
        return sorted(found, key=lambda choice: choice.seconds)

    def floor_s(
        self, kind: str, nbytes: int, *, start: float = 1.0, crossing: float = 0.0
    ) -> float:
        """The least seconds of a collective, whatever the parts; linear in bytes and start.

        What is padded is least for equal parts, what has a sender per part for one sender. So
        is what an all-to-all moves, unless ``crossing`` seconds of it are known to be left.
        """
        n = self.world_size
        even, alone = np.full(n, 1 / n), np.eye(n)[0]
        found = [c for p in (even, alone) for c in self.choices(kind, nbytes, p, p, start=start)]
        return min(c.seconds + crossing * (c.implementation == "exact") for c in found)

    def crossing_s(self, nbytes: int, low: Fractions, high: Fractions) -> float:
        """The least seconds of an exact all-to-all's traffic between machines.

        ``low`` and ``high`` hold the least and largest part of each machine on one side; the
        other side may have any. A machine with ``s`` before and ``d`` after sends
        ``s (1 - d)`` and receives ``d (1 - s)``; the larger is least at ``d = s``:
        ``s (1 - s)``. That is concave, so that its least value over a range is at an end.
        """
        if not self._many:
            return 0.0

        def least(lows: Fractions, highs: Fractions) -> Fractions:
            return np.minimum(lows * (1 - lows), highs * (1 - highs))

        n = len(low)
        one = float(least(low, high).max())
        # The machine with most has at least 1 / n, and at most the largest of all.
        largest = float(least(np.array(max(1 / n, low.max())), np.array(high.max())))
        return nbytes * max(0.0, one, largest) / self._adapter

    def _gather(self, nbytes: float, parts: Fractions, a: float) -> list[Choice]:
        n, bw = self.world_size, self.bytes_per_s
        padded = math.ceil(math.log2(n)) * a + (n - 1) * nbytes * float(parts.max()) / bw
        senders = int(np.count_nonzero(parts))
        return [Choice("padded", padded), Choice("grouped", senders * a + nbytes / bw)]

    def _all_gather(self, nbytes: float, src: Fractions, dst: Fractions, a: float) -> list[Choice]:
        return self._gather(nbytes, src, a)

    def _reduce_scatter(
        self, nbytes: float, src: Fractions, dst: Fractions, a: float
    ) -> list[Choice]:
        return self._gather(nbytes, dst, a)

    def _all_reduce(self, nbytes: float, src: Fractions, dst: Fractions, a: float) -> list[Choice]:
        n, bw = self.world_size, self.bytes_per_s
        steps, ring = math.ceil(math.log2(n)), 2 * (n - 1) / n * nbytes / bw
        # Libraries send small tensors down a tree, and large ones around a ring.
        one_shot = min(2 * steps * a + ring, steps * (a + 2 * nbytes / bw))
        return [Choice("one shot", one_shot), Choice("two step", 2 * (steps + 1) * a + ring)]

    def _all_to_all(self, nbytes: float, src: Fractions, dst: Fractions, a: float) -> list[Choice]:
        sent, received = src * (1 - dst), dst * (1 - src)
        busiest = float((nbytes * np.maximum(sent, received) / self._inner).max())
        if self._many:
            s, d = self._member @ src, self._member @ dst
            leaving = float(np.maximum(s * (1 - d), d * (1 - s)).max())
            busiest = max(busiest, nbytes * leaving / self._adapter)
        exact = Choice("exact", (self.world_size - 1) * a + busiest)
        through = min(self._gather(nbytes, src, a), key=lambda choice: choice.seconds)
        return [exact, Choice("gathered", through.seconds)]
