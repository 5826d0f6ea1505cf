"""The integer program of :mod:`hap.synthesizer.shares.share_solver`, solved in the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from hap.synthesizer.shares.linearize import Floats, Plane, Tangents
from hap.synthesizer.shares.share_task import Split, Task, proportional
from hap.synthesizer.shares.solvers import solved

SCALE = 1e4
"""The start's step time, and a device's memory, in the solver's units: its tolerance is 1e-7."""

COARSE, FINE = 1e-3, 1e-4
"""Relative gaps of the solver: of rounds that add tangents, and of the last one."""

_Variables = list[list[mathopt.Variable]]
"""Variables per group and type."""

_Terms = list[tuple[mathopt.Variable, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The integer program of the module's docstring, whose solution is within ``gap`` of the optimum."""

    task: Task
    tangents: Tangents
    padded: Floats
    exchange: Sequence[Plane]
    scale: float
    gap: float = FINE

    def solve(
        self, *, elastic: bool = False, relaxed: bool = False, hint: Split | None = None
    ) -> Split | None:
        """The best split; ``None`` if none fits.

        ``elastic``: let memory overflow, and minimise the lacking bytes in place of time. ``relaxed``:
        solve in fractions, and round them by :func:`proportional`. ``hint``: a split to start from.
        """
        totals = self.totals(elastic=elastic, relaxed=relaxed, hint=hint)
        if totals is None:
            return None
        return tuple(
            _spread(units, of_types, self.task.types, relaxed)
            for units, of_types in zip(self.task.units, totals, strict=True)
        )

    def totals(
        self, *, elastic: bool = False, relaxed: bool = False, hint: Split | None = None
    ) -> list[list[float]] | None:
        """Units per group and type, before :meth:`solve` distributes them to ranks."""
        task = self.task
        count = [len(ranks) for ranks in task.types]
        problem = mathopt.Model()

        def variables(top: Sequence[int]) -> _Variables:
            return [
                [problem.add_variable(lb=0, ub=t, is_integer=not relaxed) for _ in count]
                for t in top
            ]

        n, m = variables(task.units), variables(task.units)
        z = variables([1] * len(task.groups))
        objective: _Terms = []
        padded = []
        for g, units in enumerate(task.units):
            _row(problem, [(x, 1.0) for x in n[g]], lower=units, upper=units)
            largest = problem.add_variable(lb=0)
            padded.append(largest)
            objective.append((largest, self.scale * self.padded[g] / units))
            for k, devices in enumerate(count):
                _row(problem, [(n[g][k], 1.0), (m[g][k], -devices)], upper=0)
                _row(problem, [(m[g][k], 1.0), (z[g][k], -units)], upper=0)
                _row(problem, [(m[g][k], 1.0), (largest, -1.0)], upper=0)
        objective += _stage_rows(problem, self, m, z) + _exchange_rows(problem, self, n)
        lack = _memory_rows(problem, self, m, padded, elastic=elastic)
        for variable, coefficient in lack if elastic else objective:
            problem.objective.set_linear_coefficient(variable, coefficient)
        problem.objective.is_maximize = False
        starts = [_hint(hint, task, n, m, z)] if hint and not relaxed else []
        result = solved(problem, self.gap, starts, relaxed=relaxed)
        if not result.has_primal_feasible_solution():
            return None
        values = result.variable_values()
        return [[values[x] for x in of_types] for of_types in n]


def _row(
    problem: mathopt.Model, terms: Iterable[tuple[mathopt.Variable, float]],
    *, lower: float = -np.inf, upper: float = np.inf,
) -> None:  # fmt: skip
    """Add a linear constraint; a variable may occur in one term."""
    row = problem.add_linear_constraint(lb=lower, ub=upper)
    for variable, coefficient in terms:
        if coefficient:
            row.set_coefficient(variable, float(coefficient))


def _hint(
    split: Split, task: Task, n: _Variables, m: _Variables, z: _Variables
) -> mathopt.SolutionHint:
    """The integer variables of a split."""
    found: dict[mathopt.Variable, float] = {}
    for g, units in enumerate(split):
        for k, ranks in enumerate(task.types):
            mine = [units[r] for r in ranks]
            found.update({n[g][k]: sum(mine), m[g][k]: max(mine), z[g][k]: float(any(mine))})
    return mathopt.SolutionHint(variable_values=found)


def _stage_rows(problem: mathopt.Model, model: Model, m: _Variables, z: _Variables) -> _Terms:
    """Add the rows of ``t[s]``; returns the terms of their sum."""
    rows = model.tangents.seconds
    groups = len(m)
    # Slopes are differences: the last digits of equal stages differ.
    found, times = np.unique(np.round(rows, 10), axis=0, return_counts=True)
    terms = []
    for s, stage in enumerate(found):
        if not stage[..., 1:].any():
            continue  # the same whatever the shares
        t = problem.add_variable(lb=0)
        terms.append((t, float(times[s])))
        for k in range(stage.shape[1]):
            for constant, *rest in sorted({*map(tuple, (stage[:, k] * model.scale).tolist())}):
                starts = [(z[g][k], -rest[g]) for g in range(groups)]
                slopes = [(m[g][k], -rest[groups + g] / u) for g, u in enumerate(model.task.units)]
                _row(problem, [(t, 1.0), *starts, *slopes], lower=constant)
    return terms


def _exchange_rows(problem: mathopt.Model, model: Model, n: _Variables) -> _Terms:
    """Add the rows of ``e``; returns it."""
    e = problem.add_variable(lb=0)
    for plane in model.exchange:
        slopes = [(n[g][k], -model.scale * s) for (g, k), s in np.ndenumerate(plane.slopes)]
        constant = model.scale * plane.at(np.zeros_like(plane.totals))
        _row(problem, [(e, 1.0), *slopes], lower=constant)
    return [(e, 1.0)]


def _memory_rows(
    problem: mathopt.Model, model: Model, m: _Variables, largest: Sequence[mathopt.Variable],
    *, elastic: bool,
) -> _Terms:  # fmt: skip
    """Add the rows of memory; returns the terms of all that lacks."""
    terms = []
    for k, ranks in enumerate(model.task.types):
        room = model.task.hardware.cluster.devices[ranks[0]].memory_bytes
        lack = problem.add_variable(lb=0, ub=np.inf if elastic else 0)
        terms.append((lack, len(ranks) * room / 2**30))
        for constant, *slopes in np.unique(model.tangents.bytes[:, k] * (SCALE / room), axis=0):
            used = [(m[g][k], slopes[g] / u) for g, u in enumerate(model.task.units)]
            used += [(largest[g], slopes[len(m) + g] / u) for g, u in enumerate(model.task.units)]
            _row(problem, [*used, (lack, -1.0)], upper=SCALE - constant)
    return terms


def _spread(
    units: int, totals: Sequence[float], types: Sequence[Sequence[int]], relaxed: bool
) -> tuple[int, ...]:
    """Units per rank from units per type."""
    each = np.zeros(sum(map(len, types)))
    for total, ranks in zip(totals, types, strict=True):
        each[list(ranks)] = (
            max(total, 0.0) / len(ranks)
            if relaxed
            else proportional(round(total), np.ones(len(ranks)))
        )
    return proportional(units, each)
