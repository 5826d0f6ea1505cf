"""A problem on which one solver fails numerically goes to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from hap.errors import HapError
from hap.synthesizer.shares import solvers

PROBLEM = Path(__file__).parent / "data" / "share_model_scip_fails.pb"
"""The linear relaxation of the shares of a vision transformer on four unlike CPUs."""


def _problem() -> mathopt.Model:
    proto = model_pb2.ModelProto()
    proto.ParseFromString(PROBLEM.read_bytes())
    return mathopt.Model.from_model_proto(proto)


@pytest.mark.parametrize("relaxed", [True, False])
def test_a_problem_that_one_solver_fails_on_is_solved_by_the_next(relaxed: bool) -> None:
    with pytest.raises(solvers.FAILURES):  # else the fixture tests nothing
        mathopt.solve(_problem(), mathopt.SolverType.GSCIP)
    result = solvers.solved(_problem(), 1e-5, [], relaxed=relaxed)
    assert result.objective_value() == pytest.approx(28489.3256, rel=1e-5)


def test_a_problem_that_no_solver_takes_is_one_error() -> None:
    problem = mathopt.Model()
    problem.add_variable(lb=0, ub=float("nan"))
    with pytest.raises(HapError, match="every solver"):
        solvers.solved(problem, 1e-5, [])
