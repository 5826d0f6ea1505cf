"""The cost of hierarchical collectives of :mod:`hap.runtime.two_level_comm`.

Between machines all columns run side by side and share the adapters: their latencies overlap, their
bytes add up. A stage ends with its slowest machine (alpha-beta: Thakur et al., 2005; BlueConnect:
Cho et al., MLSys 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.hierarchical import cheaper, regular

Floats = npt.NDArray[np.float64]


class Stages:
    """A cluster for which :func:`hap.ir.hierarchical.exists` is true.

    ``on`` is 1 to count the latency, and 0 to omit it; ``parts`` have an entry per rank.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.counts = cluster.counts
        self.regular = regular(self.counts)
        self._width = min(self.counts)
        self._machines = len(self.counts)
        self._inner = [cluster.intra[node] for node in cluster.nodes]
        self._outer = cluster.inter
        self._starts = np.cumsum([0, *self.counts[:-1]])
        # Alike machines take equal times: each kind, a number of devices and a link, is priced once.
        numbers: dict[tuple[int, Link], int] = {}
        kinds = list(zip(self.counts, self._inner, strict=True))
        self._kind = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        self._kinds = list(numbers)

    def all_reduce(self, nbytes: float, on: float) -> float:
        """Reduce-scatter inside, all-reduce of a part per column, all-gather inside."""
        part = nbytes / self._width
        inside = self._inside([[part] * self._width] * self._machines, on)
        m, link = self._machines, self._outer
        return 2 * inside + all_reduce(m, nbytes, steps(m) * on * link.latency_s, link)

    def gather(self, nbytes: float, parts: Floats, on: float, *, scatter: bool) -> float:
        """All-gather; with ``scatter`` reduce-scatter, the same stages in reverse.

        Machines of unequal sizes first level their shards over the columns, which gathers them
        inside; in reverse, they finally gather the columns' shards and cut their own from them.
        """
        level = 0.0
        if self.regular:
            cuts = (nbytes * parts).reshape(self._machines, self._width)
        else:
            blocks = np.split(nbytes * parts, self._starts[1:])
            cuts = np.array([np.full(self._width, block.sum() / self._width) for block in blocks])
            level = self._inside([b.tolist() for b in (cuts if scatter else blocks)], on)
        columns = cuts.T.tolist()
        moved = [ring(column) for column in columns]
        across = max(starts for starts, _ in moved) * on * self._outer.latency_s
        across += sum(sent for _, sent in moved) / self._outer.bandwidth_bytes_per_s
        totals = [sum(column) for column in columns]
        return level + across + self._inside([totals] * self._machines, on)

    def all_to_all(self, nbytes: float, src: Floats, dst: Floats, on: float) -> float:
        """First to the peer in each machine, which passes the data on; machines of equal size."""
        width, link = self._width, self._outer
        have, want = (parts.reshape(self._machines, width) for parts in (src, dst))
        across = (self._machines - 1) * on * link.latency_s
        across += nbytes * largest_exchange(have.sum(1), want.sum(1)) / link.bandwidth_bytes_per_s
        column = have.sum(0)
        # The rank in column j then has its column's rows of its machine's result.
        sent = column * (want.sum(1, keepdims=True) - want)
        received = (column.sum() - column) * want
        busiest = nbytes * np.maximum(sent, received).max(1)
        inside = [
            (width - 1) * on * inner.latency_s + float(traffic) / inner.bandwidth_bytes_per_s
            for inner, traffic in zip(self._inner, busiest, strict=True)
        ]
        return across + max(inside)

    def floor_s(self, kind: str, nbytes: float, on: float) -> float:
        """Return the least seconds of a collective over all parts; linear in ``nbytes``, ``on``.

        A ring of ``n`` starts at least ``log2 n`` times and moves ``(n - 1) / n`` of its bytes.
        """
        m, width, outer = self._machines, self._width, self._outer
        if kind == "all_to_all":  # the data may all stay on one rank
            inner = max(link.latency_s for link in self._inner)
            return on * ((m - 1) * outer.latency_s + (width - 1) * inner)
        columns = [nbytes / width] * width
        moved_s, starts_s = max(
            (ring([*columns, *[0.0] * (count - width)])[1] / link.bandwidth_bytes_per_s,
             steps(count) * on * link.latency_s)
            for count, link in self._kinds
        )  # fmt: skip
        start_s = steps(m) * on * outer.latency_s
        if kind == "all_reduce":
            return 2 * (moved_s + starts_s) + all_reduce(m, nbytes, start_s, outer)
        return moved_s + starts_s + start_s + (m - 1) / m * nbytes / outer.bandwidth_bytes_per_s

    def _inside(self, sizes: Sequence[Sequence[float]], on: float) -> float:
        """Gather or reduce-scatter a list of sizes in each machine; missing ones are 0."""
        slowest = 0.0
        alike = dict.fromkeys(zip(self._kind, map(tuple, sizes), strict=True))
        for kind, mine in alike:
            count, link = self._kinds[kind]
            starts, sent = ring([*mine, *[0.0] * (count - len(mine))])
            seconds = starts * on * link.latency_s + sent / link.bandwidth_bytes_per_s
            slowest = max(slowest, seconds)
        return slowest


def steps(ranks: int) -> int:
    """Return the steps of a tree, or of recursive doubling."""
    return math.ceil(math.log2(ranks))


def all_reduce(ranks: int, nbytes: float, tree_s: float, link: Link) -> float:
    """Return seconds: small tensors use a tree (``tree_s``), large ones a ring (slowest ``link``)."""
    bandwidth = link.bandwidth_bytes_per_s
    around = 2 * (ranks - 1) / ranks * nbytes / bandwidth
    return min(2 * tree_s + around, tree_s + steps(ranks) * 2 * nbytes / bandwidth)


def ring(sizes: Sequence[float]) -> tuple[int, float]:
    """Return (latencies, bytes over each link) of a gather in the cheaper implementation."""
    if len(sizes) == 1:
        return 0, 0.0
    if cheaper(sizes) == "padded":
        return steps(len(sizes)), (len(sizes) - 1) * max(sizes)
    return max(sum(size > 0 for size in sizes), steps(len(sizes))), sum(sizes)


def largest_exchange(src: Floats, dst: Floats) -> float:
    """Return the largest part of the whole that one place sends or receives in an exchange."""
    return float(np.maximum(src * (1 - dst), dst * (1 - src)).max())
