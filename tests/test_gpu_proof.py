"""The proof on a GPU runs on CPUs where there is none, so that its code stays tested."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu_proof import (
    kernels,
    models,
    prepare,
    profiled,
    recorded,
    suite,
    user_commands,
    verification,
)
from benchmarks.gpu_proof.__main__ import PARTS, main
from benchmarks.gpu_proof.collectives import shards
from benchmarks.gpu_proof.models import Prepared, Single
from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line, page
from benchmarks.gpu_proof.settings import Settings
from benchmarks.models import wide_mlp
from hap.capture.user_optimizer import default_optimizer
from hap.cli import commands, profiling
from hap.cluster.cluster_file import load_cluster
from hap.ir.linear_layers import LINEAR, MATMUL, TENSORDOT
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan, without_hosts
from hap.runtime.launch import spawn
from tests.random_plans import benchmark_case, random_plan
from tests.short_profile import shortly

SINGLE = Single(
    name="bert-tiny", model=wide_mlp.tiny, batch=wide_mlp.tiny_batch, optimizer=default_optimizer
)
"""A model of a few operators in place of BERT: parts on one rank run the same code for any model."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of plans that ``--prepare`` made, of the smallest models."""
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "TINY_SINGLES", (SINGLE,))
        main(["--prepare", str(folder), "--tiny", "--families", "mlp", "--ranks", "2"])
    return folder


