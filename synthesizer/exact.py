"""Minimum-cost labelling by bucket elimination: exact, and linear in the depth of the model.

    minimise  sum over variables v of unary_v[x_v]  +  sum over pairs (u, v) of pair_uv[x_u, x_v]

Eliminating a variable replaces all the tables that mention it by one table over its
neighbours, minimised over the variable (Dechter, "Bucket elimination", 1999). The work is
exponential only in the width of the order, and the joint graphs of real models have tiny
width whatever their depth. Costs are integers, so that equal plans tie exactly and the
result does not depend on the order of additions.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.int64]
Labels = npt.NDArray[np.signedinteger[Any]]

FORBIDDEN = 1 << 55
"""Cost of what may not be; sums of up to 128 such entries stay within 64 bits."""

LARGEST_TABLE = 1 << 26
"""Entries beyond which elimination gives up: 512 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """An optimal labelling, its cost, and how hard it was to find."""

    cost: int
    labels: tuple[int, ...]
    width: int
    largest_table: int


class TooWide(Exception):
    """The graph has a table that would not fit; ``variables`` are those of its scope."""

    def __init__(self, entries: int, variables: tuple[int, ...]) -> None:
        super().__init__(f"elimination needs a table of {entries} entries")
        self.variables = variables


def minimise(unary: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]) -> Labelling | None:
    """The cheapest labelling; ``None`` if every labelling is forbidden.

    Args:
        unary: per variable, the cost of each of its labels.
        pairs: ``(u, v)`` with ``u < v`` -> table of shape (labels of u, labels of v).

    Raises:
        TooWide: some table would have more than :data:`LARGEST_TABLE` entries.
    """
    unary, pairs = _without_fixed(unary, pairs)
    sizes = [len(u) for u in unary]
    if 0 in sizes:
        return None
    plan = _best_order(sizes, pairs)
    if plan.largest > LARGEST_TABLE:
        raise TooWide(plan.largest, plan.widest)
    tables: list[list[tuple[tuple[int, ...], Costs]]] = [[] for _ in unary]
    for pair, table in pairs.items():
        for v in pair:
            tables[v].append((pair, table))
    trail: list[tuple[int, tuple[int, ...], Labels]] = []  # (variable, scope, best label)
    constant = 0
    for v, scope in plan.steps:
        best, best_label = _eliminate(v, scope, sizes, unary[v], tables[v])
        trail.append((v, scope, best_label))
        best = np.minimum(best, FORBIDDEN)
        if not scope:
            constant += int(best)
        for n in scope:
            tables[n] = [(s, t) for s, t in tables[n] if v not in s]
            tables[n].append((scope, best))
    if constant >= FORBIDDEN:
        return None
    labels = [0] * len(unary)
    for v, scope, best_label in reversed(trail):
        labels[v] = int(best_label[tuple(labels[n] for n in scope)])
    width = max(len(scope) for _, scope in plan.steps)
    return Labelling(cost=constant, labels=tuple(labels), width=width, largest_table=plan.largest)


def _without_fixed(
    unary: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]
) -> tuple[list[Costs], dict[tuple[int, int], Costs]]:
    """Tables with a variable of one label are costs of the other variable alone."""
    costs, kept = list(unary), {}
    for (u, v), table in pairs.items():
        if len(unary[u]) == 1:
            costs[v] = costs[v] + table[0]
        elif len(unary[v]) == 1:
            costs[u] = costs[u] + table[:, 0]
        else:
            kept[u, v] = table
    return [np.minimum(c, FORBIDDEN) for c in costs], kept


class _Order(NamedTuple):
    """An elimination order: each variable with its neighbours at that time."""

    total: int
    largest: int
    widest: tuple[int, ...]
    steps: list[tuple[int, tuple[int, ...]]]


EASY = 1 << 22
"""Total entries below which a better order would not pay for being looked for."""


def _best_order(sizes: Sequence[int], pairs: Iterable[tuple[int, int]]) -> _Order:
    """Greedy orders by several measures, none of which is best on every graph."""
    edges = list(pairs)
    found = _order(sizes, edges, _table_size)
    if found.total <= EASY:
        return found
    others = [_order(sizes, edges, measure) for measure in (_fill, _degree)]
    return min([found, *others], key=lambda order: order.total)


Measure = Callable[[int, Sequence[int], list[set[int]]], int]


def _table_size(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    return math.prod(sizes[n] for n in near[v]) * sizes[v]


def _fill(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    """Size of the tables between neighbours that would become tied."""
    return sum(
        sizes[a] * sizes[b] for a, b in itertools.combinations(near[v], 2) if b not in near[a]
    )


def _degree(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    return (len(near[v]) << 40) + min(_table_size(v, sizes, near), (1 << 40) - 1)


def _order(sizes: Sequence[int], edges: Sequence[tuple[int, int]], measure: Measure) -> _Order:
    near: list[set[int]] = [set() for _ in sizes]
    for u, v in edges:
        near[u].add(v)
        near[v].add(u)
    heap = [(measure(v, sizes, near), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    gone = [False] * len(sizes)
    steps: list[tuple[int, tuple[int, ...]]] = []
    total = largest = 0
    widest: tuple[int, ...] = ()
    while heap:
        claimed, v = heapq.heappop(heap)
        if gone[v] or claimed != measure(v, sizes, near):
            continue
        gone[v] = True
        scope = tuple(sorted(near[v]))
        entries = _table_size(v, sizes, near)
        total += entries
        if entries > largest:
            largest, widest = entries, (*scope, v)
        steps.append((v, scope))
        for n in scope:
            near[n].discard(v)
            near[n].update(m for m in scope if m != n)
        for n in scope:
            heapq.heappush(heap, (measure(n, sizes, near), n))
    return _Order(total, largest, widest, steps)


SMALL = 1 << 14
"""Entries up to which a table is made at once: fewer calls count for more than less memory."""


def _eliminate(
    v: int,
    scope: tuple[int, ...],
    sizes: Sequence[int],
    unary: Costs,
    tables: Sequence[tuple[tuple[int, ...], Costs]],
) -> tuple[Costs, Labels]:
    """The sum of all tables that mention ``v``, minimised over it, and its first best label.

    Both have dims ``scope``. A large sum is never whole in memory, but made label by label.
    """
    place = {n: k for k, n in enumerate((*scope, v))}
    terms = [unary.reshape((1,) * len(scope) + (-1,))]
    for names, table in sorted(tables, key=lambda entry: entry[1].size):
        order = sorted(range(len(names)), key=lambda k: place[names[k]])
        shape = [1] * len(place)
        for k in order:
            shape[place[names[k]]] = table.shape[k]
        terms.append(table.transpose(order).reshape(shape))
    full = tuple(sizes[n] for n in scope)
    if math.prod(full) * sizes[v] <= SMALL:
        joint = functools.reduce(np.add, terms)
        if joint.shape != (*full, sizes[v]):
            joint = np.broadcast_to(joint, (*full, sizes[v]))
        return joint.min(axis=-1), joint.argmin(axis=-1)
    best = np.full(full, np.iinfo(np.int64).max)
    best_label = np.zeros(full, dtype=np.int16)
    for label in range(sizes[v]):
        total = functools.reduce(np.add, (term[..., label] for term in terms))
        best_label[total < best] = label
        np.minimum(best, total, out=best)
    return best, best_label
