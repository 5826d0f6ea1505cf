"""Minimum-cost labelling by bucket elimination: exact, and linear in the depth of a model.

    minimise  sum over variables v of unary_v[x_v]  +  sum over pairs (u, v) of pair_uv[x_u, x_v]

Eliminating a variable replaces all tables that mention it by one over its neighbours, minimised over
the variable (Dechter, "Bucket elimination", 1999). The work is exponential only in the width of the
order, which is small for the joint graphs of real models. Repeated tables are eliminated once
(:mod:`hap.synthesizer.search.table_pool`). Costs are integers, so that equal plans tie exactly.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hap.synthesizer.search.dominance import Reduced
from hap.synthesizer.search.table_pool import FORBIDDEN, Costs, Labels, Pool

__all__ = ["FORBIDDEN", "LARGEST_TABLE", "Costs", "Labelling", "TooWide", "minimise"]

LARGEST_TABLE = 1 << 26
"""Limit of entries of one table: 512 MiB."""

MOST_ENTRIES = 1 << 31
"""Limit of entries of all tables together: some ten seconds."""

HUBS = 3
"""Number of variables that are fixed to each label in turn if a table is too large: a tensor that many
layers read, such as an encoder's output, connects them until then."""

Pairs = Mapping[tuple[int, int], Costs]
"""``(u, v)`` with ``u < v`` -> table of shape (labels of u, labels of v)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """An optimal labelling, its cost, and the entries of all tables of its search."""

    cost: int
    labels: tuple[int, ...]
    entries: int = 0


class TooWide(Exception):
    """Some tables of the graph exceed the limit; ``variables`` are those of the largest."""

    def __init__(self, what: str, variables: tuple[int, ...]) -> None:
        super().__init__(f"elimination needs {what}")
        self.variables = variables


def minimise(
    unary: Sequence[Costs], pairs: Pairs, most_entries: int = MOST_ENTRIES
) -> Labelling | None:
    """Return the cheapest labelling; ``None`` if every labelling is forbidden.

    Args:
        unary: per variable, the cost of each of its labels.
        pairs: ``(u, v)`` with ``u < v`` -> table of shape (labels of u, labels of v).
        most_entries: limit of entries of all tables together.

    Raises:
        TooWide: a table exceeds :data:`LARGEST_TABLE` with any labels of the :data:`HUBS` variables of
            most neighbours, or all together exceed ``most_entries``.
    """
    if not all(len(costs) for costs in unary):
        return None
    reduced = Reduced(Pool(), unary, pairs)
    hubs: list[int] = []
    plan = _best_order(tuple(reduced.sizes), tuple(reduced.edges))
    most_hubs = HUBS if most_entries > LARGEST_TABLE else 0  # all labels together have more entries
    while plan.largest > LARGEST_TABLE and len(hubs) < most_hubs:
        hubs.append(_hub(reduced, hubs))
        sizes = [1 if v in hubs else size for v, size in enumerate(reduced.sizes)]
        edges = [e for e in reduced.edges if not {*e} & {*hubs}]
        plan = _best_order(tuple(sizes), tuple(edges))
    if plan.largest > LARGEST_TABLE:
        raise TooWide(f"a table of {plan.largest} entries", plan.widest)
    entries = plan.total * math.prod(len(reduced.kept[hub]) for hub in hubs)
    if entries > most_entries:
        raise TooWide(f"{entries} entries in its tables", plan.widest)
    if not hubs:
        return _eliminated(reduced, {}, plan)
    known: _Known = {}
    best: Labelling | None = None
    for labels in itertools.product(*(reduced.kept[hub] for hub in hubs)):
        given = _given(unary, pairs, dict(zip(hubs, labels, strict=True)))
        found = _eliminated(Reduced(reduced.pool, *given), known, plan)
        if found and (best is None or found.cost < best.cost):
            fixed = dict(zip(hubs, labels, strict=True))
            own = tuple(fixed.get(v, label) for v, label in enumerate(found.labels))
            best = replace(found, labels=own, entries=entries)
    return best


def _hub(reduced: Reduced, hubs: Sequence[int]) -> int:
    """Return the variable with most neighbours, except hubs."""
    free = [v for v in range(len(reduced.sizes)) if v not in hubs]
    return max(free, key=lambda v: (len(reduced.near[v]), -v))


def _given(
    unary: Sequence[Costs], pairs: Pairs, fixed: Mapping[int, int]
) -> tuple[list[Costs], dict[tuple[int, int], Costs]]:
    """Return the problem in which some variables have one label each (conditioning)."""

    def own(v: int) -> slice:
        return slice(fixed[v], fixed[v] + 1) if v in fixed else slice(None)

    # Other tables stay the same objects, which the pool knows.
    costs = [u[own(v)] if v in fixed else u for v, u in enumerate(unary)]
    return costs, {
        (u, v): t[own(u), own(v)] if u in fixed or v in fixed else t for (u, v), t in pairs.items()
    }


def _eliminated(reduced: Reduced, known: _Known, plan: _Order) -> Labelling | None:
    """Eliminate in the order of ``plan``, which may be for a graph with more edges."""
    buckets = _Buckets(reduced, known)
    constant = 0
    trail: list[tuple[int, tuple[int, ...], Labels]] = []  # (variable, scope, best label)
    for v, scope in plan.steps:
        least, best_label = buckets.eliminate(v, scope)
        if least >= FORBIDDEN:
            return None
        constant += least
        trail.append((v, scope, best_label))
    labels = [0] * len(reduced.sizes)
    for v, scope, best_label in reversed(trail):
        labels[v] = int(best_label[tuple([labels[n] for n in scope])])
    return Labelling(
        cost=constant, entries=plan.total,
        labels=tuple(kept[x] for kept, x in zip(reduced.kept, labels, strict=True)),
    )  # fmt: skip


# Key of an elimination: own costs, labels of all, (dims, number) of each table.
_Key = tuple[int, tuple[int, ...], tuple[tuple[tuple[int, ...], int], ...]]
# Known eliminations: their least entry, the number of their table, the best labels.
_Known = dict[_Key, tuple[int, int, Labels]]


class _Buckets:
    """The remaining tables of a problem during elimination."""

    def __init__(self, reduced: Reduced, known: _Known) -> None:
        self._pool, self._costs, self._sizes = reduced.pool, reduced.costs, reduced.sizes
        # Per variable: (scope, number) of the tables that mention it.
        self._tables: list[list[tuple[tuple[int, ...], int]]] = [
            [((v, u), table) for u, table in near.items()] for v, near in enumerate(reduced.near)
        ]
        self._known = known

    def eliminate(self, v: int, scope: tuple[int, ...]) -> tuple[int, Labels]:
        """Replace the tables of ``v`` by one over its neighbours.

        Returns:
            Its least entry, which is subtracted so that tables of layers repeat, and the best label of
            ``v``, of dims ``scope``.
        """
        names, sizes, tables = (*scope, v), self._sizes, self._tables
        place = dict(zip(names, range(len(names)), strict=True))
        mine = sorted([(tuple([place[n] for n in names]), t) for names, t in tables[v]])
        key: _Key = (self._costs[v], tuple([sizes[n] for n in names]), tuple(mine))
        least, best, best_label = self._known.get(key) or self._eliminate(key)
        for _, table in mine:
            self._pool.release(table)
        for n in scope:
            tables[n] = [entry for entry in tables[n] if v not in entry[0]]
            tables[n].append((scope, best))
        return least, best_label

    def _eliminate(self, key: _Key) -> tuple[int, int, Labels]:
        """Eliminate and cache the result if there is room; else its table serves one reader."""
        costs, shape, mine = key
        tables = self._pool.tables
        given = [((len(shape) - 1,), tables[costs]), *((dims, tables[t]) for dims, t in mine)]
        best, best_label = _minimum(shape, given)
        least = int(best.min())
        best = np.where(best >= FORBIDDEN, FORBIDDEN, best - least)
        if not self._pool.holds(best.size):
            return least, self._pool.passing(best), best_label
        found = self._known[key] = least, self._pool.number(best), best_label
        return found


class _Order(NamedTuple):
    """An elimination order: each variable with its neighbours at its elimination."""

    total: int
    largest: int
    widest: tuple[int, ...]
    steps: list[tuple[int, tuple[int, ...]]]


EASY = 1 << 29
"""Total entries below which no better order is searched; most are in repeated tables."""


@functools.lru_cache(maxsize=16)
def _best_order(sizes: tuple[int, ...], edges: tuple[tuple[int, int], ...]) -> _Order:
    """Return the best of greedy orders by several measures; the last results are cached."""
    found: list[_Order] = []
    chains = Elimination(sizes, edges)
    for measure in (table_size, _degree, _fill, _small_first):
        least = min((o.total for o in found if o.largest <= LARGEST_TABLE), default=math.inf)
        if least > EASY:
            found.append(chains.order(measure, least, LARGEST_TABLE))
    return min(found, key=lambda order: (order.largest > LARGEST_TABLE, order.total))


Measure = Callable[[int, Sequence[int], list[set[int]]], int]


def table_size(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    """Return the entries of the table of a variable and its neighbours."""
    entries = sizes[v]
    for n in near[v]:
        entries *= sizes[n]
    return entries


def _small_first(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    """Order small variables by size, which leaves a core of each layer, and the core by fill."""
    entries = table_size(v, sizes, near)
    return entries if entries <= SMALL else SMALL + _fill(v, sizes, near)


def _fill(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    """Return the size of the new tables between neighbours."""
    mine, size = near[v], sizes.__getitem__
    whole = sum(map(size, mine))
    # Every pair counts twice. An intersection takes the time of the smaller set, even at a hub.
    return sum([size(a) * (whole - size(a) - sum(map(size, mine & near[a]))) for a in mine]) // 2


def _degree(v: int, sizes: Sequence[int], near: list[set[int]]) -> int:
    return (len(near[v]) << 40) + min(table_size(v, sizes, near), (1 << 40) - 1)


class Elimination:
    """Variables and their neighbours, of which small tables of up to two neighbours are eliminated."""

    def __init__(self, sizes: Sequence[int], edges: Iterable[tuple[int, int]]) -> None:
        self._sizes, self._near = sizes, [set[int]() for _ in sizes]
        for u, v in edges:
            self._near[u].add(v)
            self._near[v].add(u)
        self._gone, self._order = [False] * len(sizes), _Order(0, 0, (), [])
        chains = deque(range(len(sizes)))  # most variables; a heap of the others alone is small
        while chains:
            v = chains.popleft()
            few = not self._gone[v] and len(self._near[v]) <= 2
            if few and table_size(v, sizes, self._near) <= SMALL:
                chains.extend(self._eliminate(v))

    def _eliminate(self, v: int) -> tuple[int, ...]:
        near, order, scope = self._near, self._order, tuple(sorted(self._near[v]))
        self._gone[v], entries = True, table_size(v, self._sizes, near)
        order.steps.append((v, scope))
        widest = (entries, (*scope, v)) if entries > order.largest else order[1:3]
        self._order = _Order(order.total + entries, *widest, order.steps)
        for n in scope:
            near[n].discard(v)
            near[n].update(m for m in scope if m != n)
        return scope

    def order(self, measure: Measure, limit: float, largest_table: float) -> _Order:
        """Return an order, of the least measure first; one beyond these limits of entries ends early."""
        rest = copy.copy(self)
        rest._gone, rest._near = [*self._gone], [{*near} for near in self._near]
        rest._order = self._order._replace(steps=[*self._order.steps])
        sizes, near = rest._sizes, rest._near
        latest = {v: measure(v, sizes, near) for v, gone in enumerate(rest._gone) if not gone}
        heap = sorted((value, v) for v, value in latest.items())
        while heap and rest._order.largest <= largest_table and rest._order.total <= limit:
            claimed, v = heapq.heappop(heap)
            if not rest._gone[v] and claimed == latest[v] == measure(v, sizes, near):
                for n in rest._eliminate(v):
                    latest[n] = measure(n, sizes, near)
                    heapq.heappush(heap, (latest[n], n))
        return rest._order


SMALL = 1 << 14
"""Limit of entries of a table that is made at once: fewer calls count more than less memory."""


def _minimum(
    shape: tuple[int, ...], tables: Sequence[tuple[tuple[int, ...], Costs]]
) -> tuple[Costs, Labels]:
    """Return the sum of tables, minimised over the last of all dims, and its first best label.

    ``shape``: labels of all variables. ``tables``: (dims of ``shape``, table). A large sum is
    computed label by label.
    """
    terms = []
    for dims, table in sorted(tables, key=lambda entry: entry[1].size):
        order = sorted(range(len(dims)), key=lambda k: dims[k])
        whole = [1] * len(shape)
        for k in order:
            whole[dims[k]] = shape[dims[k]]
        terms.append(table.transpose(order).reshape(whole))
    if math.prod(shape) <= SMALL:
        joint = functools.reduce(np.add, terms)
        if joint.shape != shape:
            joint = np.broadcast_to(joint, shape)
        return joint.min(axis=-1), joint.argmin(axis=-1)
    best = np.empty(shape[:-1], dtype=np.int64)
    best_label = np.empty(shape[:-1], dtype=np.int8 if shape[-1] <= 128 else np.int16)
    # One slice per label, contiguous; blocks stay in the cache.
    labels = [_by_label(t) for t in terms]
    outer = 0
    while math.prod(shape[outer:-1]) > BLOCK and outer < len(shape) - 2:
        outer += 1
    total = np.empty(shape[outer:-1], dtype=np.int64)
    less = np.empty(shape[outer:-1], dtype=np.bool_)
    for at in np.ndindex(*shape[:outer]):
        here, here_label = best[(*at, ...)], best_label[(*at, ...)]
        for label in range(shape[-1]):
            out = here if label == 0 else total
            _add([_block(t, min(label, len(t) - 1), at) for t in labels], out)
            if label == 0:
                here_label[...] = 0
                continue
            np.less(total, here, out=less)
            np.copyto(here_label, label, where=less)
            np.minimum(here, total, out=here)
    return best, best_label


BLOCK = 1 << 16
"""Entries of a sum that are made at once: half a MiB."""


def _by_label(table: Costs) -> Costs:
    """Return a table with its last dim first, in this order in memory."""
    return np.ascontiguousarray(np.moveaxis(table, -1, 0))


def _block(table: Costs, label: int, at: tuple[int, ...]) -> Costs:
    """Return the entries of a label at indices of the first dims, of which some have one entry."""
    block: Costs = table[
        (label, *(min(k, n - 1) for k, n in zip(at, table.shape[1:], strict=False)))
    ]
    return block


def _add(tables: Sequence[Costs], out: Costs) -> None:
    """Write the sum of tables, the smallest ones first."""
    if len(tables) == 1:
        out[...] = tables[0]
        return
    *some, last = tables
    np.add(functools.reduce(np.add, some), last, out=out)
