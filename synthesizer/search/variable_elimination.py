"""Eliminate variables with few neighbours before a search.

A variable with at most two neighbours is replaced by a table over them, minimised over its labels:
the cheapest cost stays the same (Larrosa, "Boosting search with variable elimination", CP 2000). A
program is chains of operators for the most part, so that few variables remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs
from hap.synthesizer.search.search_result import Pairs, Unary
from hap.synthesizer.search.table_pool import Labels

MOST_NEIGHBOURS = 2
"""A table over more variables than that is no pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """The problem over the variables that remain; each labelling costs ``constant`` less.

    Attributes:
        variables: the original numbers of the remaining variables.
        steps: (variable, neighbours, best label for each of their labels), in order of elimination.
    """

    constant: int
    unary: list[Costs]
    pairs: dict[tuple[int, int], Costs]
    variables: tuple[int, ...]
    steps: Sequence[tuple[int, tuple[int, ...], Labels]]

    def labels(self, chosen: Sequence[int]) -> list[int]:
        """Return the best labels of all variables, given those of the remaining ones."""
        labels = [0] * (len(self.variables) + len(self.steps))
        for v, label in zip(self.variables, chosen, strict=True):
            labels[v] = label
        for v, scope, best in reversed(self.steps):
            labels[v] = int(best[tuple([labels[n] for n in scope])])
        return labels


def eliminate_variables(unary: Unary, pairs: Pairs) -> Remaining:
    """Eliminate variables until each has more than :data:`MOST_NEIGHBOURS` neighbours.

    Args:
        unary, pairs: the tables, as in :func:`hap.synthesizer.search.bucket_elimination.minimise`.
    """
    costs = [np.minimum(own, FORBIDDEN) for own in unary]
    near: list[dict[int, Costs]] = [{} for _ in costs]
    for (u, v), table in pairs.items():
        near[u][v] = np.minimum(table, FORBIDDEN)
        near[v][u] = near[u][v].T
    constant = 0
    steps: list[tuple[int, tuple[int, ...], Labels]] = []
    waiting, gone = [*range(len(costs))], set[int]()
    while waiting:
        v = waiting.pop()
        if v in gone or len(near[v]) > MOST_NEIGHBOURS:
            continue
        gone.add(v)
        scope = tuple(sorted(near[v]))
        total = costs[v]  # the labels of v are the first dim
        for n in scope:
            total = total[..., None] + near[v][n].reshape(
                -1, *[1] * (total.ndim - 1), len(costs[n])
            )
            del near[n][v]
        least = np.minimum(total.min(axis=0, initial=FORBIDDEN), FORBIDDEN)
        steps.append((v, scope, total.argmin(axis=0)))
        if not scope:
            constant = min(constant + int(least), FORBIDDEN)
        elif len(scope) == 1:
            costs[scope[0]] = np.minimum(costs[scope[0]] + least, FORBIDDEN)
        else:
            a, b = scope
            known = near[a].get(b)
            near[a][b] = least if known is None else np.minimum(known + least, FORBIDDEN)
            near[b][a] = near[a][b].T
        waiting += scope
    left = tuple(v for v in range(len(costs)) if v not in gone)
    number = {v: k for k, v in enumerate(left)}
    return Remaining(
        constant=constant,
        unary=[costs[v] for v in left],
        pairs={
            (number[u], number[v]): table
            for u in left for v, table in near[u].items() if u < v
        },
        variables=left,
        steps=steps,
    )  # fmt: skip
