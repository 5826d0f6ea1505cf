"""The same inputs give the same plan, byte for byte, for every hash seed and in every run.

Ranks on many machines may each plan for themselves and must find the same program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hap import api
from hap.ir.placement import R
from hap.ir.plan import Plan

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CLUSTER = str(BENCHMARKS / "clusters" / "unlike8.yaml")
SEEDS = ("0", "4294967295")

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


def in_process(folder: Path, seed: str, *models: str) -> tuple[str, list[bytes]]:
    """Return stdout of ``hap plan`` and the plan files, from a process with this hash seed."""
    folder.mkdir()
    words = [sys.executable, "-c", PROGRAM, CLUSTER, *map(spec, models)]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, [path.read_bytes() for path in sorted(folder.glob("plan*.json"))]


@pytest.mark.slow
def test_plans_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    models = ("bert.py:tiny", "mlp.py:model")  # the second stores parameters in shards
    runs = [in_process(tmp_path / seed, seed, *models) for seed in SEEDS]
    assert len(runs[0][1]) == len(models)
    plans = [Plan.load(tmp_path / SEEDS[0] / f"plan{k}.json") for k in range(len(models))]
    stored = [plan.program.inputs[i.tensor] for plan in plans for i in plan.graph.role("parameter")]
    assert any(p != R for p in stored), "no parameter is split: the test shows too little"
    for seed, (screen, files) in zip(SEEDS[1:], runs[1:], strict=True):
        assert screen == runs[0][0], f"another screen with PYTHONHASHSEED={seed}"
        assert files == runs[0][1], f"another plan with PYTHONHASHSEED={seed}"


@pytest.mark.slow
def test_planning_leaves_nothing_behind_that_changes_the_next_plan(tmp_path: Path) -> None:
    def plan(name: str, model: str) -> bytes:
        api.plan_file(spec(model), CLUSTER).save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    first = plan("first.json", "mlp.py:tiny")
    other = plan("other.json", "vgg19.py:tiny")
    assert plan("again.json", "mlp.py:tiny") == first != other
