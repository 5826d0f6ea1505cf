"""Groups of devices for pipeline stages, as counts of blocks: alike devices are interchangeable.

A block is some devices of one kind: one device where the cluster is small; several of one machine, or
one or more machines, where it is large. A *group* is a vector of counts of blocks, one per kind.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hap.cluster.topology import Cluster
from hap.errors import HapError

Ranks = tuple[int, ...]
Ints = npt.NDArray[np.int64]

MOST_PAIRS = 2000
"""Most pairs of a set of devices and a group in it; more blocks would make the search slow."""

MOST_KINDS = int(math.log(MOST_PAIRS, 3))
"""Most kinds of devices: a kind in one block is left out, left to other groups, or taken."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices with equal figures, in blocks that may differ in size: machines may not divide evenly."""

    parts: tuple[Ranks, ...]
    """The ranks of each block, in the order in which groups take them."""

    @property
    def blocks(self) -> int:
        return len(self.parts)

    @property
    def ranks(self) -> Ranks:
        return tuple(itertools.chain(*self.parts))


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

    Raises:
        HapError: there are more kinds than the search is made for.
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
        """Most devices of each kind in each group, shape [groups, kinds]; equal blocks have as many."""
        sizes = [sorted(map(len, kind.parts), reverse=True) for kind in self.kinds]
        most = [np.cumsum([0, *own])[n] for own, n in zip(sizes, self.vectors.T, strict=True)]
        found: Ints = np.stack(most, axis=1)
        return found

    def counts(self, ranks: Ranks) -> Ints:
        """Return how many devices of each kind some ranks are."""
        here = set(ranks)
        return np.array([len(here.intersection(kind.ranks)) for kind in self.kinds])

    def ranks(self, groups: Sequence[int]) -> tuple[Ranks, ...]:
        """Return the ranks of disjoint groups, given by index; each takes the next of its kinds."""
        used = [0] * len(self.kinds)
        found = []
        for group in groups:
            own: list[int] = []
            for k, count in enumerate(self.vectors[group].tolist()):
                own += itertools.chain(*self.kinds[k].parts[used[k] : used[k] + count])
                used[k] += count
            found.append(tuple(sorted(own)))
        return tuple(found)


def _kinds(cluster: Cluster, keep: frozenset[int]) -> tuple[Kind, ...]:
    """Return the kinds in blocks that are as small as the number of pairs allows."""
    machines = []  # of each kind: its ranks on each machine, those to keep first
    for ranks in cluster.types():
        inside: dict[str, list[int]] = {node: [] for node in cluster.nodes}
        for rank in ranks:
            inside[cluster.devices[rank].node].append(rank)
        own = [sorted(each, key=lambda r: r not in keep) for each in inside.values() if each]
        machines.append(sorted(own, key=lambda each: each[0] not in keep))
    steps = [_steps(each) for each in machines]
    at = [0] * len(steps)

    def pairs() -> int:
        counts = [own[k] for own, k in zip(steps, at, strict=True)]
        return math.prod((n + 1) * (n + 2) // 2 for n in counts)

    while pairs() > MOST_PAIRS:
        open_ = [k for k, own in enumerate(steps) if at[k] + 1 < len(own)]
        if not open_:
            raise HapError(
                f"the cluster has {len(steps)} kinds of devices, and stages are searched for at most "
                f"{MOST_KINDS}: plan for a cluster file without the slowest kinds"
            )
        largest = max(open_, key=lambda k: (steps[k][at[k]], -k))
        at[largest] += 1
    parts = [_parts(each, own[k]) for each, own, k in zip(machines, steps, at, strict=True)]
    # Kept devices come first, then larger blocks: a lone group has the most of its blocks.
    return tuple(
        Kind(tuple(sorted(each, key=lambda p: (keep.isdisjoint(p), -len(p))))) for each in parts
    )


def _steps(machines: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of blocks that a kind may have, the most first.

    Blocks are equal parts of machines, each in one; or 1, 2, 3, ... machines, up to all of them.
    """
    common, total = math.gcd(*map(len, machines)), sum(map(len, machines))
    inside = {total // size for size in range(1, common + 1) if common % size == 0}
    whole = {-(-len(machines) // size) for size in range(1, len(machines) + 1)}
    return sorted(inside | whole, reverse=True)


def _parts(machines: Sequence[Sequence[int]], blocks: int) -> Iterator[Ranks]:
    """Yield so many blocks: of whole machines, as even as they allow, or equal parts of a machine."""
    if blocks > len(machines):
        size = sum(map(len, machines)) // blocks
        for each in machines:
            yield from (tuple(each[k : k + size]) for k in range(0, len(each), size))
        return
    ends = [len(machines) * k // blocks for k in range(blocks + 1)]
    for start, end in itertools.pairwise(ends):
        yield tuple(itertools.chain(*machines[start:end]))


def shape(cluster: Cluster, ranks: Ranks, kind: Mapping[int, tuple[int, str]]) -> object:
    """Return the same for sets of as many devices of each kind on alike machines: their costs are equal.

    Args:
        kind: of each rank, with its machine.
    """
    if cluster.among:  # collectives were measured for devices by name
        return ranks
    inside: dict[str, list[tuple[int, int]]] = {}
    for (k, node), count in Counter(map(kind.__getitem__, ranks)).items():
        inside.setdefault(node, []).append((k, count))
    machines = ((cluster.intra[node], *sorted(own)) for node, own in inside.items())
    return frozenset(Counter(machines).items())
