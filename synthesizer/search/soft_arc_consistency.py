"""Soft arc consistency: equivalent cost tables that give better bounds.

Costs move between a pair's table and its variables, and finally into a constant; the cost of every
labelling stays exactly the same, and no entry becomes negative (Cooper et al., "Soft arc
consistency revisited", Artificial Intelligence 2010), in sweeps as in sequential message passing
(Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", TPAMI 2006).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs
from hap.synthesizer.search.search_result import Pairs, Unary


@dataclass(frozen=True, slots=True, kw_only=True)
class Reparametrized:
    """Tables in which every labelling costs ``constant`` less than before."""

    constant: int
    unary: list[Costs]
    pairs: dict[tuple[int, int], Costs]


def reparametrize(
    unary: Unary, pairs: Pairs, order: Sequence[int], sweeps: int
) -> Reparametrized | None:
    """Sweep over the variables in ``order`` and back, in turns; ``None`` if all is forbidden.

    A variable takes all costs of its pairs, gives its least cost to the constant, and distributes
    the rest to the pairs with the variables that come next.
    """
    costs = [np.minimum(c, FORBIDDEN) for c in unary]
    tables = {pair: np.minimum(t, FORBIDDEN) for pair, t in pairs.items()}
    turn = {v: k for k, v in enumerate(order)}
    near: list[list[tuple[int, int]]] = [[] for _ in costs]
    for pair in tables:
        for v in pair:
            near[v].append(pair)
    constant = 0
    for sweep in range(sweeps):
        for v in order if sweep % 2 == 0 else reversed(order):
            own = costs[v]
            for pair in near[v]:
                given = _facing(tables[pair], pair, v).min(axis=1)
                own = np.minimum(own + given, FORBIDDEN)
                tables[pair] = _add(tables[pair], pair, v, -np.where(given < FORBIDDEN, given, 0))
            least = int(own.min(initial=FORBIDDEN))
            if least >= FORBIDDEN:
                return None
            constant += least
            own = np.where(own < FORBIDDEN, own - least, FORBIDDEN)
            after = [
                p for p in near[v] if (turn[p[0]] + turn[p[1]] > 2 * turn[v]) == (sweep % 2 == 0)
            ]
            if after:
                part = own // max(len(after), len(near[v]) - len(after))
                part = np.where(own < FORBIDDEN, part, FORBIDDEN)
                for pair in after:
                    tables[pair] = _add(tables[pair], pair, v, part)
                own = np.where(own < FORBIDDEN, own - part * len(after), FORBIDDEN)
            costs[v] = own
    return Reparametrized(constant=constant, unary=costs, pairs=tables)


def _facing(table: Costs, pair: tuple[int, int], v: int) -> Costs:
    """Return the table with the labels of ``v`` along dim 0."""
    return table if pair[0] == v else table.T


def _add(table: Costs, pair: tuple[int, int], v: int, costs: Costs) -> Costs:
    """Return the table plus costs of the labels of ``v``; forbidden entries stay forbidden."""
    along = costs[:, None] if pair[0] == v else costs[None, :]
    return np.where(table < FORBIDDEN, np.minimum(table + along, FORBIDDEN), FORBIDDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simplified:
    """Tables without irrelevant labels; ``labels[v]`` are the remaining labels of ``v``."""

    labels: list[tuple[int, ...]]
    unary: list[Costs]
    pairs: dict[tuple[int, int], Costs]


def simplify(unary: Unary, pairs: Pairs) -> Simplified:
    """Drop forbidden labels, then tables that are zero or concern one variable alone."""
    left = [np.flatnonzero(c < FORBIDDEN) for c in unary]
    costs = [c[kept] for c, kept in zip(unary, left, strict=True)]
    tables = {}
    for (u, v), table in pairs.items():
        table = table[np.ix_(left[u], left[v])]
        if len(left[u]) == 1:
            costs[v] = np.minimum(costs[v] + table[0], FORBIDDEN)
        elif len(left[v]) == 1:
            costs[u] = np.minimum(costs[u] + table[:, 0], FORBIDDEN)
        elif table.any():
            tables[u, v] = table
    labels = [tuple(kept.tolist()) for kept in left]
    return Simplified(labels=labels, unary=costs, pairs=tables)
