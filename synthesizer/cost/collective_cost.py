"""The cost of each implementation of a collective on the links of a cluster.

Flat collectives run on a ring in rank order, which crosses every machine's adapter once each way:
its slowest link bounds all traffic (alpha-beta model; Thakur et al., "Optimization of collective
communication operations in MPICH", 2005). Of the ``ceil(log2 n)`` steps of a tree,
``ceil(log2 machines)`` have the latency between machines. A *padded* collective moves the largest
shard for every rank, a *grouped* one sends each shard by an operation of its own. Hierarchical
ones: :mod:`hap.synthesizer.cost.hierarchical_cost`.

Figures measured among these devices, or the next larger set (:meth:`Cluster.measured`), replace the
links' in the same formulas.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hap.cluster.link import IMPLEMENTATIONS, Link
from hap.cluster.topology import Cluster
from hap.ir.hierarchical import exists
from hap.synthesizer.cost.hierarchical_cost import Stages, all_reduce, largest_exchange, steps

Fractions = npt.NDArray[np.float64]
"""Per rank, its part of a sharded dim; sums to 1."""


class Quote(NamedTuple):
    """Predicted seconds of a conversion by one implementation."""

    implementation: str
    seconds: float


class Links:
    """The effective figures of the ring and of each machine's adapter, for one implementation."""

    def __init__(self, cluster: Cluster) -> None:
        self.world_size = cluster.world_size
        nodes = [d.node for d in cluster.devices]
        count = Counter(nodes)
        hops = [
            cluster.intra[a] if a == b else cluster.inter
            for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)
        ]
        self.latency_s = max(h.latency_s for h in hops)
        self.bytes_per_s = min(h.bandwidth_bytes_per_s for h in hops)
        self.adapter = cluster.inter.bandwidth_bytes_per_s
        self.inner = np.array([cluster.intra[n].bandwidth_bytes_per_s for n in nodes])
        sizes = {node: (count[node], cluster.intra[node].latency_s) for node in cluster.nodes}
        inner_s = max((a for n, a in sizes.values() if n > 1), default=0.0)
        outer = steps(len(sizes))
        self.tree_s = outer * cluster.inter.latency_s + (steps(self.world_size) - outer) * inner_s
        self.peers_s = max(
            (n - 1) * a + (self.world_size - n) * cluster.inter.latency_s for n, a in sizes.values()
        )

    def padded(self, nbytes: float, parts: Fractions, on: float) -> float:
        """Return the seconds of a gather or reduce-scatter with parts padded to the largest."""
        largest = nbytes * float(parts.max())
        return on * self.tree_s + (self.world_size - 1) * largest / self.bytes_per_s


