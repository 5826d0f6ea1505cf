"""A problem on which one solver fails numerically goes to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from hap.errors import HapError
from hap.synthesizer.shares import solvers

DATA = Path(__file__).parent / "data"

FAILS = "share_model_scip_fails.pb"
"""The linear relaxation of the shares of a vision transformer on four unlike CPUs."""

CYCLES = "share_model_glop_cycles.pb"
"""The linear relaxation of the shares of a mixture of experts that lacks memory on eight GPUs."""


def _problem(name: str = FAILS) -> mathopt.Model:
    proto = model_pb2.ModelProto()
    proto.ParseFromString((DATA / name).read_bytes())
    return mathopt.Model.from_model_proto(proto)


@pytest.mark.parametrize("relaxed", [True, False])
def test_a_problem_that_one_solver_fails_on_is_solved_by_the_next(relaxed: bool) -> None:
    with pytest.raises(solvers.FAILURES):  # else the fixture tests nothing
        mathopt.solve(_problem(), mathopt.SolverType.GSCIP)
    result = solvers.solved(_problem(), 1e-5, [], relaxed=relaxed)
    assert result.objective_value() == pytest.approx(28489.3256, rel=1e-5)


@pytest.mark.slow
def test_a_problem_on_which_the_simplex_method_cycles_is_solved_by_the_next() -> None:
    limit = mathopt.SolveParameters(iteration_limit=200_000)
    result = mathopt.solve(_problem(CYCLES), mathopt.SolverType.GLOP, params=limit)
    assert not result.has_primal_feasible_solution()  # else the fixture tests nothing
    result = solvers.solved(_problem(CYCLES), 1e-3, [], relaxed=True)
    assert result.objective_value() == pytest.approx(3100220.557, rel=1e-6)


def test_a_problem_that_no_solver_takes_is_one_error() -> None:
    problem = mathopt.Model()
    problem.add_variable(lb=0, ub=float("nan"))
    with pytest.raises(HapError, match="every solver"):
        solvers.solved(problem, 1e-5, [])


def test_errors_of_a_solver_do_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(solvers.FAILURES):
        mathopt.solve(_problem(), mathopt.SolverType.GSCIP)
    assert "ERROR" in capfd.readouterr().err  # else the fixture tests nothing
    solvers.solved(_problem(), 1e-5, [])
    assert capfd.readouterr().err == ""


def test_other_text_reaches_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with solvers._scip_errors_hidden():
        os.write(2, b"searching\n[solve.c:4216] ERROR: (node 1) in LP 18\nERROR: no space\n")
    assert capfd.readouterr().err == "searching\nERROR: no space\n"
