"""Training by plans with stages: clipping, evaluation, loss scaling, batches without microbatches."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.capture.tracing import capture
from hap.errors import HapError
from hap.ir.batch import call
from hap.ir.plan import Plan
from hap.run_log import RankFigures
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.run_logger import RunLogger
from hap.runtime.shards import gather
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_search import StageSearch
from tests.random_plans import Case, benchmark_case, make_case, random_plan, two_machines, verdict
from tests.random_stages import random_staged_plan

CPU = torch.device("cpu")


def whole_gradients(plan: Plan, module: HapModule, comm: Comm) -> dict[str, Tensor]:
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
    return {
        name: gather(plan, tensors[name], p.grad, module._comms, comm.rank)
        for name, p in module.named_parameters() if p.grad is not None and name in tensors
    }  # fmt: skip


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_uses_the_norm_of_all_stages(max_norm: float) -> None:
    case = benchmark_case("gpt2", "tiny")  # with a tied embedding
    plan = random_staged_plan(case, (2, 1, 1), 2)

    def act(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        module = HapModule(plan, case.model, comm, CPU)
        call(module, plan.local_batch(case.batch, comm.rank)).backward()
        norm = hap.clip_grad_norm_(module, max_norm)
        return norm.item(), whole_gradients(plan, module, comm)

    reference = copy.deepcopy(case.model)
    case.loss_of(reference).backward()
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm).item()
    for norm, found in run_ranks(plan.world_size, act):
        assert norm == pytest.approx(want, rel=1e-4)
        for name, grad in found.items():
            true = reference.get_parameter(name).grad
            torch.testing.assert_close(grad, true, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_evaluation_switches_dropout_off() -> None:
    case = benchmark_case("bert", "tiny_dropout")
    plan = random_staged_plan(case, (1, 2), 1)

    def act(comm: Comm) -> list[float]:
        module = HapModule(plan, case.model, comm, CPU).eval()
        batch = plan.local_batch(case.batch, comm.rank)
        with torch.no_grad():
            return [call(module, batch).item() for _ in range(2)]

    model = copy.deepcopy(case.model).eval()
    with torch.no_grad():
        expected = case.loss_of(model).item()
    for losses in run_ranks(plan.world_size, act):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


class Faint(nn.Module):
    """A model whose gradients are below the range of float16."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean() * 1e-7


def faint() -> Case:
    torch.manual_seed(0)
    model, batch = Faint(), (torch.randn(8, 6),)
    return make_case(model, batch, graph=capture(model, batch, autocast="float16"))


def test_gradients_in_float16_are_scaled_as_on_one_device() -> None:
    case = faint()
    plan = random_staged_plan(case, (1, 1), 3)
    reference = copy.deepcopy(case.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with torch.autocast("cpu", torch.float16):
        loss = reference(*case.batch)
    scaler.scale(loss).backward()

    def act(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module = HapModule(plan, case.model, comm, CPU)
        batch = plan.local_batch(case.batch, comm.rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (call(module, batch) * 2.0**20).backward()
        lost = whole_gradients(plan, module, comm)
        module.zero_grad()
        own = hap.GradScaler(module, init_scale=2.0**20)
        own.scale(call(module, batch)).backward()
        return lost, whole_gradients(plan, module, comm)

    for lost, found in run_ranks(plan.world_size, act):
        for name, parameter in reference.named_parameters():
            true = parameter.grad
            assert true is not None
            assert (found[name] - true).norm() < 0.05 * true.norm(), name
        first = reference.get_parameter("layers.0.weight").grad
        assert first is not None
        assert (lost["layers.0.weight"] - first).norm() > 0.2 * first.norm()


def test_float16_without_a_scaler_warns() -> None:
    case = faint()
    plan = random_staged_plan(case, (1, 1), 3)

    def act(comm: Comm) -> None:
        call(HapModule(plan, case.model, comm, CPU), plan.local_batch(case.batch, comm.rank))

    with pytest.warns(UserWarning, match="hap.GradScaler"):
        run_ranks(plan.world_size, act)


@pytest.mark.parametrize(
    ("rows", "counts"), [(7, (2, 3, 4, 6)), (10, (2, 4, 6, 8)), (12, (2, 3, 4, 6, 12)), (64, (2, 4, 8, 16, 32, 64))]
)  # fmt: skip
def test_numbers_of_microbatches_need_not_divide_the_batch(
    rows: int, counts: tuple[int, ...]
) -> None:
    case = make_case(Faint(), (torch.randn(rows, 6),))
    assert StageSearch(case.space, two_machines(2), 2).estimates.counts == counts


def test_a_pipeline_of_unequal_microbatches_is_searched() -> None:
    torch.manual_seed(0)
    case = make_case(Faint(), (torch.randn(7, 6),))
    search = StageSearch(case.space, two_machines(3), 2)
    sketch = Sketch(
        groups=((0, 1), (2,)), cuts=search.estimates.even_cuts(2), microbatches=3,
        estimate_s=0.0, least_s=0.0,
    )  # fmt: skip
    made = search.pipeline(sketch)
    assert made is not None
    plan = replace(
        random_plan(case, 3, 0), program=made.over_time.program,
        shares=made.over_time.shares(3) or {}, idle=(), stages=made.stages,
    )  # fmt: skip
    assert set(plan.shares.values()) == {(3, 2, 2)}
    assert verdict(case, plan).ok
    assert Plan.from_json(plan.to_json()) == plan


def test_one_row_has_no_microbatches() -> None:
    case = make_case(Faint(), (torch.randn(1, 6),))
    with pytest.raises(HapError, match="no common batch dim"):
        StageSearch(case.space, two_machines(2), 2)


def test_waiting_for_another_stage_is_no_computing() -> None:
    """Neither stage has collectives: each waits for what the other sends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    case = make_case(model, torch.randn(8, 16), lambda out, x: out.square().mean())
    plan, seconds = random_staged_plan(case, (1, 1), 0, 4, ("tanh",)), 100.0

    def act(comm: Comm) -> list[RankFigures]:
        module = HapModule(plan, case.model, comm, CPU)
        log, batch = RunLogger("", module), plan.local_batch(case.batch, comm.rank)
        found = []
        for step in range(2):
            call(module, batch).backward()
            found += log.step(step + 1, 0.0, seconds)
        return found

    for figures in (figures for rank in run_ranks(2, act) for figures in rank):
        assert figures.waiting_s and figures.computing_s
        assert figures.computing_s + figures.waiting_s == pytest.approx(seconds)
