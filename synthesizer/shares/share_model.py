"""The integer program of :mod:`hap.synthesizer.shares.share_solver`, built with PuLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from hap.synthesizer.shares.linearize import Floats, Plane, Tangents
from hap.synthesizer.shares.share_task import Split, Task, proportional

SCALE = 1e4
"""The start's step time, and a device's memory, in the solver's units: its tolerance is 1e-7."""


_Variables = list[list[Any]]
"""PuLP variables per group and type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The integer program of the module's docstring."""

    task: Task
    tangents: Tangents
    padded: Floats
    exchange: Sequence[Plane]
    scale: float

    def solve(self, *, elastic: bool = False, relaxed: bool = False) -> Split | None:
        """The best split; ``None`` if none fits.

        ``elastic``: let memory overflow, and minimise the lacking bytes in place of time. ``relaxed``:
        solve in fractions, and round them by :func:`proportional`.
        """
        totals = self.totals(elastic=elastic, relaxed=relaxed)
        if totals is None:
            return None
        return tuple(
            _spread(units, of_types, self.task.types, relaxed)
            for units, of_types in zip(self.task.units, totals, strict=True)
        )

    def totals(self, *, elastic: bool = False, relaxed: bool = False) -> list[list[float]] | None:
        """Units per group and type, before :meth:`solve` distributes them to ranks."""
        task = self.task
        count = [len(ranks) for ranks in task.types]
        problem = pulp.LpProblem("shares", pulp.LpMinimize)

        def variables(name: str, top: Sequence[int]) -> _Variables:
            kind = "Continuous" if relaxed else "Integer"
            return [
                [pulp.LpVariable(f"{name}_{g}_{k}", 0, top[g], kind) for k in range(len(count))]
                for g in range(len(task.groups))
            ]

        n, m = variables("n", task.units), variables("m", task.units)
        z = variables("z", [1] * len(task.groups))
        objective, padded = [], []
        for g, units in enumerate(task.units):
            problem += pulp.lpSum(n[g]) == units
            largest = pulp.LpVariable(f"largest_{g}", 0)
            padded.append(largest)
            objective.append((largest, self.scale * self.padded[g] / units))
            for k, devices in enumerate(count):
                problem += n[g][k] <= devices * m[g][k]
                problem += m[g][k] <= units * z[g][k]
                problem += m[g][k] <= largest
        objective += _stage_rows(problem, self, m, z) + _exchange_rows(problem, self, n)
        lack = _memory_rows(problem, self, m, padded, elastic=elastic)
        problem += pulp.LpAffineExpression(lack if elastic else objective)
        # Serial by default. With threads=1 CBC starts a worker that at times misses its wake-up,
        # and then sleeps for 10 s.
        problem.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=1e-5, maxNodes=20_000))
        if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        return [[v.value() for v in of_types] for of_types in n]


def _stage_rows(
    problem: pulp.LpProblem, model: Model, m: _Variables, z: _Variables
) -> list[tuple[pulp.LpVariable, float]]:
    """Add the rows of ``t[s]``; returns the terms of their sum."""
    rows = model.tangents.seconds
    groups = len(m)
    # Slopes are differences: the last digits of equal stages differ.
    found, times = np.unique(np.round(rows, 10), axis=0, return_counts=True)
    terms = []
    for s, stage in enumerate(found):
        if not stage[..., 1:].any():
            continue  # the same whatever the shares
        t = pulp.LpVariable(f"t_{s}", 0)
        terms.append((t, float(times[s])))
        for k in range(stage.shape[1]):
            for constant, *rest in np.unique(stage[:, k] * model.scale, axis=0).tolist():
                starts = [(z[g][k], -rest[g]) for g in range(groups)]
                slopes = [(m[g][k], -rest[groups + g] / u) for g, u in enumerate(model.task.units)]
                problem += pulp.LpAffineExpression([(t, 1.0), *starts, *slopes]) >= constant
    return terms


def _exchange_rows(
    problem: pulp.LpProblem, model: Model, n: _Variables
) -> list[tuple[pulp.LpVariable, float]]:
    """Add the rows of ``e``; returns it."""
    e = pulp.LpVariable("e", 0)
    for plane in model.exchange:
        slopes = [(n[g][k], -model.scale * s) for (g, k), s in np.ndenumerate(plane.slopes)]
        constant = model.scale * plane.at(np.zeros_like(plane.totals))
        problem += pulp.LpAffineExpression([(e, 1.0), *slopes]) >= constant
    return [(e, 1.0)]


def _memory_rows(
    problem: pulp.LpProblem, model: Model, m: _Variables, largest: list[Any], *, elastic: bool
) -> list[tuple[pulp.LpVariable, float]]:
    """Add the rows of memory; returns the terms of all that lacks."""
    terms = []
    for k, ranks in enumerate(model.task.types):
        room = model.task.machine.cluster.devices[ranks[0]].memory_bytes
        lack = pulp.LpVariable(f"lack_{k}", 0, None if elastic else 0)
        terms.append((lack, len(ranks) * room / 2**30))
        for constant, *slopes in np.unique(model.tangents.bytes[:, k] * (SCALE / room), axis=0):
            used = [(m[g][k], slopes[g] / u) for g, u in enumerate(model.task.units)]
            used += [(largest[g], slopes[len(m) + g] / u) for g, u in enumerate(model.task.units)]
            problem += pulp.LpAffineExpression([*used, (lack, -1.0)]) <= SCALE - constant
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
