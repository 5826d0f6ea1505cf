"""Gradients reduced in half precision: chosen when allowed and faster, and right but for rounding."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.api import model_file_of, plan_file
from hap.capture import tracing
from hap.capture.tracing import capture
from hap.errors import InputError, PlanError
from hap.gradient_roundings import EXACT
from hap.ir.graph import Graph
from hap.ir.half_gradients import ROUNDINGS, with_half_gradients
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm, LocalComm
from hap.runtime.context import Context
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.shards import join
from tests.random_plans import Case, benchmark_case, make_case, random_plan, verdict

CPU = torch.device("cpu")
BF16 = "bf16-gradients"
CLUSTER = """
links: {{between: {{bandwidth: {rate}, latency: 1 us}}}}
nodes:
  - {{name: n, count: 2, gpus: 1, type: cpu, memory: 4 GiB, flops: 50 GFLOP/s, memory_bandwidth: 10 GB/s, launch: 1 us}}
"""
MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))

def batch():
    return torch.randn(8192, 64)

def loss(output, batch):
    return output.square().mean()
"""


def rounded(case: Case, name: str) -> Case:
    graph = with_half_gradients(case.graph, name)
    return make_case(case.model, case.batch, case.loss, case.optimizer, graph)


def planned(folder: Path, rate: str, **options: Any) -> Plan:
    (folder / "cluster.yaml").write_text(CLUSTER.format(rate=rate))
    (folder / "model.py").write_text(MODEL)
    chosen = hap.PlanOptions(all_devices=True, mesh=False, **options)
    return plan_file(str(folder / "model.py"), folder / "cluster.yaml", options=chosen)


def reduced(plan: Plan) -> set[str]:
    """Return the dtypes in which large tensors are reduced."""
    tensors = (plan.graph.tensors[c.tensor] for c in plan.program.collectives)
    return {t.dtype for t in tensors if t.numel > 100}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_every_gradient_is_rounded(name: str) -> None:
    case = benchmark_case("bert_moe", "tiny")
    graph = with_half_gradients(case.graph, name)
    for target, tensor in graph.gradients.items():
        was, now = case.graph.tensors[case.graph.gradients[target]], graph.tensors[tensor]
        assert (now.shape, now.dtype) == (was.shape, ROUNDINGS[name].dtype)


def test_gradients_in_half_precision_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to(torch.bfloat16)
    case = make_case(
        model, torch.randn(8, 4, dtype=torch.bfloat16), lambda out, x: out.float().square().mean()
    )
    assert with_half_gradients(case.graph, BF16).digest == case.graph.digest


@pytest.mark.slow
def test_a_slow_link_makes_the_plan_round_and_a_fast_one_does_not(tmp_path: Path) -> None:
    slow, fast = (planned(tmp_path, rate, allow=(BF16,)) for rate in ("20 MB/s", "80 GB/s"))
    assert (slow.recipe.gradients, fast.recipe.gradients) == (BF16, "")
    assert reduced(slow) == {"bfloat16"}
    assert reduced(planned(tmp_path, "20 MB/s")) == {"float32"}
    exact = next(a for a in slow.prediction.alternatives if a.name == EXACT)
    assert 1.01 * slow.prediction.step_s < exact.step_s < 2.1 * slow.prediction.step_s
    assert next(a for a in fast.prediction.alternatives if a.name == BF16).step_s > 0


def test_a_step_is_captured_once_for_all_roundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[object] = []
    once = tracing.captured
    monkeypatch.setattr(
        tracing, "captured", lambda *given, **named: (captures.append(1), once(*given, **named))[1]
    )
    assert planned(tmp_path, "20 MB/s", allow=(BF16,)).recipe.gradients == BF16
    assert len(captures) == 1


