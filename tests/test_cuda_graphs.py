"""Steps that run as CUDA graphs compute the same as eager ones, with collectives and dropout."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hap
from hap.cli import commands
from hap.errors import HapError, InputError, PlanError
from hap.ir.batch import each, flatten
from hap.ir.half_gradients import with_half_gradients
from hap.plan_simulation import without_hosts
from hap.runtime.batch_entries import entry
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.compiled import BACKENDS, runnable
from hap.runtime.context import Context
from hap.runtime.cuda_graphs import Captured, CudaGraphs, check_graphs
from hap.runtime.draws_first import DrawsFirst
from hap.runtime.emulate import EmulatedComm, EmulatedWorld
from hap.runtime.hap_module import HapModule, emit
from hap.runtime.launch import leave_group, rank_device, spawn
from hap.runtime.shared_gpu import SharedGpus
from tests.random_plans import Case, benchmark_case, call, make_case, random_plan
from tests.random_stages import random_staged_plan
from tests.test_compiled import one_rank

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STEPS = 5


def module_on(case: Case, plan: hap.Plan, backend: str, comm: Comm | None = None) -> HapModule:
    model = copy.deepcopy(case.model)
    device = rank_device() if comm else CUDA
    return HapModule(plan, model, comm or LocalComm(), device, seed=3, backend=backend)


def trained(
    module: HapModule, case: Case, batch: Any, *, clear: Collection[int] = range(STEPS),
    set_to_none: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the losses and the parameters of some steps.

    Args:
        clear: the steps that begin with ``zero_grad``.
    """
    optimizer = case.optimizer(module.parameters())
    losses = []
    for step in range(STEPS):
        if step in clear:
            optimizer.zero_grad(set_to_none)
        loss = call(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | dict(module.state_dict())


def assert_alike(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Sums by atomic additions, as in an embedding's backward, differ from run to run."""
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


# --- without a GPU -------------------------------------------------------------------------


def test_a_cpu_is_refused() -> None:
    case = benchmark_case("mlp", "tiny")
    with pytest.raises(InputError, match="not on cpu") as error:
        HapModule(one_rank(case), case.model, LocalComm(), CPU, backend="cudagraphs")
    assert "inductor" in error.value.hint


def test_what_cannot_be_captured_is_refused() -> None:
    case = benchmark_case("mlp", "tiny")
    staged = random_staged_plan(case, (1, 1), 0)
    with pytest.raises(PlanError, match="pipelines"):
        check_graphs(staged, LocalComm())
    with pytest.raises(PlanError, match="pipelines"):
        without_hosts(staged)
    fed = with_half_gradients(case.graph, "bf16-gradients-with-feedback")
    fed_case = make_case(case.model, case.batch, case.loss, case.optimizer, fed)
    with pytest.raises(PlanError, match="gradients"):
        check_graphs(random_plan(fed_case, 2, 0), LocalComm())
    emulated = EmulatedComm(EmulatedWorld(1), 0)
    with pytest.raises(InputError, match="emulated") as error:
        check_graphs(one_rank(case), emulated)
    assert "--processes" in error.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("mlp", "cudagraphs"), ("bert", "cudagraphs"),
        pytest.param("mlp", "inductor-cudagraphs", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_draws_and_constants_come_first(file: str, backend: str) -> None:
    """Random numbers and constants are made before the rest runs, and are the same."""
    case = benchmark_case(file, "tiny_dropout")
    plan = one_rank(case)
    results = []
    for name in ("eager", backend):
        code = runnable(emit(plan, 0, CPU), name, CPU)
        ctx = Context(LocalComm(), seed=3)
        module = HapModule(plan, copy.deepcopy(case.model), LocalComm(), CPU)
        batch = plan.local_batch(case.batch, 0)
        call(module, batch)
        state = module._state()
        inputs = [
            entry(plan, 0, target, flatten(batch)[target], tensor)
            if role == "input"
            else state[target]
            for role, target, tensor in module._order
        ]
        with torch.no_grad():
            loss, *rest = code.forward(ctx, inputs)
            saved = rest[len(code.buffers) :]
            gradients = code.backward(ctx, [*saved, torch.ones_like(loss)])
        results.append([loss, *gradients])
        if name == backend:
            assert isinstance(code.forward, DrawsFirst)
            assert code.forward.draws
    for want, found in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)


def test_graphs_are_destroyed_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for ever for graphs that use its communicators."""
    graphs = CudaGraphs(mock.Mock(), Context(LocalComm()), [])
    graphs._forward = graphs._backward = mock.Mock()
    left: list[Captured | None] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(graphs._forward))
    leave_group()
    assert left == [None]
    assert graphs._backward is None


def test_the_backends_of_the_command_are_those_of_the_runtime() -> None:
    (option,) = [p for p in commands.run.params if p.name == "backend"]
    assert tuple(option.type.choices) == BACKENDS


# --- CUDA ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("file", "build"),
    [("mlp", "tiny_dropout"), ("bert", "tiny_dropout"), ("gpt2", "tiny"), ("bert_moe", "tiny"),
     ("vgg19", "tiny"), ("t5", "tiny")],
)  # fmt: skip
def test_steps_are_those_of_eager_ranks(file: str, build: str) -> None:
    case = benchmark_case(file, build)
    plan = one_rank(case)
    eager, graphs = (
        trained(module_on(case, plan, b), case, case.batch) for b in ("eager", "cudagraphs")
    )
    assert_alike(graphs, eager)


@pytest.mark.gpu
def test_compiled_steps_are_those_of_eager_ranks() -> None:
    case = benchmark_case("mlp", "tiny_dropout")
    plan = one_rank(case)
    eager, graphs = (
        trained(module_on(case, plan, b), case, case.batch)
        for b in ("eager", "inductor-cudagraphs")
    )
    assert_alike(graphs, eager)


def _times(factor: float, _: str, x: Tensor) -> Tensor:
    return x * factor if x.is_floating_point() else x


@pytest.mark.gpu
def test_another_batch_is_read() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = one_rank(case)
    eager, graphs = (module_on(case, plan, backend) for backend in ("eager", "cudagraphs"))
    for factor in (1.0, 2.0, 3.0, 0.5):
        batch = each(case.batch, partial(_times, factor))
        torch.testing.assert_close(call(graphs, batch), call(eager, batch))


@pytest.mark.gpu
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate(set_to_none: bool) -> None:
    case = benchmark_case("mlp", "tiny")
    plan = one_rank(case)
    eager, graphs = (
        trained(module_on(case, plan, b), case, case.batch, clear=[3], set_to_none=set_to_none)
        for b in ("eager", "cudagraphs")
    )
    assert_alike(graphs, eager)


class Twice(nn.Module):
    """Two parameters with the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b) @ x).square().sum()


