"""Optimizers that don't train a planned module as one device would, and those that do."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hap
from hap.capture.user_optimizer import ELEMENTWISE, examine
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


class NormedByAttribute(optim.Optimizer):
    """As :class:`Normed`, with a rate that is no setting of its groups."""

    def __init__(self, params: Any, rate: float) -> None:
        self.rate = rate
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.rate * p.grad / (p.grad.norm() + 1e-6))


class Sharpness(optim.Optimizer):
    """Sharpness-aware minimization: the gradient at a distance from the parameters, along the whole gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "give a closure"
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        before = [p.clone() for p in params]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.add_(p.grad / norm)
        with torch.enable_grad():
            closure()
        for p, kept in zip(params, before, strict=True):
            p.copy_(kept)
        self.inner.step()


class Noisy(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] * (p.grad + torch.randn_like(p)))


class Single(Lion):
    """Has kernels for float32 alone, so that it can't be tried in float64."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if any(p.dtype == torch.float64 for p in self.param_groups[0]["params"]):
            raise RuntimeError("float32 alone")


class Anchored(Lion):
    """Keeps its parameters twice, and an optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        self.kept = list(params)
        super().__init__(self.kept, lr)
        self.inner = optim.AdamW(self.kept, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for p in self.kept:
            p.mul_(0.99)


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
    return random_plan(case(), 3, 4)


def test_the_plan_cuts_matrices() -> None:
    shapes = [[plan().local_shape(t, r) for r in range(3)] for t in ("primals_1", "primals_3")]
    elements = [[a * b for a, b in shape] for shape in shapes]
    assert elements == [[36, 12, 24], [0, 60, 12]]


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


KNOWN = sorted(ELEMENTWISE - {optim.SparseAdam}, key=lambda kind: kind.__name__)

ALLOWED: dict[str, Callable[[Any], optim.Optimizer]] = {
    **{kind.__name__: (lambda params, kind=kind: kind(params, lr=1e-2)) for kind in KNOWN},
    "fused": lambda params: optim.AdamW(params, fused=True),
    "foreach": lambda params: optim.Adam(params, foreach=True),
    "groups": lambda params: optim.SGD([{"params": [p], "lr": 0.1} for p in params]),
    "Lamb": lambda params: Lamb(params),
    "Lars": lambda params: Lars(params, lr=0.1),
    "Lion": lambda params: Lion(params, lr=0.1),
    "Anchored": lambda params: Anchored(params, lr=0.1),
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
    "NormedByAttribute": lambda params: NormedByAttribute(params, rate=0.1),
    "Sharpness": lambda params: Sharpness(params, lr=0.1),
}


@pytest.mark.parametrize("name", READ_WHOLE)
def test_an_optimizer_that_reads_whole_parameters_is_refused(name: str) -> None:
    def act(model: nn.Module, module: nn.Module, backward: Callable[[], Tensor]) -> None:
        optimizer = READ_WHOLE[name](module.parameters())
        before = [p.detach().clone() for p in module.parameters()]
        backward()
        closure = name in ("LBFGS", "Sharpness")
        step: Any = (lambda: optimizer.step(backward)) if closure else optimizer.step
        refused(step, f"{name} reads whole parameters.*for AdamW", "optimizer=")
        assert all(map(torch.equal, module.parameters(), before))

    on_ranks(act)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_optimizers_that_are_known_to_be_elementwise_are(kind: type[optim.Optimizer]) -> None:
    """They are not tried on parts of parameters; a class of another name is."""
    other = type("Other", (kind,), {})
    assert not examine(lambda params: other(params, lr=1e-2)).whole_parameters


def test_an_optimizer_is_fused_if_all_its_groups_are() -> None:
    def grouped(params: Any) -> optim.Optimizer:
        first, *others = params
        return optim.AdamW([{"params": [first], "fused": True}, {"params": others}])

    assert examine(partial(optim.AdamW, fused=True)).fused
    assert not examine(optim.AdamW).fused
    assert not examine(grouped, nn.Linear(2, 3)).fused


def test_a_known_optimizer_with_a_changed_step_is_tried() -> None:
    def clipped(params: Any) -> optim.Optimizer:
        made = optim.AdamW(params, lr=1e-2)

        def clip(*called: Any) -> None:
            nn.utils.clip_grad_norm_(made.param_groups[0]["params"], 1e-3)

        made.register_step_pre_hook(clip)
        return made

    assert examine(clipped).whole_parameters
    assert not examine(optim.AdamW).whole_parameters


def test_an_optimizer_that_draws_numbers_is_refused() -> None:
    def act(model: nn.Module, module: nn.Module, backward: Callable[[], Tensor]) -> None:
        backward()
        step = Noisy(module.parameters(), lr=0.1).step
        refused(step, "Noisy trains the same parameters in another way", "draws no numbers")

    on_ranks(act)


def test_an_optimizer_that_cannot_be_tried_is_told_what_it_must_do() -> None:
    one_by_one = threading.Lock()  # warnings are those of all threads

    def act(model: nn.Module, module: nn.Module, backward: Callable[[], Tensor]) -> None:
        backward()
        optimizer = Single(module.parameters(), lr=0.1)
        with one_by_one, pytest.warns(UserWarning, match="not examined .*fails .*float32 alone"):
            optimizer.step()

    on_ranks(act)


def test_an_optimizer_that_the_plan_is_for_is_allowed() -> None:
    kind = replace(plan().optimizer, name="Normed", whole_parameters=True)

    def run(comm: Comm) -> None:
        model, other = copy.deepcopy(case().model), replace(plan(), optimizer=kind)
        module = hap.compile(model, other, comm=comm, device=torch.device("cpu"), check=False)
        module(other.local_batch(case().batch, comm.rank)).backward()
        Normed(module.parameters(), lr=0.1).step()

    run_ranks(plan().world_size, run)
