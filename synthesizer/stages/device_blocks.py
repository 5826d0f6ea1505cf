"""Groups of devices for pipeline stages, as counts of blocks: alike devices are interchangeable.

A block is a fixed number of devices of one kind: one device where the cluster is small, several or
all of a kind where it is large. A *group* is a vector of counts, one per kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hap.cluster.topology import Cluster

Ranks = tuple[int, ...]
Ints = npt.NDArray[np.int64]

MOST_PAIRS = 2000
"""Most pairs of a set of devices and a group in it; more blocks would make the search slow."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices with equal figures in blocks of ``size``; ``ranks`` machine by machine."""

    ranks: Ranks
    size: int

    @property
    def blocks(self) -> int:
        return len(self.ranks) // self.size


class DeviceBlocks:
    """All groups of a cluster's devices.

    Args:
        keep: ranks that groups take before others of their kind.

    Attributes:
        kinds: the kinds of devices.
        vectors: blocks of each kind in each group, shape [groups, kinds]; the empty group is first
            and that of all devices is last.
        whole, taken, rest: the pairs of a set of devices and a nonempty group in it, by index into
            ``vectors``, with what the group leaves; sorted by ``whole``.
    """

    def __init__(self, cluster: Cluster, keep: frozenset[int] = frozenset()) -> None:
        self.kinds = _kinds(cluster, keep)
        ranges = [range(kind.blocks + 1) for kind in self.kinds]
        self.vectors: Ints = np.array(list(itertools.product(*ranges)), dtype=np.int64)
        index = {tuple(v): k for k, v in enumerate(self.vectors.tolist())}
        pairs = [
            (k, index[tuple(part)], index[tuple(a - b for a, b in zip(have, part, strict=True))])
            for k, have in enumerate(self.vectors.tolist())
            for part in itertools.product(*(range(n + 1) for n in have)) if any(part)
        ]  # fmt: skip
        self.whole, self.taken, self.rest = np.array(pairs, dtype=np.int64).T

    @cached_property
    def starts(self) -> Ints:
        """Return where the pairs of each nonempty set start, for ``numpy.ufunc.reduceat``."""
        return np.searchsorted(self.whole, np.arange(1, len(self.vectors)))

    @cached_property
    def devices(self) -> Ints:
        """Devices of each kind in each group, shape [groups, kinds]."""
        found: Ints = self.vectors * np.array([kind.size for kind in self.kinds])
        return found

    def ranks(self, groups: Sequence[int]) -> tuple[Ranks, ...]:
        """Return the ranks of disjoint groups, given by index; each takes the next of its kinds."""
        used = [0] * len(self.kinds)
        found = []
        for group in groups:
            own: list[int] = []
            for k, (kind, count) in enumerate(
                zip(self.kinds, self.devices[group].tolist(), strict=True)
            ):
                own += kind.ranks[used[k] : used[k] + count]
                used[k] += count
            found.append(tuple(sorted(own)))
        return tuple(found)


def _kinds(cluster: Cluster, keep: frozenset[int]) -> tuple[Kind, ...]:
    """Return the kinds in blocks that are as small as the number of pairs allows."""
    node = [device.node for device in cluster.devices]
    place = {name: k for k, name in enumerate(cluster.nodes)}
    kinds = [sorted(ranks, key=lambda r: (r not in keep, place[node[r]], r))
             for ranks in cluster.types()]  # fmt: skip
    steps = []  # sizes of blocks of each kind: divisors of its machines, then all of it
    for ranks in kinds:
        inside = [len(list(each)) for _, each in itertools.groupby(ranks, key=lambda r: node[r])]
        common = math.gcd(*inside)
        sizes = [s for s in range(1, common + 1) if common % s == 0]
        steps.append([*sizes, *([len(ranks)] if len(ranks) != sizes[-1] else [])])
    sizes = [0] * len(kinds)

    def pairs() -> int:
        counts = [len(r) // s[at] for r, s, at in zip(kinds, steps, sizes, strict=True)]
        return math.prod((n + 1) * (n + 2) // 2 for n in counts)

    while pairs() > MOST_PAIRS:
        open_ = [k for k, at in enumerate(sizes) if at + 1 < len(steps[k])]
        if not open_:
            break
        largest = max(open_, key=lambda k: (len(kinds[k]) // steps[k][sizes[k]], -k))
        sizes[largest] += 1
    return tuple(
        Kind(tuple(ranks), s[at]) for ranks, s, at in zip(kinds, steps, sizes, strict=True)
    )
