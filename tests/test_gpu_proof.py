"""The proof on a GPU runs on CPUs where there is none, so that its code stays tested."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_proof import kernels, recorded, verification
from benchmarks.gpu_proof.__main__ import PARTS, main
from benchmarks.gpu_proof.collectives import shards
from benchmarks.gpu_proof.models import Prepared
from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line, page
from benchmarks.gpu_proof.settings import Settings
from hap.cluster.cluster_file import load_cluster
from hap.ir.linear_layers import LINEAR, MATMUL, TENSORDOT
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan, without_hosts
from tests.random_plans import benchmark_case, random_plan

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.gloo
def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: run python -m benchmarks.gpu_proof itself")
    out = tmp_path / "proof.json"
    words = [sys.executable, "-m", "benchmarks.gpu_proof", "--ranks", "2", "--out", str(out)]
    words += ["--families", "mlp", "--models", "bert-tiny"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    lines = [Line(**line) for line in json.loads(out.read_text())["lines"]]
    assert not [line for line in lines if line.outcome == MISSED]
    assert all(line.reason for line in lines if line.outcome == SKIPPED)
    for part in ("collectives", "verification", "commands", "one rank", "profile", "overlap"):
        assert [line for line in lines if line.part == part and line.outcome == MET], part
    assert [line for line in lines if line.part == "suite"], "the tests marked gpu were collected"
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


def test_without_prepared_plans_parts_skip_and_say_why(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    main(["--plans", str(tmp_path), "--only", "one-rank", "--out", str(out)])
    lines = json.loads(out.read_text())["lines"]
    assert lines
    assert {line["outcome"] for line in lines} == {SKIPPED}
    assert all("--prepare" in line["reason"] for line in lines)


@pytest.mark.slow
def test_recorded_steps_are_compared_with_what_is_predicted_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--prepare", str(tmp_path), "--tiny", "--families", "mlp", "--ranks", "1"])
    plan = Plan.load(tmp_path / "single-bert-tiny-float32.json")
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
    monkeypatch.setattr(sys, "argv", ["recorded", str(tmp_path)])
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
