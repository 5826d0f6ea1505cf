"""Elimination orders of few entries: greedy ones, and random ones where these are long."""

from __future__ import annotations

import functools
import heapq
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


class EliminationOrder(NamedTuple):
    """An elimination order.

    Attributes:
        total: entries of all its tables.
        largest: entries of the largest one.
        steps: each variable with its neighbours at its elimination.
        computed: at most ``total``: tables that repeat, as those of layers, count once.
    """

    total: int
    largest: int
    steps: list[tuple[int, tuple[int, ...]]]
    computed: int = sys.maxsize


EASY = 1 << 28
"""Computed entries below which no better order is searched."""

RANDOM = 1 << 17
"""Computed entries for each variable below which no random orders are tried: these take as long."""

MOST_ENTRIES = 1 << 30
"""Limit of computed entries of a search: some five seconds."""

HOPELESS = 8
"""Ratio to a limit of entries above which random orders are not tried: these have some 5 times fewer."""

TRIES = 8
"""Number of random orders; four times as many are hardly better."""

FEW_NEIGHBOURS = 32
"""Neighbours up to which a variable's measure is taken again at each change.

That of a variable with more is taken when its turn seems to come: orders are as good, and found ten
times faster where a tensor is read by many layers.
"""


def best_order(
    sizes: tuple[int, ...], edges: tuple[tuple[int, int], ...], largest_table: int,
    computed: Callable[[EliminationOrder], int],
) -> EliminationOrder:  # fmt: skip
    """Return the order of the fewest computed entries; one without too large tables if there is one.

    Orders by two measures come first. Where both have many entries, random orders follow: by fill,
    times a random factor of each variable (Kask et al., "Pushing the power of stochastic greedy
    ordering schemes for inference in graphical models", AAAI 2011). They had 4 to 5 times fewer
    entries for T5 and Stable Diffusion.

    Args:
        largest_table: limit of entries of one table.
        computed: counts the computed entries of an order.
    """
    best = EliminationOrder(sys.maxsize, sys.maxsize, [])

    def attempt(measure: Measure, easy: int) -> None:
        nonlocal best
        if best.computed <= easy and best.largest <= largest_table:
            return
        limit = best.total if best.largest <= largest_table else math.inf
        found = elimination_order(sizes, edges, measure, limit)
        if found.total <= limit:
            found = found._replace(computed=computed(found))
            best = min(best, found, key=lambda o: (o.largest > largest_table, o.computed))

    attempt(table_size, EASY)
    attempt(fill, EASY)
    enough = min(max(EASY, RANDOM * len(sizes)), MOST_ENTRIES)
    fits = best.largest <= largest_table
    beyond = best.computed / MOST_ENTRIES if fits else best.largest / largest_table
    for seed in range(TRIES if beyond <= HOPELESS else 0):
        attempt(_noisy_fill(seed, len(sizes)), enough)
    return best


Measure = Callable[[int, Sequence[int], list[set[int]]], int]


def table_size(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    """Return the entries of the table of a variable and its neighbours."""
    entries = sizes[v]
    for n in near[v]:
        entries *= sizes[n]
    return entries


def fill(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    """Return the size of the new tables between neighbours."""
    mine, size = near[v], sizes.__getitem__
    whole = sum(map(size, mine))
    # Every pair counts twice. An intersection takes the time of the smaller set, even at a hub.
    return sum([size(a) * (whole - size(a) - sum(map(size, mine & near[a]))) for a in mine]) // 2


@functools.lru_cache(maxsize=64)
def _noisy_fill(seed: int, variables: int) -> Measure:
    """Return the fill times a random factor for each variable."""
    rng = random.Random(seed)
    factors = [rng.uniform(0.9, 1.1) for _ in range(variables)]
    return lambda v, sizes, near: int(fill(v, sizes, near) * factors[v])


@functools.lru_cache(maxsize=32)
def elimination_order(
    sizes: tuple[int, ...], edges: tuple[tuple[int, int], ...], measure: Measure = table_size,
    most_entries: float = math.inf,
) -> EliminationOrder:  # fmt: skip
    """Return a greedy order, of the least measure first; one beyond ``most_entries`` ends early.

    The last results are cached, as searches under other prices often have the same graph.
    """
    near = [set[int]() for _ in sizes]
    for u, v in edges:
        near[u].add(v)
        near[v].add(u)
    total, largest = 0, 0
    steps: list[tuple[int, tuple[int, ...]]] = []
    latest = [measure(v, sizes, near) for v in range(len(sizes))]
    gone = [False] * len(sizes)
    heap = sorted((value, v) for v, value in enumerate(latest))
    while heap and total <= most_entries:
        claimed, v = heapq.heappop(heap)
        if gone[v] or claimed != latest[v]:
            continue
        # New tables between its neighbours change a fill without a new table of its own.
        latest[v] = measure(v, sizes, near)
        if latest[v] != claimed:
            heapq.heappush(heap, (latest[v], v))
            continue
        scope, entries = tuple(sorted(near[v])), table_size(v, sizes, near)
        gone[v] = True
        steps.append((v, scope))
        total += entries
        largest = max(largest, entries)
        for n in scope:
            near[n].discard(v)
            near[n].update(m for m in scope if m != n)
        for n in scope:
            if len(near[n]) <= FEW_NEIGHBOURS:
                latest[n] = measure(n, sizes, near)
                heapq.heappush(heap, (latest[n], n))
    return EliminationOrder(total, largest, steps)
