"""Labels and variables removed before a search: the cheapest cost stays the same.

Two steps alternate until nothing changes, each of which makes room for the other:

* A label that is never cheaper than another of its variable is dropped.
* A variable with at most two neighbours is replaced by a table over them, minimised over its labels
  (Larrosa, "Boosting search with variable elimination", CP 2000). A program is chains of operators
  for the most part, so that few variables remain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from hap.synthesizer.search.table_pool import FORBIDDEN, Costs, Labels, Pool

MOST_NEIGHBOURS = 2
"""A table over more variables than that is no pair."""

SMALL = 1 << 14
"""Limit of entries of a variable and its neighbours."""

_Step = tuple[int, tuple[tuple[int, tuple[int, ...]], ...], Labels]


class Reduced:
    """A problem without the removed labels and variables; its tables are numbers in ``pool``.

    Attributes:
        constant: the cost that each labelling has besides the remaining tables.
        feasible: False if some variable has no allowed label.
        costs: per variable, its own table.
        near: per variable, neighbour -> the pair's table with the variable first.
        kept: per variable, the original numbers of the remaining labels.
        left: the variables that are not eliminated.
    """

    def __init__(
        self, pool: Pool, unary: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]
    ) -> None:
        self.pool = pool
        self.costs = [pool.number(costs) for costs in unary]
        self.near: list[dict[int, int]] = [{} for _ in unary]
        for (u, v), table in pairs.items():
            number = pool.number(table)
            self.near[u][v], self.near[v][u] = number, pool.turned(number)
        self.kept = [tuple(range(len(costs))) for costs in unary]
        self.constant, self.feasible = 0, True
        self._gone = [False] * len(unary)
        self._steps: list[_Step] = []  # (variable, its neighbours and their labels, its best label)
        self._reduce()
        self.left = [v for v, gone in enumerate(self._gone) if not gone]

    @property
    def tables(self) -> tuple[list[Costs], dict[tuple[int, int], Costs]]:
        """The remaining problem, with the variables of ``left`` numbered from 0."""
        tables, number = self.pool.tables, {v: k for k, v in enumerate(self.left)}
        return [tables[self.costs[v]] for v in self.left], {
            (number[u], number[v]): tables[table]
            for u in self.left for v, table in self.near[u].items() if u < v
        }  # fmt: skip

    def labels(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Return the original labels of all variables, given those of ``left`` among ``kept``."""
        labels = [0] * len(self.kept)
        for v, label in zip(self.left, chosen, strict=True):
            labels[v] = self.kept[v][label]
        for v, near, best in reversed(self._steps):
            at = tuple([kept.index(labels[n]) for n, kept in near])
            labels[v] = self.kept[v][best[at]]
        return tuple(labels)

    def _reduce(self) -> None:
        waiting = deque(reversed(range(len(self.kept))))
        queued = [True] * len(self.kept)
        while waiting and self.feasible:
            v = waiting.popleft()
            queued[v] = False
            if self._gone[v]:
                continue
            changed = self._drop_dominated(v)
            if len(self.kept[v]) == 1:
                changed = self._settle(v)
            if len(self.near[v]) <= MOST_NEIGHBOURS and self._entries(v) <= SMALL:
                changed += self._eliminate(v)
            for u in sorted({*changed}):
                if not queued[u]:
                    queued[u] = True
                    waiting.append(u)

    def _entries(self, v: int) -> int:
        entries = len(self.kept[v])
        for n in self.near[v]:
            entries *= len(self.kept[n])
        return entries

    def _drop_dominated(self, v: int) -> list[int]:
        """Drop the dominated labels of a variable and return the variables that this concerns."""
        if len(self.kept[v]) == 1:
            return []
        pool, near = self.pool, self.near[v]
        labels = pool.undominated(self.costs[v], tuple(sorted(near.values())))
        if len(labels) == len(self.kept[v]):
            return []
        self.kept[v] = tuple([self.kept[v][label] for label in labels])
        self.costs[v] = pool.taken(self.costs[v], labels)
        for u, table in near.items():
            near[u] = taken = pool.taken(table, labels)
            self.near[u][v] = pool.turned(taken)
        return [*near]

    def _settle(self, v: int) -> list[int]:
        """Move tables with a variable of one label to the costs of the other variables."""
        near, self.near[v] = self.near[v], {}
        for u, table in near.items():
            self.costs[u] = self.pool.added(self.costs[u], self.pool.row(table))
            del self.near[u][v]
        return [*near]

    def _eliminate(self, v: int) -> list[int]:
        """Replace a variable by a table over its neighbours, and return these."""
        pool, near = self.pool, self.near[v]
        # The neighbour of the smaller number of tables first, so that layers repeat.
        scope = sorted(near, key=lambda n: (near[n], n))
        least, rest, best = pool.minimum(self.costs[v], tuple([near[n] for n in scope]))
        self._gone[v], self.near[v] = True, {}
        self._steps.append((v, tuple([(n, self.kept[n]) for n in scope]), best))
        if least >= FORBIDDEN:
            self.feasible = False
            return []
        self.constant += least
        for n in scope:
            del self.near[n][v]
        if len(scope) == 1:
            self.costs[scope[0]] = pool.added(self.costs[scope[0]], rest)
        elif scope:
            a, b = scope
            known = self.near[a].get(b)
            self.near[a][b] = both = rest if known is None else pool.added(known, rest)
            self.near[b][a] = pool.turned(both)
        return scope
