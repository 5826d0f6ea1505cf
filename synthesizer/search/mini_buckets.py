"""Lower bounds of the cost to go, by mini-bucket elimination with bounded tables.

Tables are added up in groups of bounded size, and each group is minimised alone: a sum of minima is at
most the minimum of the sum (Dechter and Rish, "Mini-buckets", J. ACM 2003). The tables are an admissible
heuristic for a search in the opposite order (Kask and Dechter, "A general scheme for automatic generation
of search heuristics from specification dependencies", Artificial Intelligence 2001).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs
from hap.synthesizer.search.elimination_order import elimination_order
from hap.synthesizer.search.search_result import Pairs, Unary


class Table(NamedTuple):
    """Costs over the variables of ``scope``, one dim each, in the order of the search."""

    scope: tuple[int, ...]
    costs: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLevel:
    """The decision on one variable, given those on the earlier levels.

    ``regrets`` are tables whose last dim is this variable. Their sum is the increase of the lower
    bound by each label: at least 0, and at least :data:`FORBIDDEN` without completion.
    """

    variable: int
    regrets: tuple[Table, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTree:
    """Every variable as a level, in the order of the search.

    ``base`` plus the regrets of all levels is exactly the cost of a labelling; with those of the
    first levels it is a lower bound.
    """

    base: int
    levels: tuple[BucketLevel, ...]


def mini_bucket_elimination(unary: Unary, pairs: Pairs, most_entries: int) -> BucketTree:
    """Mini-bucket elimination with tables of at most ``most_entries`` entries.

    A larger table of the problem is a group of its own. Bounds are exact if no bucket is divided.
    """
    sizes = [len(costs) for costs in unary]
    order = search_order(sizes, pairs)
    depth = {v: k for k, v in enumerate(order)}
    buckets = [[Table((v,), np.minimum(unary[v], FORBIDDEN))] for v in order]
    for (u, v), costs in pairs.items():
        ordered = Table((u, v), costs) if depth[u] < depth[v] else Table((v, u), costs.T)
        buckets[max(depth[u], depth[v])].append(ordered)
    base, levels = 0, []
    for v, bucket in zip(reversed(order), reversed(buckets), strict=True):
        regrets = []
        for group in _groups(bucket, sizes, most_entries):
            total = _sum(group, depth)
            rest = total.costs.min(axis=-1)
            regrets.append(Table(total.scope, _regret(total.costs, rest)))
            if rest.ndim:
                buckets[depth[total.scope[-2]]].append(Table(total.scope[:-1], rest))
            else:
                base = min(base + int(rest), FORBIDDEN)
        levels.append(BucketLevel(variable=v, regrets=tuple(regrets)))
    return BucketTree(base=base, levels=tuple(reversed(levels)))


def _regret(total: Costs, rest: Costs) -> Costs:
    """Return the excess of each label over the best one; forbidden entries stay forbidden."""
    return np.where(total >= FORBIDDEN, FORBIDDEN, total - rest[..., None])


def _groups(bucket: Sequence[Table], sizes: Sequence[int], most: int) -> list[list[Table]]:
    """Group the tables of a bucket, the largest first, each in the first group with room."""
    groups: list[list[Table]] = []
    scopes: list[set[int]] = []
    for table in sorted(bucket, key=lambda t: -t.costs.size):
        for group, scope in zip(groups, scopes, strict=True):
            if math.prod(sizes[n] for n in scope.union(table.scope)) <= most:
                group.append(table)
                scope.update(table.scope)
                break
        else:
            groups.append([table])
            scopes.append(set(table.scope))
    return groups


def _sum(tables: Sequence[Table], depth: dict[int, int]) -> Table:
    """Add up tables over the union of their variables; entries stay at most ``FORBIDDEN``."""
    scope = tuple(sorted({n for t in tables for n in t.scope}, key=depth.__getitem__))
    total: Costs = np.zeros((1,) * len(scope), dtype=np.int64)
    for table in sorted(tables, key=lambda t: t.costs.size):
        sizes = dict(zip(table.scope, table.costs.shape, strict=True))
        shape = tuple(sizes.get(n, 1) for n in scope)
        total = np.minimum(total + table.costs.reshape(shape), FORBIDDEN)
    return Table(scope, total)


def search_order(sizes: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return the order in which to decide the variables.

    It reverses an elimination order, by branches of the bucket tree: depth first, small
    branches before large ones, so that few variables are on the frontier at a time.
    """
    steps = elimination_order(tuple(sizes), tuple(pairs)).steps
    turn = {v: k for k, (v, _) in enumerate(steps)}
    children: dict[int | None, list[int]] = {None: []}
    weight: dict[int, int] = {}
    for v, scope in steps:
        parent = min(scope, key=turn.__getitem__, default=None)
        children.setdefault(parent, []).append(v)
        weight[v] = 1 + sum(weight[c] for c in children.get(v, ()))
    order: list[int] = []
    stack = sorted(children[None], key=lambda c: (-weight[c], c))
    while stack:
        v = stack.pop()
        order.append(v)
        stack += sorted(children.get(v, ()), key=lambda c: (-weight[c], c))
    return order
