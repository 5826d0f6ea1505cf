"""Minimum-cost labelling by bucket elimination: exact, and linear in the depth of a model.

    minimise  sum over variables v of unary_v[x_v]  +  sum over pairs (u, v) of pair_uv[x_u, x_v]

Eliminating a variable replaces all tables that mention it by one over its neighbours, minimised over
the variable (Dechter, "Bucket elimination", 1999). The work is exponential only in the width of the
order, which is small for the joint graphs of real models. Repeated tables are eliminated once
(:mod:`hap.synthesizer.search.table_pool`). Costs are integers, so that equal plans tie exactly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hap.synthesizer.search.elimination_order import MOST_ENTRIES, EliminationOrder, best_order
from hap.synthesizer.search.reduction import Reduced
from hap.synthesizer.search.table_pool import FORBIDDEN, Costs, Labels, Pool

__all__ = ["FORBIDDEN", "LARGEST_TABLE", "Costs", "Labelling", "TooWide", "minimise"]

LARGEST_TABLE = 1 << 26
"""Limit of entries of one table: 512 MiB."""

HUBS = 3
"""Number of variables that are fixed to each label in turn if a table is too large: a tensor that many
layers read, such as an encoder's output, connects them until then."""

Pairs = Mapping[tuple[int, int], Costs]
"""``(u, v)`` with ``u < v`` -> table of shape (labels of u, labels of v)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """An optimal labelling, its cost, and the entries of the tables that its search computed."""

    cost: int
    labels: tuple[int, ...]
    entries: int = 0


class TooWide(Exception):
    """Some tables of the graph exceed the limit."""

    def __init__(self, what: str) -> None:
        super().__init__(f"elimination needs {what}")


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
    if not reduced.feasible:
        return None
    core = _Core.of(reduced)
    hubs: list[int] = []
    plan = core.order()
    # Fixed labels lower the largest table of an order, not the entries for all labels together.
    hopeless = plan.computed > most_entries or plan.largest >= LARGEST_TABLE * LARGEST_TABLE
    most_hubs = 0 if hopeless else HUBS
    while plan.largest > LARGEST_TABLE and len(hubs) < most_hubs:
        hubs.append(_hub(core, hubs))
        plan = core.given(hubs, [0] * len(hubs)).order()
    if plan.largest > LARGEST_TABLE:
        raise TooWide(f"a table of {plan.largest} entries")
    combinations = [*itertools.product(*(range(core.sizes[hub]) for hub in hubs))]
    entries = plan.computed * len(combinations)
    if entries > most_entries:
        raise TooWide(f"{entries} entries in its tables")
    known: _Known = {}
    best: tuple[int, list[int]] | None = None
    for fixed in combinations:
        found = core.given(hubs, fixed).eliminated(known, plan)
        if found and (best is None or found[0] < best[0]):
            for hub, label in zip(hubs, fixed, strict=True):
                found[1][hub] = label
            best = found
    if best is None:
        return None
    cost, chosen = best
    return Labelling(cost=cost + reduced.constant, labels=reduced.labels(chosen), entries=entries)


def _hub(core: _Core, hubs: Sequence[int]) -> int:
    """Return the variable with most neighbours, except hubs."""
    free = [v for v in range(len(core.sizes)) if v not in hubs]
    return max(free, key=lambda v: (len(core.near[v]), -v))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """The variables that a reduction leaves, numbered from 0; tables are numbers in ``pool``.

    Attributes:
        sizes: per variable, the number of its labels.
        near: per variable, neighbour -> the pair's table with the variable first.
    """

    pool: Pool
    sizes: tuple[int, ...]
    costs: list[int]
    near: list[dict[int, int]]

    @staticmethod
    def of(reduced: Reduced) -> _Core:
        number = {v: k for k, v in enumerate(reduced.left)}
        return _Core(
            pool=reduced.pool,
            sizes=tuple([len(reduced.kept[v]) for v in reduced.left]),
            costs=[reduced.costs[v] for v in reduced.left],
            near=[{number[n]: t for n, t in reduced.near[v].items()} for v in reduced.left],
        )

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs that have a table."""
        return tuple([(u, v) for u, near in enumerate(self.near) for v in sorted(near) if u < v])

    def order(self) -> EliminationOrder:
        """Return an order of few computed entries."""
        return best_order(self.sizes, self.edges, LARGEST_TABLE, self.computed)

    def computed(self, order: EliminationOrder) -> int:
        """Return the entries of an order's tables; those that repeat count once, if they are cached.

        Their numbers stand for tables: negative ones for those that the eliminations make.
        """
        scopes, room = _Scopes(self), Pool()
        made: dict[_Key, int] = {}
        entries = 0
        for number, (v, scope) in enumerate(order.steps, 1):
            key = scopes.key(v, scope)
            if key not in made:
                entries += math.prod(key[1])
                if room.holds(math.prod(key[1][:-1])):
                    made[key] = -number
            scopes.replace(v, scope, made.get(key, -number))
        return entries

    def given(self, hubs: Sequence[int], labels: Sequence[int]) -> _Core:
        """Return the core in which each hub has one label, and no neighbours (conditioning)."""
        pool, costs, near = self.pool, [*self.costs], [*self.near]
        for hub, label in zip(hubs, labels, strict=True):
            costs[hub] = pool.taken(costs[hub], (label,))
            for n, table in near[hub].items():
                costs[n] = pool.added(costs[n], pool.row(pool.taken(table, (label,))))
                near[n] = {m: t for m, t in near[n].items() if m != hub}
            near[hub] = {}
        sizes = tuple([1 if v in hubs else size for v, size in enumerate(self.sizes)])
        return replace(self, sizes=sizes, costs=costs, near=near)

    def eliminated(self, known: _Known, plan: EliminationOrder) -> tuple[int, list[int]] | None:
        """Eliminate all in the order of ``plan``; return the least cost and its labels."""
        buckets = _Buckets(self, known)
        constant = 0
        trail: list[tuple[int, tuple[int, ...], Labels]] = []  # (variable, scope, best label)
        for v, scope in plan.steps:
            least, best_label = buckets.eliminate(v, scope)
            if least >= FORBIDDEN:
                return None
            constant += least
            trail.append((v, scope, best_label))
        labels = [0] * len(self.sizes)
        for v, scope, best_label in reversed(trail):
            labels[v] = int(best_label[tuple([labels[n] for n in scope])])
        return constant, labels


