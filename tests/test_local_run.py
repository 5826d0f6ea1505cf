"""``hap run`` on one machine: what is started again, SIGTERM at each moment, foreign launchers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hap.cli import local_run
from hap.cli.commands import main
from hap.cli.worker import RunJob
from hap.errors import HapError
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.rank_failures import RankDiedError, RankError
from tests.checkpoint_runs import net
from tests.random_plans import random_plan

Start = Callable[..., list[Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Start, int], None]:
    """Run a plan for two ranks; the function given stands for the start of their processes."""
    random_plan(net(), 2, 0).save(tmp_path / "plan.json")
    job = RunJob(
        path=str(tmp_path / "plan.json"), steps=9,
        checkpoints=Checkpoints(folder=str(tmp_path / "c")),
    )  # fmt: skip
    monkeypatch.setattr(local_run, "model_file_of", lambda plan: None)
    monkeypatch.setattr(local_run, "_send", lambda pids, number: None)

    def started(start: Start, max_restarts: int = 0) -> None:
        monkeypatch.setattr(local_run, "spawn", start)
        local_run.run_here(
            local_run.replace(job, max_restarts=max_restarts), 2, lambda step, loss, seconds: None
        )

    return started


def notice() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_before_all_ranks_have_begun_ends_at_once(run: Any) -> None:
    def start(*args: Any, before_rank: Any, **options: Any) -> list[Any]:
        before_rank(0, 1)
        notice()
        raise AssertionError("it goes on")

    with pytest.raises(SystemExit) as ending:
        run(start)
    assert ending.value.code == 128 + signal.SIGTERM


def test_a_second_sigterm_ends_at_once(run: Any) -> None:
    def start(*args: Any, before_rank: Any, **options: Any) -> list[Any]:
        before_rank(0, 1), before_rank(1, 2)
        notice()
        with pytest.raises(SystemExit):
            notice()
        return [7, 7]

    with pytest.raises(SystemExit):
        run(start)


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        (RankError("step-4 was not saved: No space left on device", 1, 2), RankError),
        (RankDiedError("exited with code 75 and no result", 0, "", 75), RankDiedError),
        (RankDiedError("killed by SIGTERM", 0, "", -signal.SIGTERM), SystemExit),
    ],
)
def test_an_error_after_sigterm_is_told_and_nothing_is_started_again(
    run: Any, failure: HapError, found: type[BaseException]
) -> None:
    starts = []

    def start(*args: Any, before_rank: Any, on_report: Any, **options: Any) -> list[Any]:
        starts.append(1)
        before_rank(0, 1), before_rank(1, 2)
        on_report(0, (1, 0.5, 0.1))
        notice()
        raise failure

    with pytest.raises(found):
        run(start, 3)
    assert starts == [1]


@pytest.mark.parametrize(("trained", "starts"), [(False, 1), (True, 3)])
def test_bad_input_is_tried_again_only_after_a_step(run: Any, trained: bool, starts: int) -> None:
    """An error of ``batches()`` has exit code 2, also if the network to the data was away."""
    seen = []

    def start(*args: Any, on_report: Any, **options: Any) -> list[Any]:
        seen.append(1)
        if trained:
            on_report(0, (1, 0.5, 0.1))
        raise RankError("batches() raised OSError: no route to host", 1, 2)

    with pytest.raises(RankError):
        run(start, 2)
    assert len(seen) == starts


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_plan(net(), 2, 0).save(tmp_path / "plan.json")
    monkeypatch.setenv(name, "4")
    result = CliRunner().invoke(main, ["run", str(tmp_path / "plan.json")])
    assert result.exit_code == 2
    assert "mpirun started 4 processes" in result.stderr
