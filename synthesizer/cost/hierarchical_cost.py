"""The cost of hierarchical collectives of :mod:`hap.runtime.two_level_comm`.

Between machines all columns run side by side and share the adapters: their latencies overlap, their
bytes add up. A stage ends with its slowest machine (alpha-beta: Thakur et al., 2005; BlueConnect:
Cho et al., MLSys 2019).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.hierarchical import cheaper, regular

Floats = npt.NDArray[np.float64]

KEPT = 256
"""Limit of gathers that are remembered, by their parts."""


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
        self._kinds = list(zip(self.counts, self._inner, strict=True))
        self._even = self._inside([[1 / self._width] * self._width] * self._machines)
        self._gathers = functools.lru_cache(KEPT)(self._gather)

    def all_reduce(self, nbytes: float, on: float) -> float:
        """Reduce-scatter inside, all-reduce of a part per column, all-gather inside."""
        m, link = self._machines, self._outer
        across = all_reduce(m, nbytes, steps(m) * on * link.latency_s, link)
        return 2 * _slowest(self._even, nbytes, on) + across

    def gather(self, nbytes: float, parts: Floats, on: float, *, scatter: bool) -> float:
        """All-gather; with ``scatter`` reduce-scatter, the same stages in reverse."""
        stages = self._gathers(parts.tobytes(), scatter)
        return sum(_slowest(moves, nbytes, on) for moves in stages)

    def _gather(self, parts_as_key: bytes, scatter: bool) -> tuple[list[_Move], ...]:
        """Return the moves of the stages: levelling, between the machines, and inside them.

        Machines of unequal sizes first level their shards over the columns, which gathers them
        inside; in reverse, they finally gather the columns' shards and cut their own from them.
        """
        parts, level = np.frombuffer(parts_as_key), list[_Move]()
        if self.regular:
            cuts = parts.reshape(self._machines, self._width)
        else:
            blocks = np.split(parts, self._starts[1:])
            cuts = np.array([np.full(self._width, block.sum() / self._width) for block in blocks])
            level = self._inside([b.tolist() for b in (cuts if scatter else blocks)])
        columns = cuts.T.tolist()
        moved = [ring(column) for column in columns]
        across = _Move(max(s for s, _ in moved), sum(sent for _, sent in moved), self._outer)
        return level, [across], self._inside([list(map(sum, columns))] * self._machines)

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
            for count, link in {*self._kinds}
        )  # fmt: skip
        start_s = steps(m) * on * outer.latency_s
        if kind == "all_reduce":
            return 2 * (moved_s + starts_s) + all_reduce(m, nbytes, start_s, outer)
        return moved_s + starts_s + start_s + (m - 1) / m * nbytes / outer.bandwidth_bytes_per_s

    def _inside(self, sizes: Sequence[Sequence[float]]) -> list[_Move]:
        """Gather or reduce-scatter a list of sizes in each machine; missing ones are 0."""
        moves = []  # of alike machines, which take equal times, once
        for (count, link), mine in dict.fromkeys(zip(self._kinds, map(tuple, sizes), strict=True)):
            moves.append(_Move(*ring([*mine, *[0.0] * (count - len(mine))]), link))
        return moves


class _Move(NamedTuple):
    """The traffic of a stage on one link, in parts of the whole tensor."""

    starts: int
    sent: float
    link: Link


def _slowest(moves: Sequence[_Move], nbytes: float, on: float) -> float:
    return max(
        (m.starts * on * m.link.latency_s + nbytes * m.sent / m.link.bandwidth_bytes_per_s
         for m in moves),
        default=0.0,
    )  # fmt: skip


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
