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
    costs = [_beyond(c) for c in unary]
    tables = {pair: _beyond(t) for pair, t in pairs.items()}
    turn = {v: k for k, v in enumerate(order)}
    near: list[list[tuple[int, Costs]]] = [[] for _ in costs]  # turn of the other, its table
    for (u, v), table in tables.items():
        near[u].append((turn[v], table))
        near[v].append((turn[u], table.T))  # a view: both see a change
    constant = 0
    for sweep in range(sweeps):
        forward = sweep % 2 == 0
        for v in order if forward else reversed(order):
            own, taken = costs[v], []
            for _, table in near[v]:
                given = table.min(axis=1)
                own = np.minimum(own + given, BEYOND)
                taken.append(given - np.where(given < FORBIDDEN, 0, BEYOND))
            least = int(own.min(initial=FORBIDDEN))
            if least >= FORBIDDEN:
                return None
            constant += least
            after = [(other > turn[v]) == forward for other, _ in near[v]]
            own = np.where(own < FORBIDDEN, own - least, BEYOND)
            part = own // max(1, sum(after), len(after) - sum(after))
            part = np.where(own < FORBIDDEN, part, BEYOND)
            for (_, table), given, comes in zip(near[v], taken, after, strict=True):
                table += (part - given if comes else -given)[:, None]
            costs[v] = np.where(own < FORBIDDEN, own - part * sum(after), BEYOND)
    return Reparametrized(
        constant=constant,
        unary=[np.minimum(c, FORBIDDEN) for c in costs],
        pairs={pair: np.minimum(t, FORBIDDEN) for pair, t in tables.items()},
    )


BEYOND = FORBIDDEN << 3
"""Forbidden entries while costs move. What they lose leaves them above :data:`FORBIDDEN`."""


def _beyond(costs: Costs) -> Costs:
    return np.where(costs < FORBIDDEN, costs, BEYOND)


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
