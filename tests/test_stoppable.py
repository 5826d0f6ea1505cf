"""Planning that is stopped: the best plan so far, its record, exit codes, estimates of time."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

import hap
from hap.cli.commands import main
from hap.cli.stoppable import STAGES, part_done, planned, remaining_s
from hap.errors import PlanningStopped, UnfinishedError
from hap.ir.plan import Plan
from tests.small_plan import small_plan
from tests.test_cli import CLUSTER, MODEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def stopped_at(stage: str) -> Plan:
    def progress(text: str) -> None:
        if text.startswith(stage):
            raise PlanningStopped("a test")

    return hap.api.plan_file("model.py", "cluster.yaml", progress=progress)


@cache
def whole_plan() -> Plan:
    """Return the plan of a search that is not stopped; the working directory has the files."""
    return hap.api.plan_file("model.py", "cluster.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["search from start 1", "search from start 2", "computing a", "judging", "searching"]
)
def test_a_stopped_search_gives_its_best_plan_so_far(folder: Path, stage: str) -> None:
    made = stopped_at(stage)
    assert made.stopped == "a test"
    assert not made.prediction.bounds
    made.save("plan.json")
    again = Plan.load("plan.json")
    assert again.stopped == "a test"
    assert hap.verify(again).ok
    whole = whole_plan()
    assert not whole.stopped
    assert "stopped" not in whole.to_json()
    assert whole.prediction.step_s <= made.prediction.step_s * 1.01


@pytest.mark.parametrize("stage", ["capturing", "applying"])
def test_without_a_candidate_there_is_no_plan(folder: Path, stage: str) -> None:
    with pytest.raises(PlanningStopped):
        stopped_at(stage)


@pytest.mark.slow
def test_the_command_says_that_the_search_was_not_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["plan", "model.py", "--cluster", "cluster.yaml", "--time-limit", "60"]
    assert CliRunner().invoke(main, command).exit_code == 0
    made = stopped_at("judging")
    monkeypatch.setattr("hap.api.plan_file", lambda *args, **options: made)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 4
    assert "the search was not finished (a test)" in result.stderr
    assert "the search was not finished (a test)" in " ".join(result.stdout.split())
    assert Plan.load("plan.json").stopped == "a test"


def test_a_limit_before_the_first_plan_is_a_clear_error(folder: Path) -> None:
    result = CliRunner().invoke(
        main, ["plan", "model.py", "--cluster", "cluster.yaml", "--time-limit", "0.001"]
    )
    assert result.exit_code == 5
    assert "time limit of 1 ms) before it had a plan" in result.stderr
    assert not (folder / "plan.json").exists()


def test_ctrl_c_stops_planning_and_a_second_one_ends_it() -> None:
    def interrupt(times: int) -> Plan:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except PlanningStopped as stop:
            if times == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            assert str(stop) == "Ctrl-C"
            return small_plan()
        raise AssertionError("the signal did not arrive")

    handler = signal.getsignal(signal.SIGINT)
    assert planned(lambda: interrupt(1), None) == small_plan()
    with pytest.raises(KeyboardInterrupt):
        planned(lambda: interrupt(2), None)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Python drops a second Ctrl-C that arrives in a callback of the collector: none runs here."""
    gc.disable()
    yield
    gc.enable()


def test_a_stop_in_a_finalizer_is_raised_again() -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)

    def drop() -> Plan:
        it = Finalized()
        del it
        time.sleep(10)
        raise AssertionError("the stop was lost")

    hook = sys.unraisablehook
    with pytest.raises(UnfinishedError, match="Ctrl-C"):
        planned(drop, None)
    assert sys.unraisablehook is hook


def test_the_limit_interrupts_a_long_search() -> None:
    start = time.perf_counter()
    with pytest.raises(UnfinishedError, match="time limit of 100 ms"):
        planned(lambda: time.sleep(10) or small_plan(), 0.1)
    assert time.perf_counter() - start < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_record_of_a_stop_is_text() -> None:
    data = small_plan().to_json()
    with pytest.raises(ValueError, match="`stopped`"):
        Plan.from_json({**data, "stopped": 3})


def test_the_remaining_time_follows_the_part_that_is_done() -> None:
    assert remaining_s(0.0, 3.0) is None
    assert remaining_s(0.5, 3.0) == pytest.approx(3.0)
    assert remaining_s(0.75, 3.0, limit_s=3.5) == pytest.approx(0.5)
    assert remaining_s(0.0, 3.0, limit_s=2.0) == 0.0
    parts = [part_done(f"{stage} ...") for stage in STAGES]
    assert parts == sorted(STAGES.values())
    assert part_done("unheard of") == 0.0