@pytest.mark.gpu
def test_gradients_share_no_memory() -> None:
    model, x = Twice(), torch.randn(8, 8)
    module = HapModule(
        hap.plan(model, (x,), "local:1"), model, LocalComm(), CUDA, backend="cudagraphs"
    )
    for _ in range(3):
        module.zero_grad()
        module(x).backward()
        first, second = (p.grad for p in module.parameters())
        assert first is not None and second is not None
        first.zero_()
        assert second.abs().sum() > 0


@pytest.mark.gpu
def test_evaluation_between_steps() -> None:
    case = benchmark_case("mlp", "tiny_dropout")
    module = module_on(case, one_rank(case), "cudagraphs")
    for _ in range(3):
        call(module, case.batch).backward()
        module.eval()
        with torch.no_grad():
            assert call(module, case.batch) == call(module, case.batch)
        module.train()


@pytest.mark.gpu
def test_parameters_that_move_are_captured_again() -> None:
    case = benchmark_case("mlp", "tiny")
    module = module_on(case, one_rank(case), "cudagraphs")
    for _ in range(3):
        before = call(module, case.batch)
        before.backward()
    module.zero_grad()
    for parameter in module.parameters():
        parameter.data = parameter.data * 2
    eager = module_on(case, one_rank(case), "eager")
    eager.load_full_state_dict(module.full_state_dict())
    torch.testing.assert_close(call(module, case.batch), call(eager, case.batch))


@pytest.mark.gpu
def test_a_second_backward_is_refused() -> None:
    case = benchmark_case("mlp", "tiny")
    module = module_on(case, one_rank(case), "cudagraphs")
    call(module, case.batch).backward()
    first = call(module, case.batch)
    second = call(module, case.batch)
    second.backward()
    with pytest.raises(PlanError, match="one backward"):
        first.backward()
    third = call(module, case.batch)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        third.backward()


@pytest.mark.gpu
def test_a_step_that_waits_on_the_host_is_refused() -> None:
    function: Any = DrawsFirst.__new__(DrawsFirst)
    function.draws, function.constants = [], []
    function.run = lambda ctx, args: [args.pop() * args[0].item()]
    x = torch.ones(3, device=CUDA)
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(HapError, match="cannot be captured"):
        Captured(function, Context(LocalComm()), [x.sum(), x], [], pool, separate=False)


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["mlp", "bert"])
def test_collectives_are_captured(file: str) -> None:
    """Two NCCL ranks with uneven shares of a random plan."""
    case = benchmark_case(file, "tiny")
    plan = random_plan(case, 2, 5, least=1)
    for seen in spawn(_ranks, 2, args=(file, plan.to_json()), backend="nccl", where=SharedGpus()):
        assert_alike(seen["cudagraphs"], seen["eager"])


def _ranks(file: str, data: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    case, plan, comm = benchmark_case(file, "tiny"), hap.Plan.from_json(data), ProcessGroupComm()
    batch = plan.local_batch(case.batch, comm.rank)
    return {
        b: {
            name: tensor.cpu()
            for name, tensor in trained(module_on(case, plan, b, comm), case, batch).items()
        }
        for b in ("eager", "cudagraphs")
    }
