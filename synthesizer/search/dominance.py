"""Dominated labels, removed before elimination.

A label that is never cheaper than another of its variable is dropped, which makes others
droppable, until nothing changes. A variable with one remaining label adds its costs to
its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from hap.synthesizer.search.table_pool import Costs, Pool


class Reduced:
    """A problem without dominated labels; its tables are numbers in ``pool``.

    Attributes:
        costs: per variable, its own table.
        near: per variable, neighbour -> the pair's table with the variable first.
        kept: per variable, the original numbers of the remaining labels.
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
        for v, kept in enumerate(self.kept):
            if len(kept) == 1:
                self._settle(v)
        self._drop_dominated()

    @property
    def sizes(self) -> list[int]:
        """Number of labels of each variable."""
        return [len(kept) for kept in self.kept]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs that still have a table."""
        return [(u, v) for u, near in enumerate(self.near) for v in sorted(near) if u < v]

    def _drop_dominated(self) -> None:
        waiting = deque(v for v, near in enumerate(self.near) if len(self.kept[v]) > 1)
        queued = set(waiting)
        while waiting:
            v = waiting.popleft()
            queued.discard(v)
            near = self.near[v]
            labels = self.pool.undominated(self.costs[v], tuple(sorted(near.values())))
            if len(labels) == len(self.kept[v]):
                continue
            self._take(v, labels)
            for u in sorted(near):
                if u not in queued and len(self.kept[u]) > 1:
                    queued.add(u)
                    waiting.append(u)
            if len(labels) == 1:
                self._settle(v)

    def _take(self, v: int, labels: tuple[int, ...]) -> None:
        pool = self.pool
        self.kept[v] = tuple(self.kept[v][label] for label in labels)
        self.costs[v] = pool.taken(self.costs[v], labels)
        for u, table in self.near[v].items():
            self.near[v][u] = taken = pool.taken(table, labels)
            self.near[u][v] = pool.turned(taken)

    def _settle(self, v: int) -> None:
        """Move tables with a variable of one label to the costs of the other variable."""
        for u, table in self.near[v].items():
            self.costs[u] = self.pool.added(self.costs[u], table)
            del self.near[u][v]
        self.near[v] = {}
