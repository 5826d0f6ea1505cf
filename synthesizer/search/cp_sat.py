"""The labelling problem as an integer program for CP-SAT, to check the other engines.

One Boolean per label, exactly one of them true per variable. A pair whose table only forbids becomes
clauses. A pair with costs has a Boolean per admitted entry, linked to its labels by sums: the local
polytope, whose relaxation is often tight (Wainwright and Jordan, 2008, chapter 8). The solver shares
only the tables with the other engines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs, Labelling
from hap.synthesizer.search.search_result import INFEASIBLE, Pairs, SearchResult, Unary, cost_of

EFFORT = 600.0
"""Limit in CP-SAT's deterministic time, which counts work and is the same on any machine."""


def solve(unary: Unary, pairs: Pairs, *, effort: float = EFFORT) -> SearchResult:
    """Solve with one worker and a fixed seed.

    The cost is the sum over the labels. The solver works with the same integers, less their common
    part and divided by their common divisor, to stay far within 64 bits.
    """
    if any(len(costs) == 0 for costs in unary):
        return INFEASIBLE
    from ortools.sat.python import cp_model  # here: slow to load, and only this engine needs it

    model = _Model(unary, pairs)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return INFEASIBLE
    assert status != cp_model.MODEL_INVALID, "the costs add up to more than 64 bits hold"
    bound = model.constant + model.divisor * int(solver.response_proto.inner_objective_lower_bound)
    if status == cp_model.UNKNOWN:
        return SearchResult(bound, None)
    labels = tuple(
        next(k for k, label in enumerate(row) if solver.boolean_value(label))
        for row in model.labels
    )
    cost = cost_of(labels, unary, pairs)
    assert status != cp_model.OPTIMAL or bound == cost, "the solver's optimum is what labels cost"
    return SearchResult(bound, Labelling(cost=cost, labels=labels))


class _Model:
    """The integer program; a labelling costs ``constant`` + ``divisor`` times its objective."""

    def __init__(self, unary: Unary, pairs: Pairs) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self.labels = [[self._boolean() for _ in costs] for costs in unary]
        self._own = [np.minimum(costs, FORBIDDEN) for costs in unary]
        self._terms: list[tuple[Any, int]] = []
        self.constant = 0
        for row in self.labels:
            self.model.add_exactly_one(row)
        for (u, v), table in pairs.items():
            self._add_pair(u, v, table)
        for row, costs in zip(self.labels, self._own, strict=True):
            self._add_variable(row, costs)
        self.divisor = int(np.gcd.reduce([cost for _, cost in self._terms])) if self._terms else 1
        self.model.minimize(
            cp_model.LinearExpr.weighted_sum(
                [term for term, _ in self._terms], [cost // self.divisor for _, cost in self._terms]
            )
        )

    def _boolean(self) -> Any:
        return self.model.new_bool_var("")

    def _add_variable(self, row: list[Any], costs: Costs) -> None:
        least = min(int(costs.min()), FORBIDDEN - 1)
        self.constant += least
        for label, cost in zip(row, costs.tolist(), strict=True):
            if cost >= FORBIDDEN:
                self.model.add(label == 0)
            elif cost > least:
                self._terms.append((label, cost - least))

    def _add_pair(self, u: int, v: int, table: Costs) -> None:
        """Add a pair's table; the minimum over a label's entries moves to the label's own cost."""
        allowed = table < FORBIDDEN
        for own, axis in ((u, 1), (v, 0)):
            least = np.where(allowed, table, FORBIDDEN).min(axis=axis)
            self._own[own] = np.minimum(self._own[own] + least, FORBIDDEN)
            table = table - np.expand_dims(np.where(least < FORBIDDEN, least, 0), axis)
        for row, other, kept in (
            (self.labels[u], self.labels[v], allowed),
            (self.labels[v], self.labels[u], allowed.T),
        ):
            self._imply(row, other, kept)
        if table[allowed].any():
            self._add_entries(u, v, table, allowed)

    def _imply(self, row: list[Any], other: list[Any], allowed: npt.NDArray[np.bool_]) -> None:
        for label, kept in zip(row, allowed, strict=True):
            if not kept.all():
                self.model.add_bool_or(~label, *(other[k] for k in np.flatnonzero(kept)))

    def _add_entries(self, u: int, v: int, table: Costs, allowed: npt.NDArray[np.bool_]) -> None:
        entry = {
            (int(i), int(j)): self._boolean() for i, j in zip(*np.nonzero(allowed), strict=True)
        }
        for position, row in enumerate((self.labels[u], self.labels[v])):
            for k, label in enumerate(row):
                self.model.add(sum(e for ij, e in entry.items() if ij[position] == k) == label)
        self._terms += [(e, int(table[ij])) for ij, e in entry.items() if table[ij]]