# Key of an elimination: own costs, labels of all, (dims, number) of each table.
_Key = tuple[int, tuple[int, ...], tuple[tuple[tuple[int, ...], int], ...]]
# Known eliminations: their least entry, the number of their table, the best labels.
_Known = dict[_Key, tuple[int, int, Labels]]


class _Scopes:
    """Per variable, the tables that mention it during an elimination, as (scope, number)."""

    def __init__(self, core: _Core) -> None:
        self._costs, self._sizes = core.costs, core.sizes
        self._tables: list[list[tuple[tuple[int, ...], int]]] = [
            [((v, u), table) for u, table in near.items()] for v, near in enumerate(core.near)
        ]

    def key(self, v: int, scope: tuple[int, ...]) -> _Key:
        """Return what eliminating ``v`` computes; equal keys have equal results."""
        names, sizes = (*scope, v), self._sizes
        place = dict(zip(names, range(len(names)), strict=True))
        mine = sorted([(tuple([place[n] for n in names]), t) for names, t in self._tables[v]])
        return self._costs[v], tuple([sizes[n] for n in names]), tuple(mine)

    def replace(self, v: int, scope: tuple[int, ...], number: int) -> None:
        """Replace the tables of ``v`` by one over its neighbours."""
        tables = self._tables
        for n in scope:
            tables[n] = [entry for entry in tables[n] if v not in entry[0]]
            tables[n].append((scope, number))


class _Buckets:
    """The remaining tables of a problem during elimination."""

    def __init__(self, core: _Core, known: _Known) -> None:
        self._pool, self._known, self._scopes = core.pool, known, _Scopes(core)

    def eliminate(self, v: int, scope: tuple[int, ...]) -> tuple[int, Labels]:
        """Replace the tables of ``v`` by one over its neighbours.

        Returns:
            Its least entry, which is subtracted so that tables of layers repeat, and the best label of
            ``v``, of dims ``scope``.
        """
        key = self._scopes.key(v, scope)
        least, best, best_label = self._known.get(key) or self._eliminate(key)
        for _, table in key[2]:
            self._pool.release(table)
        self._scopes.replace(v, scope, best)
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