@pytest.mark.slow
def test_a_plan_that_rounds_is_verified_and_compiled(tmp_path: Path) -> None:
    plan = planned(tmp_path, "20 MB/s", allow=("bf16-gradients-with-feedback",))
    assert plan.recipe.gradients == "bf16-gradients-with-feedback"
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    file = model_file_of(loaded)
    assert hap.verify(loaded, file).ok
    assert hap.verify(loaded, file, processes=True, dtype="float32").ok
    words = [sys.executable, "-m", "hap.cli", "run", "plan.json", "--nproc", "2", "--steps", "2"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "loss" in ran.stdout + ran.stderr, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16-gradients", "bf16-gradients-with-feedback"])
@pytest.mark.parametrize(
    ("model", "world", "seed"), [("gpt2", 2, 1), ("bert_moe", 3, 2), ("vgg19", 4, 3)]
)
def test_random_programs_compute_the_same_but_for_rounding(
    name: str, model: str, world: int, seed: int
) -> None:
    case = rounded(benchmark_case(model, "tiny"), name)
    assert verdict(case, random_plan(case, world, seed)).ok


def test_gradients_are_those_of_one_device_to_the_precision_of_bfloat16() -> None:
    exact = benchmark_case("mlp", "tiny")
    case = rounded(exact, BF16)
    plan = next(
        p for p in (random_plan(case, 3, s) for s in range(200)) if "bfloat16" in reduced(p)
    )

    def act(comm: Comm) -> dict[str, Tensor]:
        module = HapModule(plan, case.model, comm, CPU)
        batch = plan.local_batch(case.batch, comm.rank)
        module(batch).backward()
        assert all(p.grad.dtype == torch.float32 for p in module.parameters() if p.grad is not None)
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    twin = copy.deepcopy(case.model)
    case.loss_of(twin).backward()
    ranks = run_ranks(3, act)
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        for whole in join(plan, tensors[name], [seen[name] for seen in ranks]):
            error = (whole - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert 0 < error < 3 * torch.finfo(torch.bfloat16).eps


def test_with_feedback_nothing_is_lost_in_the_long_run() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    context = Context(LocalComm())
    total = sum(context.rounded_with_feedback(x, torch.bfloat16, "a").double() for _ in range(50))
    step = torch.finfo(torch.bfloat16).eps * x.abs().max()
    assert (total - 50 * x.double()).abs().max() <= step  # one rounding, not fifty
    assert (50 * x.bfloat16().double() - 50 * x.double()).abs().max() > 5 * step
    assert torch.equal(context.rounded_with_feedback(x, torch.bfloat16, "b"), x.bfloat16())


class Steep(nn.Module):
    """A loss that overflows in float16 at the first scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh()).float()
        return y.square().mean() * 100


def test_feedback_outlasts_an_overflow_and_changes_of_the_scale() -> None:
    torch.manual_seed(0)
    model, batch = Steep(), (torch.randn(8, 8),)
    graph = capture(model, batch, autocast="float16")

    def losses(graph: Graph) -> list[float]:
        case = make_case(model, batch, graph=graph)
        plan = random_plan(case, 2, 1)

        def act(comm: Comm) -> list[float]:
            module, own = HapModule(plan, model, comm, CPU), plan.local_batch(batch, comm.rank)
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
            scaler = hap.GradScaler(module, init_scale=2.0**24, growth_interval=10)
            found = []
            for _ in range(60):
                optimizer.zero_grad()
                loss = module(*own)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                found.append(loss.item())
            return found

        return run_ranks(2, act)[0]

    fed, plain = losses(with_half_gradients(graph, "bf16-gradients-with-feedback")), losses(graph)
    assert fed[1] == fed[0], "the first step overflows"
    assert fed[-1] < 0.5 * fed[0]
    assert fed[-1] == pytest.approx(plain[-1], rel=0.01)


def test_what_is_lost_is_added_at_the_scale_of_the_step() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    context, total = Context(LocalComm()), torch.zeros(1000, dtype=torch.float64)
    for context.step in range(50):
        scale = 2.0 ** (context.step % 7)
        context.loss_scale = lambda scale=scale: scale
        given = x * scale if context.step % 10 else x * torch.inf  # skipped
        rounded = context.rounded_with_feedback(given, torch.bfloat16, "a").double() / scale
        total += rounded if context.step % 10 else 0
    step = torch.finfo(torch.bfloat16).eps * x.abs().max()
    assert (total - 45 * x.double()).abs().max() <= step


def test_what_cannot_be_rounded_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fp8"):
        planned(tmp_path, "1 GB/s", allow=("fp8",))
    with pytest.raises(InputError, match="stages"):
        planned(tmp_path, "1 GB/s", allow=(BF16,), stages=True)
    plan = random_plan(benchmark_case("mlp", "tiny"), 2, 0)
    data = plan.to_json()
    data["recipe"] = {"gradients": "fp8"}
    with pytest.raises(PlanError, match="gradients is 'fp8'"):
        Plan.from_json(data)
