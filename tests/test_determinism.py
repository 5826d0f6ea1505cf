"""The same inputs give the same plan, byte for byte, for every hash seed and in every run.

Ranks on many machines may each plan for themselves and must find the same program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hap import api
from hap.cli.commands import main
from hap.ir.placement import R
from hap.ir.plan import Plan

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CLUSTER = str(BENCHMARKS / "clusters" / "unlike8.yaml")
SEED = "0" if os.environ.get("PYTHONHASHSEED") != "0" else "4294967295"
"""Not the one of this process, which is random if the environment gives none."""

# One process plans all models, because imports take most of its time.
PROGRAM = """\
import sys
from hap.cli.commands import main
for number, model in enumerate(sys.argv[2:]):
    words = ["plan", model, "--cluster", sys.argv[1], "-o", f"plan{number}.json"]
    main(words, standalone_mode=False)
"""


def spec(model: str) -> str:
    return str(BENCHMARKS / "models" / model)


def in_process(folder: Path, *models: str) -> tuple[str, list[bytes]]:
    """Return stdout of ``hap plan`` and the plan files, from a process with the other hash seed."""
    words = [sys.executable, "-c", PROGRAM, CLUSTER, *map(spec, models)]
    environment = os.environ | {"PYTHONHASHSEED": SEED}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, [path.read_bytes() for path in sorted(folder.glob("plan*.json"))]


def here(*models: str) -> tuple[str, list[bytes]]:
    """The same in this process and its working folder, after whatever other tests left behind."""
    shown = []
    for number, model in enumerate(models):
        words = ["plan", spec(model), "--cluster", CLUSTER, "-o", f"plan{number}.json"]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.stderr
        shown.append(done.stdout)
    return "".join(shown), [path.read_bytes() for path in sorted(Path().glob("plan*.json"))]


@pytest.mark.slow
def test_plans_do_not_depend_on_the_hash_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ("bert.py:tiny", "mlp.py:model")  # the second stores parameters in shards
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    screen, files = here(*models)
    assert len(files) == len(models)
    plans = [Plan.load(f"plan{k}.json") for k in range(len(models))]
    stored = [plan.program.inputs[i.tensor] for plan in plans for i in plan.graph.role("parameter")]
    assert any(p != R for p in stored), "no parameter is split: the test shows too little"
    other_screen, other_files = in_process(tmp_path / "there", *models)
    assert other_screen == screen, f"another screen with PYTHONHASHSEED={SEED}"
    assert other_files == files, f"another plan with PYTHONHASHSEED={SEED}"


@pytest.mark.slow
def test_planning_leaves_nothing_behind_that_changes_the_next_plan(tmp_path: Path) -> None:
    def plan(name: str, model: str) -> bytes:
        api.plan_file(spec(model), CLUSTER).save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    first = plan("first.json", "mlp.py:tiny")
    other = plan("other.json", "vgg19.py:tiny")
    assert plan("again.json", "mlp.py:tiny") == first != other
