"""Hostile inputs and mutated plans: a sample of what the two benchmarks try by the hundred."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.hostile.__main__ import all_cases, sample
from benchmarks.hostile.case import run
from benchmarks.mutations import subjects, trial
from benchmarks.mutations.judge import FALSE_EQUAL, HANG, TRACEBACK
from benchmarks.mutations.trial import trials
from benchmarks.time_limit import TooLongError, limited
from hap.errors import InputError
from hap.files import check_output, read_whole, write_whole

CASES, MUTANTS = 30, 18


@pytest.mark.slow
def test_hostile_inputs_are_answered_by_one_paragraph(tmp_path: Path) -> None:
    cases = all_cases(tmp_path / "good", plans=60)
    assert len(cases) >= 500
    chosen = sample(cases, CASES, seed=5)
    assert {case.kind for case in chosen} == {"model", "cluster", "plan", "command"}
    outcomes = [run(case, tmp_path / str(k)) for k, case in enumerate(chosen)]
    bad = [f"{o.case.kind}, {o.case.name}: {o.problem}" for o in outcomes if o.problem]
    assert not bad, "\n".join(bad)
    assert any(o.code == 2 for o in outcomes)


@pytest.mark.slow
def test_mutated_plans_are_refused_or_fail_or_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "MODELS", ("mlp", "normed"))
    monkeypatch.setattr(trial, "subjects", partial(subjects.subjects, seeds=2))
    found = list(trials(MUTANTS, 1, tmp_path / "plan.json", limit_s=60))
    assert len(found) == MUTANTS
    bad = [t for t in found if t.outcome in (FALSE_EQUAL, HANG, TRACEBACK)]
    assert not bad, "\n".join(f"{t.subject}, {t.kind}: {t.why}" for t in bad)


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    check_output(str(tmp_path / "link"))
    write_whole(tmp_path / "link", ["text"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe, not a file"):
        read_whole(tmp_path / "pipe")


def test_code_that_runs_or_waits_for_ever_is_stopped() -> None:
    codes: list[Callable[[], None]] = [partial(time.sleep, 60), busy]
    for code in codes:
        with pytest.raises(TooLongError), limited(0.05):
            code()


def busy() -> None:
    while True:
        pass


def test_an_output_that_is_an_input_through_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "model.py")
    with pytest.raises(InputError, match="own inputs"):
        check_output(str(tmp_path / "link"), str(tmp_path / "model.py"))
