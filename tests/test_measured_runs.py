"""Measured runs: the file's format, the table's completeness, and figures fitted to operators."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured_runs import PAGE, RUNS, predict_run, scores, table
from benchmarks.operator_calibration import operator_points, refit, ring_rate
from benchmarks.runs_file import read_runs
from benchmarks.transformer_operators import LAYER, Transformer
from hap.cluster.catalogue import catalogue
from hap.cluster.work import Work
from hap.errors import InputError

DATA = json.loads(RUNS.read_text())


def test_every_run_has_a_row_and_the_page_shows_it() -> None:
    file = read_runs(RUNS)
    found = [predict_run(file, run) for run in file.runs]
    lines = table(found)
    assert len([line for line in lines if line.startswith(("| GPT-", "| OPT-"))]) == 26
    assert all(p.seconds > p.gradient_sync_s > -1e-9 and p.peak_bytes > 2.5e9 for p in found)
    assert PAGE.read_text().count("\n| GPT-") + PAGE.read_text().count("\n| OPT-") == 26
    assert all(line in PAGE.read_text() for line in lines)
    assert scores(found)["seconds, mean"] < 0.15


def _tensor_parallel(run: dict[str, Any]) -> None:
    run["stages"][0][0]["tensor_parallel"] = 3


def _gpu(run: dict[str, Any]) -> None:
    run["stages"][0][0]["gpus"][0]["type"] = "GH-97x"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda run: run.pop("microbatch"), "has no `microbatch`"),
        (lambda run: run.update(microbatch=0), "`microbatch` is 0"),
        (lambda run: run.update(microbatch=3), "no multiple"),
        (lambda run: run.update(model="GPT-5"), "`model` is 'GPT-5'"),
        (lambda run: run.update(layers_per_stage=[34]), "4 stages, but 1"),
        (lambda run: run.update(layers_per_stage=[7, 9, 9, 8]), "no sum of 34"),
        (lambda run: run.update(measured_s=-1), "`measured_s` is -1"),
        (lambda run: run.update(recompute="yes"), "`recompute` is 'yes'"),
        (lambda run: run.update(float32_matmul_precision="tf32"), "'tf32'"),
        (lambda run: run["stages"][1].pop(), "replicas"),
        (_tensor_parallel, "4 GPUs, but `tensor_parallel` is 3"),
        (_gpu, "unknown GPU 'GH-97x'"),
    ],
)
def test_a_wrong_run_is_refused_by_name(change: Any, text: str, tmp_path: Path) -> None:
    data = copy.deepcopy(DATA)
    data["runs"] = data["runs"][:1]
    change(data["runs"][0])
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        read_runs(path)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no JSON"), ("[]", "not an object"), ('{"models": {}, "links": []}', "`links`")],
)
def test_a_wrong_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_runs(path)
    assert said in str(error.value)
    with pytest.raises(InputError):
        read_runs(tmp_path / "none.json")


def test_unlike_gpus_are_priced_by_the_slowest(tmp_path: Path) -> None:
    data = copy.deepcopy(DATA)
    data["runs"] = [r for r in data["runs"] if r["name"] == "OPT-350-N2_D1"]
    plain = predict_run(
        file := read_runs(RUNS), next(r for r in file.runs if r.name == "OPT-350-N2_D1")
    )
    data["runs"][0]["stages"][1][0]["gpus"][0]["type"] = "V100-16"
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="no link between"):
        predict_run(mixed := read_runs(path), mixed.runs[0])
    data["links"]["between"].append({"a": "V100-16", "b": "GH-96", "gigabytes_per_s_per_gpu": 5})
    path.write_text(json.dumps(data))
    mixed = read_runs(path)
    assert predict_run(mixed, mixed.runs[0]).seconds > 2 * plain.seconds


def test_the_catalogue_holds_what_the_operators_give() -> None:
    for kind, figures in refit(operator_points()).items():
        known = catalogue()[kind].device
        stored = {**known.flops_per_s, "memory_bandwidth": known.memory_bytes_per_s}
        for figure, value in figures.items():
            assert stored[figure] == pytest.approx(value, rel=2e-3), f"{kind} {figure}"
            assert (
                "measured operators"
                in known.source[
                    "memory_bytes_per_s"
                    if figure == "memory_bandwidth"
                    else f"flops_per_s.{figure}"
                ]
            )
        link = catalogue()[kind].link.bandwidth_bytes_per_s
        assert link == pytest.approx(ring_rate(kind), rel=5e-3)


def test_tf32_makes_an_a100_worth_eight_v100s() -> None:
    a100, v100 = catalogue()["A100-40"].device, catalogue()["V100-16"].device
    product = Work("matmul", "tfloat32", 1e13, 1e9)
    assert 7 < v100.seconds(product) / a100.seconds(product) < 10
    exact = product._replace(dtype="float32")
    assert v100.seconds(exact) / a100.seconds(exact) < 2
    assert v100.seconds(product) == v100.seconds(exact)  # no such units: the float32 rate


def test_tensor_parallel_divides_the_products() -> None:
    sizes = {"hidden": 1024, "ffn": 4096, "heads": 16, "vocabulary": 50272, "sequence": 128}
    whole, part = (
        Transformer(**sizes, batch=2, products="tfloat32", tensor_parallel=t).operators()
        for t in (1, 4)
    )
    for name in LAYER:
        for a, b in zip(whole[name], part[name], strict=True):
            assert sum(w.flops for w in b) == pytest.approx(sum(w.flops for w in a) / 4)
