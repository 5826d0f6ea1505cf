"""``float32_matmul_precision``: in model file, plan and prices; set on GPUs in a step, and restored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.capture.matmul_precision import matmul_precision
from hap.capture.model_file import load_model_file
from hap.cluster.work import PRECISIONS
from hap.errors import InputError, ModelError, PlanError
from hap.ir.plan import Plan
from hap.profiler.probes import probes
from hap.runtime import compiled
from hap.runtime.verify import run_ranks, verify
from hap.synthesizer.cost.operator_work import node_work

GPUS = """
links:
  between: {bandwidth: 12 GB/s, latency: 10 us}
nodes:
  - {name: a, gpus: 1, type: A100-40}
  - {name: b, gpus: 1, type: V100-16}
"""
CPUS = """
nodes:
  - {name: a, gpus: 2, type: cpu}
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def planned(precision: str, cluster: str = GPUS, rows: int = 4096) -> Plan:
    return hap.plan(Net, torch.zeros(rows, 2048), cluster, float32_matmul_precision=precision)


@pytest.mark.slow
def test_high_is_planned_faster_on_gpus_alone() -> None:
    plain, high = planned(""), planned("high")
    assert high.prediction.step_s < 0.7 * plain.prediction.step_s
    assert planned("highest").prediction == plain.prediction
    products = {
        node_work(n, high.graph).dtype for n in high.graph.nodes if ".mm" in n.op or "addmm" in n.op
    }
    assert products == {"tfloat32"}
    assert high.graph.digest == plain.graph.digest


@pytest.mark.slow
def test_a_plan_file_keeps_it_and_prices_as_before() -> None:
    plan = planned("high")
    again = Plan.from_json(plan.to_json())
    assert again.recipe.float32_matmul_precision == "high"
    assert again.graph.products == plan.graph.products == "tfloat32"
    data = planned("").to_json()
    assert Plan.from_json(data).graph.products == "float32"
    data["recipe"]["float32_matmul_precision"] = "tf32"
    with pytest.raises(PlanError, match="float32_matmul_precision is 'tf32'"):
        Plan.from_json(data)


def test_a_cpu_has_no_such_units() -> None:
    plain, high = planned("", CPUS, 64), planned("high", CPUS, 64)
    assert plain.prediction == high.prediction
    assert not any(p.work.dtype == "tfloat32" for p in probes(torch.device("cpu")))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="float32_matmul_precision 'tf32'"):
        planned("tf32")


@pytest.mark.parametrize("precision", [*PRECISIONS, None, "tf32", 3])
def test_a_model_file_states_it(precision: object, tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\ndef model():\n    return nn.Linear(2, 2)\n\n"
        "def batch():\n    return torch.zeros(4, 2)\n\n"
        f"float32_matmul_precision = {precision!r}\n"
    )
    if precision in (*PRECISIONS, None):
        assert load_model_file(str(path)).float32_matmul_precision == (precision or "")
    else:
        with pytest.raises(ModelError, match="float32_matmul_precision"):
            load_model_file(str(path))


def test_the_setting_is_restored_also_after_an_error() -> None:
    cuda, before = torch.device("cuda"), torch.get_float32_matmul_precision()
    for name in PRECISIONS:
        with pytest.raises(KeyError), matmul_precision(name, cuda):
            assert torch.get_float32_matmul_precision() == name
            raise KeyError
        assert torch.get_float32_matmul_precision() == before
    with matmul_precision("medium", torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before


def test_forward_and_backward_run_at_the_plans_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(name: str, device: torch.device) -> object:
        seen.append(name)
        return matmul_precision(name, device)

    monkeypatch.setattr(compiled, "matmul_precision", noted)
    model = nn.Sequential(nn.Linear(8, 8))
    batch = torch.randn(4, 8)

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.square().mean()

    plan = hap.plan(
        model, batch, CPUS.replace("2", "1"), loss=loss, float32_matmul_precision="high"
    )
    hap.compile(model, plan, loss=loss)(batch).backward()
    assert seen == ["high", "high"]
    seen.clear()
    plain = replace(plan, recipe=replace(plan.recipe, float32_matmul_precision=""))
    hap.compile(model, plain, loss=loss)(batch).backward()
    assert seen == ["", ""]


def test_verification_compares_at_the_highest_precision() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.square().mean()

    plan = hap.plan(model, batch, CPUS, loss=loss, float32_matmul_precision="medium")
    seen: list[str] = []

    def run(count: int, observer: Any) -> list[Any]:
        seen.append(observer.plan.recipe.float32_matmul_precision)
        return run_ranks(count, observer)

    optimizer = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731
    assert verify(plan, model, batch, loss, optimizer, dtype="float32", run=run).ok
    assert seen == ["highest"]
