"""A* over partial programs, exact if it runs to its end and anytime otherwise.

A partial program is a set of choices of rows, holdings and storages. The search always extends, by
one choice, the partial program with the least bound on its completions (Zhang et al., "HAP: SPMD
DNN Training on Heterogeneous GPU Clusters with Automated Program Synthesis", EuroSys 2024). It
differs from the paper in three ways:

* dominated labels and variables with few neighbours are removed first, by :mod:`.reduction`;
* the bound comes from :mod:`.mini_buckets`, after :mod:`.soft_arc_consistency`. It never falls along
  a path, so the first complete program taken is the cheapest;
* choices are made in the order of the bucket tree, so that few variables are on the *frontier*:
  decided, but with a table in common with an undecided one.

Of partial programs with the same choices on the frontier only the cheapest is kept.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Labelling
from hap.synthesizer.search.mini_buckets import (
    BucketLevel,
    BucketTree,
    mini_bucket_elimination,
    search_order,
)
from hap.synthesizer.search.reduction import Reduced
from hap.synthesizer.search.search_result import INFEASIBLE, Pairs, SearchResult, Unary, cost_of
from hap.synthesizer.search.soft_arc_consistency import reparametrize, simplify
from hap.synthesizer.search.table_pool import Pool

TABLE_ENTRIES = 1 << 20
"""Limit of entries of a table of the bound: 8 MiB. Larger tables are tighter and slower to build."""

SWEEPS = 6
"""Sweeps that move costs before the bound is built, with falling returns."""

EXPANSIONS = 1 << 20
"""Limit of partial programs to extend before the search returns its best one."""

DIVE_EVERY = 1 << 10
"""Expansions between two dives from the best open program to a complete one."""

FIRST_DIVES = (1, 8, 64)
"""Widths of the dives from the empty program: a wide one rarely fails, or ends far from the best."""


def search(
    unary: Unary, pairs: Pairs, *, table_entries: int = TABLE_ENTRIES, sweeps: int = SWEEPS,
    expansions: int = EXPANSIONS,
) -> SearchResult:  # fmt: skip
    """Return the cheapest labelling, or the best one found and a bound on all others.

    Args:
        unary, pairs: the tables, as in :func:`hap.synthesizer.search.bucket_elimination.minimise`.
        table_entries: limit of the heuristic's tables; it is exact if no table is larger.
        expansions: limit on the search; a count is repeatable.
    """
    if not all(len(costs) for costs in unary):
        return INFEASIBLE
    reduced = Reduced(Pool(), unary, pairs)
    if not reduced.feasible:
        return INFEASIBLE
    left, joined = reduced.tables
    order = search_order([len(costs) for costs in left], joined)
    reparametrized = reparametrize(left, joined, order, sweeps)
    if reparametrized is None:
        return INFEASIBLE
    constant = reduced.constant + reparametrized.constant
    simplified = simplify(reparametrized.unary, reparametrized.pairs)
    tree = mini_bucket_elimination(simplified.unary, simplified.pairs, table_entries)
    if tree.base >= FORBIDDEN:
        return INFEASIBLE
    run = _Search(tree, [len(labels) for labels in simplified.labels], expansions)
    bound = run.run() + constant
    if run.best is None:
        if run.exhausted:
            return INFEASIBLE
        return SearchResult(bound, None)
    chosen = [0] * len(left)
    for level, choice in zip(tree.levels, run.best.choices(), strict=True):
        chosen[level.variable] = simplified.labels[level.variable][choice]
    labels = reduced.labels(chosen)
    cost = cost_of(labels, unary, pairs)
    assert cost == run.best.bound + constant, "a complete program costs its bound"
    return SearchResult(bound, Labelling(cost=cost, labels=labels))


class _Partial(NamedTuple):
    """A partial program: choices for the first ``level`` variables, linked from last to first.

    ``bound``: of its completions. ``frontier``: labels of decided variables that tables still read.
    """

    bound: int
    level: int
    frontier: tuple[int, ...]
    label: int
    before: _Partial | None

    def choices(self) -> list[int]:
        """Return the label on every level."""
        labels: list[int] = []
        partial: _Partial | None = self
        while partial is not None and partial.before is not None:
            labels.append(partial.label)
            partial = partial.before
        return labels[::-1]


class _Level:
    """One level, with tables indexed by the labels of the frontier.

    Args:
        frontier: the variables on it before this level.
        last: variable -> the last level whose tables mention it.
    """

    def __init__(
        self, level: BucketLevel, depth: int, frontier: tuple[int, ...], sizes: Sequence[int],
        last: Mapping[int, int],
    ) -> None:  # fmt: skip
        decided = (*frontier, level.variable)
        place = {v: k for k, v in enumerate(decided)}
        self._tables = []
        for scope, costs in level.regrets:
            strides, stride = [], 1
            for v in reversed(scope[:-1]):
                strides.append((place[v], stride))
                stride *= sizes[v]
            self._tables.append((costs.reshape(-1, costs.shape[-1]), strides))
        self.frontier = tuple(v for v in decided if last.get(v, -1) > depth)
        self._keep = tuple(place[v] for v in self.frontier)

    def extend(self, partial: _Partial, below: int) -> list[_Partial]:
        """Return all one-choice extensions with bounds under ``below``, without dominated ones."""
        at = partial.frontier
        rows = [table[sum(at[k] * stride for k, stride in s)] for table, s in self._tables]
        regrets = functools.reduce(lambda a, b: np.minimum(a + b, FORBIDDEN), rows)
        found: dict[tuple[int, ...], _Partial] = {}
        for label, regret in enumerate(regrets.tolist()):
            bound = partial.bound + regret
            if bound >= below:
                continue
            decided = (*at, label)
            frontier = tuple([decided[k] for k in self._keep])
            if frontier not in found or bound < found[frontier].bound:
                found[frontier] = _Partial(bound, partial.level + 1, frontier, label, partial)
        return list(found.values())


def _bucket_levels(tree: BucketTree, sizes: Sequence[int]) -> list[_Level]:
    last = {v: k for k, level in enumerate(tree.levels) for t in level.regrets for v in t.scope}
    rungs: list[_Level] = []
    frontier: tuple[int, ...] = ()
    for depth, level in enumerate(tree.levels):
        rungs.append(_Level(level, depth, frontier, sizes, last))
        frontier = rungs[-1].frontier
    return rungs


class _Search:
    """One run: the open programs, the best complete one, and the count of expansions."""

    def __init__(self, tree: BucketTree, sizes: Sequence[int], expansions: int) -> None:
        self._bucket_levels = _bucket_levels(tree, sizes)
        self._root = _Partial(tree.base, 0, (), 0, None)
        self._left = expansions
        self.best: _Partial | None = None
        self.exhausted = False

    @property
    def _below(self) -> int:
        """The cost from which on a program is no improvement."""
        return FORBIDDEN if self.best is None else self.best.bound

    def run(self) -> int:
        """Search until the optimum is proven or the limit reached; return the proven bound."""
        for width in FIRST_DIVES:
            affordable = width == 1 or width * len(self._bucket_levels) <= self._left // 4
            if affordable and self._root.bound < self._below:
                self._dive(self._root, width)
        opened = [(self._root.bound, 0, 0, self._root)]
        least: list[dict[tuple[int, ...], int]] = [{} for _ in range(len(self._bucket_levels) + 1)]
        made = expanded = 0
        while opened and opened[0][0] < self._below:
            if self._left <= 0:
                return opened[0][0]
            partial = heapq.heappop(opened)[-1]
            if least[partial.level].get(partial.frontier, partial.bound) < partial.bound:
                continue  # a later, cheaper one has the same frontier
            expanded += 1
            if expanded % DIVE_EVERY == 0:
                self._dive(partial, 1)
            for child in self._extend(partial):
                known = least[child.level].get(child.frontier)
                if known is not None and known <= child.bound:
                    continue
                least[child.level][child.frontier] = child.bound
                if child.level == len(self._bucket_levels):
                    self.best = child
                    continue
                made += 1  # of equal bounds the deepest comes first, then the earliest
                heapq.heappush(opened, (child.bound, -child.level, made, child))
        self.exhausted = True
        return self._below

    def _extend(self, partial: _Partial) -> list[_Partial]:
        self._left -= 1
        return self._bucket_levels[partial.level].extend(partial, self._below)

    def _dive(self, start: _Partial, width: int) -> None:
        """Descend by level with the ``width`` best; a complete program becomes the new best."""
        beam = [start]
        while beam and beam[0].level < len(self._bucket_levels):
            if self._left <= 0:
                return
            found: dict[tuple[int, ...], _Partial] = {}
            for partial in beam:
                for child in self._extend(partial):
                    other = found.get(child.frontier)
                    if other is None or child.bound < other.bound:
                        found[child.frontier] = child
            beam = heapq.nsmallest(width, found.values(), key=lambda p: p.bound)
        if beam:
            self.best = beam[0]
