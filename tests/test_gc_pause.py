"""A pause of the garbage collector ends with it."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hap.gc_pause import gc_paused


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def test_nothing_is_collected_inside() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_garbage_is_left_to_the_end_of_the_process(freeze: bool) -> None:
    code = f"""
import gc
from hap.gc_pause import gc_paused
from tests.test_gc_pause import _Cycle
with gc_paused(freeze={freeze}):
    _Cycle()
gc.collect()
print(sum(isinstance(o, _Cycle) for o in gc.get_objects()), gc.get_freeze_count() > 0)
gc.unfreeze()
print(sum(isinstance(o, _Cycle) for o in gc.get_objects()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    frozen, thawed = run.stdout.splitlines()
    assert frozen == f"0 {freeze}"
    assert thawed == ("1" if freeze else "0")


def test_a_plan_ends_the_pause_where_the_process_goes_on() -> None:
    code = """
import gc
from click.testing import CliRunner
from hap.cli.commands import main
assert CliRunner().invoke(main, ["plan", "none.py", "--cluster", "none.yaml"]).exit_code == 2
print(gc.isenabled(), gc.get_freeze_count())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "0"]
