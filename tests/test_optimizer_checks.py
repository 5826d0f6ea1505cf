"""Optimizers that don't train a planned module as one device would, and those that do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hap
from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.optim import Lamb, Lars, tensor_norms
from hap.runtime import optimizer_checks
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from tests.random_plans import Case, make_case, random_plan


class Lion(optim.Optimizer):
    """An elementwise optimizer that torch lacks."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * p.grad.sign())


class Normed(Lion):
    """Steps of one length for each tensor, whether that is whole or not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-6))


class NormedByRanks(Lion):
    """As :class:`Normed`, by norms of whole tensors."""

    whole_norms = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        for p, grad, norm in zip(params, grads, tensor_norms(params, grads), strict=True):
            p.sub_(self.param_groups[0]["lr"] * grad / (norm + 1e-6))


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@cache
def case() -> Case:
    torch.manual_seed(0)
    return make_case(nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6)), torch.randn(8, 6), loss_of)


@cache
def plan() -> Plan:
    """Return a plan that cuts both matrices; one rank has no elements of the first."""
    return random_plan(case(), 3, 1)


def test_the_plan_cuts_matrices() -> None:
    shapes = [[plan().local_shape(t, r) for r in range(3)] for t in ("primals_1", "primals_3")]
    elements = [[a * b for a, b in shape] for shape in shapes]
    assert elements == [[48, 24, 0], [36, 24, 12]]


def on_ranks(act: Callable[[nn.Module, nn.Module, Callable[[], Tensor]], Any]) -> list[Any]:
    """Run ``act(whole model, planned module, backward)`` on emulated ranks."""

    def run(comm: Comm) -> Any:
        model = copy.deepcopy(case().model)
        module = hap.compile(model, plan(), comm=comm, device=torch.device("cpu"), check=False)

        def backward() -> Tensor:
            loss: Tensor = module(plan().local_batch(case().batch, comm.rank))
            loss.backward()
            return loss

        return act(model, module, backward)

    return run_ranks(plan().world_size, run)


def refused(step: Callable[[], Any], what: str, hint: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        step()
    assert hint in error.value.hint


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_of_the_whole_model_is_refused(named: bool) -> None:
    def run(comm: Comm) -> None:
        model = copy.deepcopy(case().model)
        optimizer = optim.AdamW(model.named_parameters() if named else model.parameters())
        for _ in range(2):  # it trains the model before, which stays allowed
            case().loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        module = hap.compile(model, plan(), comm=comm, device=torch.device("cpu"), check=False)
        optimizer.step()  # without any gradient
        module(plan().local_batch(case().batch, comm.rank)).backward()
        refused(optimizer.step, "the model that was given to hap.compile", "after hap.compile")

    run_ranks(plan().world_size, run)


def test_the_whole_model_may_be_trained_beside_its_shards() -> None:
    def act(model: nn.Module, module: nn.Module, backward: Callable[[], Tensor]) -> None:
        own, others = optim.SGD(module.parameters(), lr=0.1), optim.SGD(model.parameters(), lr=0.1)
        second = nn.Linear(6, 1)
        critic = optim.Adam(second.parameters())
        for accumulates in (True, False, False):
            backward()
            case().loss_of(model).backward()
            second(case().batch).mean().backward()
            if accumulates:
                continue
            for optimizer in (own, others, critic):
                optimizer.step()
                optimizer.zero_grad()
            others.step()  # once more, without gradients
        assert not torch.equal(model[0].weight, case().model[0].weight)

    on_ranks(act)


def warming_up(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return the optimizer, whose rate is 0 in its first step."""
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    return optimizer


ALLOWED: dict[str, Callable[[Any], optim.Optimizer]] = {
    **{
        kind.__name__: (lambda params, kind=kind: kind(params, lr=1e-2))
        for kind in sorted(
            optimizer_checks.ELEMENTWISE - {optim.SparseAdam}, key=lambda k: k.__name__
        )
    },
    "fused": lambda params: optim.AdamW(params, fused=True),
    "foreach": lambda params: optim.Adam(params, foreach=True),
    "groups": lambda params: optim.SGD([{"params": [p], "lr": 0.1} for p in params]),
    "Lamb": lambda params: Lamb(params),
    "Lars": lambda params: Lars(params, lr=0.1),
    "Lion": lambda params: Lion(params, lr=0.1),
    "warm-up": lambda params: warming_up(Lion(params, lr=0.1)),
    "norms of whole tensors": lambda params: NormedByRanks(params, lr=0.1),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_optimizers_that_train_shards_like_the_whole_are_allowed(name: str) -> None:
    def act(model: nn.Module, module: nn.Module, backward: Callable[[], Tensor]) -> None:
        optimizer = ALLOWED[name](module.parameters())
        scaler: Any = hap.GradScaler(module, init_scale=1.0)
        for _ in range(2):
            scaler.scale(backward())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer_checks._checked[optimizer] == len(optimizer.param_groups)

    on_ranks(act)


READ_WHOLE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adafactor": lambda params: optim.Adafactor(params),
    "Muon": lambda params: optim.Muon([p for p in params if p.dim() == 2]),
    "LBFGS": lambda params: optim.LBFGS(params),
    "Normed": lambda params: warming_up(Normed(params, lr=0.1)),
}


@pytest.mark.parametrize("name", READ_WHOLE)
def test_an_optimizer_that_reads_whole_parameters_is_refused(name: str) -> None:
    def act(model: nn.Module, module: nn.Module, backward: Callable[[], Tensor]) -> None:
        optimizer = READ_WHOLE[name](module.parameters())
        before = [p.detach().clone() for p in module.parameters()]
        backward()
        step: Any = (lambda: optimizer.step(backward)) if name == "LBFGS" else optimizer.step
        refused(step, f"{name} reads whole parameters.*for AdamW", "optimizer=")
        assert all(map(torch.equal, module.parameters(), before))

    on_ranks(act)


def test_an_optimizer_that_the_plan_is_for_is_allowed() -> None:
    kind = replace(plan().optimizer, name="Normed")

    def run(comm: Comm) -> None:
        model, other = copy.deepcopy(case().model), replace(plan(), optimizer=kind)
        module = hap.compile(model, other, comm=comm, device=torch.device("cpu"), check=False)
        module(other.local_batch(case().batch, comm.rank)).backward()
        Normed(module.parameters(), lr=0.1).step()

    run_ranks(plan().world_size, run)