def in_this_process(
    words: list[str], cwd: Path | None = None, **_: object
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m hap.cli``, as ``subprocess.run`` does, without importing torch once more."""
    assert words[:3] == [sys.executable, "-m", "hap.cli"]
    with contextlib.chdir(cwd or Path.cwd()):
        result = CliRunner().invoke(commands.main, words[3:])
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)


def spawn_shortly(measure: Callable[..., None], *, args: tuple[Any, ...], **options: Any) -> Any:
    return spawn(shortly, args=(measure, *args), **options)


SUITE = """
import pytest

@pytest.mark.gpu
def test_passes():
    pass

@pytest.mark.gpu
def test_is_skipped():
    pytest.skip("no CUDA device")

@pytest.mark.gpu
def test_fails():
    raise AssertionError

@pytest.mark.gpu
def test_has_no_fixture(missing):
    pass

def test_is_of_another_mark():
    raise AssertionError
"""


@pytest.mark.slow
def test_tests_with_the_mark_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(SUITE)
    (tmp_path / "tests" / "test_none.py").write_text("raise ImportError\n")  # has no such test
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they import torch
    settings = Settings(ranks=2, device=torch.device("cpu"), folder=tmp_path)
    found = {line.claim.partition("::")[2]: line for line in suite.run(settings)}
    assert {name: line.outcome for name, line in found.items()} == {
        "test_passes": MET, "test_is_skipped": SKIPPED, "test_fails": MISSED,
        "test_has_no_fixture": MISSED,
    }  # fmt: skip
    assert found["test_is_skipped"].reason == "no CUDA device"
    assert found["test_fails"].reason == f"see {tmp_path / 'suite.log'}"
    (tmp_path / "tests" / "test_some.py").write_text("raise ImportError  # mark.gpu\n")
    (line,) = suite.run(settings)
    assert line.outcome == MISSED
    assert "ImportError" in line.reason


@pytest.mark.slow
@pytest.mark.gloo
def test_every_part_runs_without_a_gpu(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: run python -m benchmarks.gpu_proof itself")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        SUITE.partition("@pytest.mark.gpu\ndef test_f")[0]
    )
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they import torch
    monkeypatch.setattr(models, "TINY_SINGLES", (SINGLE,))
    for module in (profiled, user_commands):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=in_this_process))
    monkeypatch.setattr(profiling, "spawn", spawn_shortly)
    out = tmp_path / "proof.json"
    main(["--plans", str(prepared), "--ranks", "2", "--out", str(out)])
    assert "no CUDA device" in capsys.readouterr().out
    lines = [Line(**line) for line in json.loads(out.read_text())["lines"]]
    assert not [line for line in lines if line.outcome == MISSED]
    assert all(line.reason for line in lines if line.outcome == SKIPPED)
    met = {line.part for line in lines if line.outcome == MET}
    assert met == {
        "collectives", "verification", "commands", "suite", "one rank", "profile", "overlap"
    }  # fmt: skip
    assert out.with_suffix(".md").read_text().count("\n| ") == len(lines) + len(PARTS)


def test_a_part_that_raises_is_a_missed_line_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(settings: object) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr("benchmarks.gpu_proof.collectives.run", broken)
    out = tmp_path / "proof.json"
    with pytest.raises(SystemExit) as ended:
        main(["--plans", str(tmp_path), "--only", "collectives", "--out", str(out)])
    assert ended.value.code == 1
    (line,) = json.loads(out.read_text())["lines"]
    assert line["outcome"] == MISSED
    assert "the driver is gone" in line["reason"]


@pytest.mark.slow
@pytest.mark.gloo
def test_verification_goes_on_after_a_plan_that_fails(tmp_path: Path) -> None:
    plan = random_plan(benchmark_case("mlp", "tiny"), 2, 1)
    jobs = {
        verification.Job(f"random-{name}", "float64"): Prepared(family=family, plan=plan)
        for name, family in (("first", "mlp"), ("broken", "vgg19"), ("last", "mlp"))
    }
    settings = Settings(ranks=2, device=torch.device("cpu"), folder=tmp_path)
    found, failures = verification._observed_by_all(settings, jobs)
    first, broken, last = jobs
    assert set(found) == {first, last}
    assert all(len(ranks) == 2 for ranks in found.values())
    assert set(failures) == {broken}
    assert "rank" in failures[broken]


@pytest.mark.parametrize("given", [True, False])
def test_without_prepared_plans_parts_skip_and_say_why(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, bool]] = []

    def none(folder: Path, ranks: int, *, tiny: bool, **_: object) -> None:
        made.append((ranks, tiny))

    monkeypatch.setattr(prepare, "prepare", none)
    out = tmp_path / "proof.json"
    plans = ["--plans", str(tmp_path)] if given else ["--ranks", "3"]
    main([*plans, "--only", "one-rank", "--out", str(out)])
    assert made == ([] if given else [(3, not torch.cuda.is_available())])
    lines = json.loads(out.read_text())["lines"]
    assert lines
    assert {line["outcome"] for line in lines} == {SKIPPED}
    assert all("--prepare" in line["reason"] for line in lines)


@pytest.mark.slow
def test_recorded_steps_are_compared_with_what_is_predicted_now(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan = Plan.load(prepared / "single-bert-tiny-float32.json")
    steps = tmp_path / "steps.json"
    step = {"model": "bert-tiny", "precision": "float32", "plain_ms": 4.0}
    step |= {"planned_over_plain": 1.5, "peak_gib": recorded.peak_bytes(plan) / 2**30 / 1.25}
    h100 = load_cluster(str(recorded.BENCHMARKS / "clusters" / "h100.yaml"))
    assert h100.devices[0].host_s > 0
    unhosted = without_hosts(replace(plan, cluster=h100))
    assert unhosted.cluster.devices[0].host_s == 0
    step["graphs_ms"] = simulate_plan(unhosted).run.step_s * 1e3 / 1.5
    steps.write_text(json.dumps({"steps": [step]}))
    monkeypatch.setattr(recorded, "STEPS", {"H200": steps, "H100": steps})
    monkeypatch.setattr(sys, "argv", ["recorded", str(prepared)])
    capsys.readouterr()
    recorded.main()
    shown = capsys.readouterr().out
    assert shown.count("bert-tiny fp32") == 2
    assert "profile of CUDA graphs: median 50.0% off, worst 50.0%" in shown
    assert "peak memory: median 25.0% off, worst 25.0%" in shown


def test_recorded_steps_need_their_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recorded", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        recorded.main()
    assert ended.value.code == 2


def test_shards_are_uneven_and_empty() -> None:
    for world in range(1, 9):
        assert all(len(sizes) == world and sum(sizes) > 0 for sizes in shards(world))
    assert any(0 in sizes for sizes in shards(2))
    assert any(len(set(sizes)) == 4 for sizes in shards(4))


def test_the_page_counts_outcomes_and_keeps_a_row_on_one_line() -> None:
    lines = [
        Line(part="a", claim="x", outcome=MET, seen="1"),
        Line(part="b", claim="y", outcome=MISSED, reason="two\nlines | here"),
    ]
    text = page({"device": "cpu"}, "2026-01-01", lines, {"More": "text"})
    assert "1 met, 1 missed, 0 skipped." in text
    assert "| y | missed |  |  | two lines / here |" in text
    assert "## More" in text


def test_linear_layers_are_compared_with_the_products_that_were_recorded() -> None:
    recorded = json.loads(
        (Path(kernels.__file__).parents[1] / "data/h200_kernels.json").read_text()
    )["gpt2-float32"]
    rows, weight, bias = (32, 128, 768), (3072, 768), (3072,)
    made = (32, 128, 3072)
    for op, *shapes in (
        (LINEAR, rows, weight, bias), (MATMUL, made, weight), (LINEAR, made, (768, 3072)),
        (TENSORDOT, made, rows),
    ):  # fmt: skip
        kind, matrices = kernels.product_of(op, *shapes)
        assert " ".join([kind, *("x".join(map(str, s)) for s in matrices)]) in recorded