class NetworkModel:
    """Prices of collectives over all ranks of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.world_size = cluster.world_size
        nodes = [d.node for d in cluster.devices]
        plain = Links(cluster)
        self.latency_s, self.bytes_per_s = plain.latency_s, plain.bytes_per_s
        self._many = len(cluster.nodes) > 1
        self._member = (np.array(nodes) == np.array(cluster.nodes)[:, None]).astype(np.float64)
        staged = exists(cluster.counts)
        self._floors: dict[tuple[str, int, float, float], float] = {}
        self._links: dict[tuple[str, str], Links] = {}
        self._stages: dict[str, Stages] = {}
        self._least_s: dict[tuple[str, str], float] = {}
        for kind, ways in IMPLEMENTATIONS.items():
            for how in ways:
                own = cluster.measured(kind, how)
                seen = cluster.seen_by(kind, how) if own else cluster
                used = [link for level, link in own.items() if level == "inside" or self._many]
                if least_s := max((link.least_s for link in used), default=0.0):
                    self._least_s[kind, how] = least_s
                if how == "hierarchical":
                    if staged:
                        self._stages[kind] = Stages(seen)
                else:
                    self._links[kind, how] = Links(seen) if own else plain
        exchanges = [self._links["all_to_all", "exact"].adapter]
        if "all_to_all" in self._stages:
            exchanges.append(
                cluster.seen_by("all_to_all", "hierarchical").inter.bandwidth_bytes_per_s
            )
        self._exchange_bytes_per_s = max(exchanges)

    def choices(
        self, kind: str, nbytes: int, src: Fractions, dst: Fractions, *, start: float = 1.0
    ) -> list[Quote]:
        """Return all implementations of a collective, the fastest first.

        Args:
            kind: a name of :func:`hap.ir.placement.conversion`.
            nbytes: size of the whole tensor.
            src, dst: parts of the ranks before and after, where that side is sharded.
            start: fraction of the latency to count: 0 for the traffic alone. A measured minimum
                counts only at 1.
        """
        found = self._added(kind, nbytes, src, dst, start)
        if self._least_s and start == 1:
            found = [Quote(how, max(s, self._least_s.get((kind, how), 0.0))) for how, s in found]
        return sorted(found, key=lambda choice: choice.seconds)

    def _added(
        self, kind: str, nbytes: int, src: Fractions, dst: Fractions, start: float
    ) -> list[Quote]:
        """Return the sum of starts and bytes of a collective."""
        found: list[Quote] = getattr(self, f"_{kind}")(float(nbytes), src, dst, float(start))
        return found

    def floor_s(
        self, kind: str, nbytes: int, *, start: float = 1.0, crossing: float = 0.0
    ) -> float:
        """Return the least seconds of a collective over all parts; linear in bytes and start.

        Padded traffic is least for equal parts; grouped traffic and that of an all-to-all are least
        for a single sender. ``crossing``: a lower bound of an all-to-all's seconds of traffic.
        """
        key = kind, nbytes, start, crossing
        if key not in self._floors:
            self._floors[key] = self._floor_s(kind, nbytes, start, crossing)
        return self._floors[key]

    def _floor_s(self, kind: str, nbytes: int, start: float, crossing: float) -> float:
        n = self.world_size
        even, alone = np.full(n, 1 / n), np.zeros(n)
        alone[0] = 1.0
        moved = kind == "all_to_all"
        found = [
            c.seconds + crossing * (c.implementation == "exact")
            for p in (even, alone)
            for c in self._added(kind, nbytes, p, p, start)
            if c.implementation != "hierarchical"
        ]
        stages = self._stages.get(kind)
        if stages and (stages.regular or not moved):
            found.append(stages.floor_s(kind, nbytes, start) + crossing * moved)
        return min(found)

    def crossing_s(self, nbytes: int, low: Fractions, high: Fractions) -> float:
        """Return the least seconds of an exact all-to-all's traffic between machines.

        ``low`` and ``high`` bound each machine's part on one side; the other side is free. A machine
        with ``s`` before and ``d`` after sends ``s (1 - d)`` and receives ``d (1 - s)``; the larger is
        least at ``d = s``: ``s (1 - s)``, which is concave, so that its minimum is at an end.
        """
        if not self._many:
            return 0.0

        def least(lows: Fractions, highs: Fractions) -> Fractions:
            return np.minimum(lows * (1 - lows), highs * (1 - highs))

        n = len(low)
        one = float(least(low, high).max())
        # The machine with the largest part has at least 1 / n, and at most the largest bound.
        largest = float(least(np.array(max(1 / n, low.max())), np.array(high.max())))
        return nbytes * max(0.0, one, largest) / self._exchange_bytes_per_s

    def _gather(self, kind: str, nbytes: float, parts: Fractions, on: float) -> list[Quote]:
        found = [
            Quote("padded", self._links[kind, "padded"].padded(nbytes, parts, on)),
            Quote("grouped", self._grouped(self._links[kind, "grouped"], nbytes, parts, on)),
        ]
        if stages := self._stages.get(kind):
            seconds = stages.gather(nbytes, parts, on, scatter=kind == "reduce_scatter")
            found.append(Quote("hierarchical", seconds))
        return found

    def _grouped(self, links: Links, nbytes: float, parts: Fractions, on: float) -> float:
        senders = int(np.count_nonzero(parts))
        # One after another, but even a single sender uses a tree.
        latency_s = max(senders * links.latency_s, links.tree_s)
        return on * latency_s + nbytes / links.bytes_per_s

    def _all_gather(self, nbytes: float, src: Fractions, dst: Fractions, on: float) -> list[Quote]:
        return self._gather("all_gather", nbytes, src, on)

    def _reduce_scatter(
        self, nbytes: float, src: Fractions, dst: Fractions, on: float
    ) -> list[Quote]:
        return self._gather("reduce_scatter", nbytes, dst, on)

    def _all_reduce(self, nbytes: float, src: Fractions, dst: Fractions, on: float) -> list[Quote]:
        n = self.world_size
        one, two = self._links["all_reduce", "one shot"], self._links["all_reduce", "two step"]
        slowest = Link(one.bytes_per_s, one.latency_s)
        around = 2 * (n - 1) / n * nbytes / two.bytes_per_s
        found = [
            Quote("one shot", all_reduce(n, nbytes, on * one.tree_s, slowest)),
            Quote("two step", 2 * on * (two.tree_s + two.latency_s) + around),
        ]
        if stages := self._stages.get("all_reduce"):
            found.append(Quote("hierarchical", stages.all_reduce(nbytes, on)))
        return found

    def _all_reduce_lse(
        self, nbytes: float, src: Fractions, dst: Fractions, on: float
    ) -> list[Quote]:
        # Reduce the largest term first, then the sum of exponentials less it.
        links = self._links["all_reduce_lse", "two reductions"]
        slowest = Link(links.bytes_per_s, links.latency_s)
        reduced = 2 * all_reduce(self.world_size, nbytes, on * links.tree_s, slowest)
        n = self.world_size
        # Or gather all the terms on every rank: a whole tensor from each.
        links = self._links["all_reduce_lse", "terms gathered"]
        gathered = links.padded(n * nbytes, np.full(n, 1 / n), on)
        return [Quote("terms gathered", gathered), Quote("two reductions", reduced)]

    def _all_to_all(self, nbytes: float, src: Fractions, dst: Fractions, on: float) -> list[Quote]:
        links = self._links["all_to_all", "exact"]
        sent, received = src * (1 - dst), dst * (1 - src)
        busiest = float((nbytes * np.maximum(sent, received) / links.inner).max())
        if self._many:
            between = largest_exchange(self._member @ src, self._member @ dst)
            busiest = max(busiest, nbytes * between / links.adapter)
        gathered = self._links["all_to_all", "gathered"]
        found = [
            Quote("exact", on * links.peers_s + busiest),
            Quote("gathered", gathered.padded(nbytes, src, on)),
        ]
        stages = self._stages.get("all_to_all")
        if stages and stages.regular:
            seconds = stages.all_to_all(nbytes, src, dst, on)
            found.append(Quote("hierarchical", seconds))
        return found
