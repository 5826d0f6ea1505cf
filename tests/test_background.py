"""Work in another process has the result that it has in this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import pytest

from hap.background import Caller, background_task, each
from hap.errors import HapError

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(params=["one core", "all cores"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    if request.param == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
        return 1
    return CORES


def test_the_result_is_that_of_the_work(cores: int) -> None:
    with background_task(lambda caller: os.getpid()) as process:
        assert (process.result() == os.getpid()) == (cores == 1)


def test_the_work_hears_what_it_is_told(cores: int) -> None:
    def listen(caller: Caller) -> str:
        end = time.monotonic() + 60
        while caller.latest() is None and time.monotonic() < end:
            time.sleep(0.01)
        return str(caller.latest())

    with background_task(listen, nice=10) as process:
        process.tell("enough")
        assert process.result() == "enough"


def test_what_is_told_last_counts(cores: int) -> None:
    def work(caller: Caller) -> str:
        while caller.latest() != "last":
            time.sleep(0.01)
        return "done"

    with background_task(work) as process:
        for what in ("first", "second", "last"):
            process.tell(what)
        assert process.result() == "done"


def test_the_first_process_hears_what_the_work_says_before_its_result(cores: int) -> None:
    def work(caller: Caller) -> str:
        caller.tell("early")
        caller.tell("later")
        while cores > 1 and caller.latest() != "enough":
            time.sleep(0.01)
        return "done"

    with background_task(work) as process:
        assert process.first() == process.first() == ("early" if cores > 1 else None)
        process.tell("enough")
        assert process.result() == "done"


@pytest.mark.parametrize("said", [False, True])
def test_work_that_says_nothing_has_its_result(cores: int, said: bool) -> None:
    with background_task(lambda caller: 3) as process:
        assert not said or process.first() is None
        assert process.result() == 3


@pytest.mark.parametrize("end", [lambda: os._exit(1), lambda: time.sleep(600)])
def test_work_that_nobody_waits_for_ends_with_the_context(end: Callable[[], None]) -> None:
    begun = time.monotonic()
    with background_task(lambda caller: end()):
        pass
    assert time.monotonic() - begun < 60


def test_work_whose_process_ends_is_repeated_here(cores: int) -> None:
    here = os.getpid()

    def work(caller: Caller) -> str:
        if os.getpid() != here:
            os._exit(1)
        return f"here, told {caller.latest()}"

    with background_task(work) as process, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        process.tell("this")
        assert process.result() == "here, told this"
    assert len(warned) == (cores > 1)
    assert all("ended without a result" in str(w.message) for w in warned)


def test_an_error_is_raised_where_the_result_is_wanted(cores: int) -> None:
    def work(caller: Caller) -> None:
        raise HapError("there is no program")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the process has not failed
        with background_task(work) as process, pytest.raises(HapError, match="no program"):
            process.result()


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("apart", [False, True])
def test_each_item_has_its_result_in_order(count: int, apart: bool, cores: int) -> None:
    found = each(lambda item: (item**2, os.getpid()), range(count), apart=apart)
    assert [square for square, _ in found] == [item**2 for item in range(count)]
    others = apart and cores > 1 and count > 1
    assert len({pid for _, pid in found}) == (2 if others else min(count, 1))


def test_nothing_is_forked_inside_of_a_process_of_its_own(cores: int) -> None:
    def nested(caller: Caller) -> bool:
        with background_task(lambda caller: os.getpid()) as inner:
            return inner.result() == os.getpid()

    with background_task(nested) as process:
        assert process.result()


def test_work_that_is_stopped_ends_at_once() -> None:
    begun = time.monotonic()
    with background_task(lambda caller: time.sleep(600)) as process:
        process.stop()
    assert time.monotonic() - begun < 60


KILLED = """
import os, signal, time
from hap.background import background_task

def work(caller):
    os.write(1, f"{os.getpid()} ".encode())  # in one piece, beside that of the other process
    time.sleep(600)

with background_task(work), background_task(work):
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(CORES == 1, reason="forks need a second core")
def test_processes_end_with_one_that_is_killed() -> None:
    words = [sys.executable, "-c", KILLED]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as first:
        said, _ = first.communicate(timeout=60)  # its end is that of all who can write
    assert len(said.split()) == 2
