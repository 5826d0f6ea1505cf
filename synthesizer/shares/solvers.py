"""Solve an integer program in the process, by the first solver without numerical trouble."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

from ortools.math_opt.python import mathopt

from hap.errors import HapError

_NODES = 100
"""Limit on branch and bound: a count, so that it is repeatable."""

_ITERATIONS = 10_000
"""Limit on the simplex method, which may go round for ever; programs of shares take a few hundred."""

_NOTHING = mathopt.TerminationReason.NO_SOLUTION_FOUND

FAILURES = (RuntimeError, AttributeError)
"""Errors of a solver that gives up. OR-Tools 9.15 raises ``AttributeError`` while it reports one."""


_SCIP_ERROR = re.compile(rb"^\[\w+\.c:\d+\] ERROR: .*\n", re.MULTILINE)


def solved(
    problem: mathopt.Model, gap: float, hints: list[mathopt.SolutionHint], *, relaxed: bool = False
) -> mathopt.SolveResult:
    """The result of the first solver that does not fail; equal problems have equal results.

    Args:
        gap: relative gap of the solution to the optimum.
        relaxed: the problem has no integer variables.

    Raises:
        HapError: every solver failed.
    """
    given = mathopt.ModelSolveParameters(solution_hints=hints)
    failure: Exception | None = None
    for solver, parameters in _ways(gap, relaxed):
        try:
            with _scip_errors_hidden():
                result = mathopt.solve(problem, solver, params=parameters, model_params=given)
        except FAILURES as error:  # the next solver has another method
            failure = error
            continue
        if not relaxed or result.termination.reason != _NOTHING:
            return result
    raise HapError(
        f"every solver of the integer program of the shares failed: {failure or 'without a reason'}",
        hint="check the figures in the cluster file for values that are many orders apart",
    ) from failure


@contextlib.contextmanager
def _scip_errors_hidden() -> Iterator[None]:
    """Keep the errors that SCIP writes to the descriptor of ``stderr`` from the terminal; other text appears at the end.

    Its failures are handled: the next solver follows.
    """
    try:
        terminal = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            written.seek(0)
            os.write(2, _SCIP_ERROR.sub(b"", written.read()))


def _ways(
    gap: float, relaxed: bool
) -> Iterator[tuple[mathopt.SolverType, mathopt.SolveParameters]]:
    # There is a good split to start from, and few variables: most of SCIP's heuristics, and all its
    # cuts, cost more than they save.
    types, low, off = mathopt.SolverType, mathopt.Emphasis.LOW, mathopt.Emphasis.OFF
    if relaxed:
        yield types.GLOP, mathopt.SolveParameters(iteration_limit=_ITERATIONS)
    limits = {"relative_gap_tolerance": gap, "node_limit": _NODES, "heuristics": low, "cuts": off}
    yield types.GSCIP, mathopt.SolveParameters(**limits, presolve=low)
    yield types.GSCIP, mathopt.SolveParameters(**limits, presolve=off)
    yield types.CP_SAT, mathopt.SolveParameters(relative_gap_tolerance=gap, threads=1)
