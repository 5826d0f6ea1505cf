"""Calls of a planned module: those that it computes as one device does, and those that it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.tracing import capture
from hap.errors import PlanError
from hap.ir.batch import TENSOR, call, form_of, leaves, other_entries
from hap.ir.plan import Plan
from hap.runtime.apart import apart
from hap.runtime.collectives import Comm, LocalComm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from tests.random_plans import Case, make_case, random_plan
from tests.test_stages_training import whole_gradients

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(case: Case, plan: Plan, act: Callable[[HapModule, Any, Comm], T]) -> list[T]:
    """Run ``act(module, local batch, comm)`` on every rank of an emulated world."""

    def run(comm: Comm) -> T:
        module = HapModule(plan, case.model, comm, CPU)
        return act(module, plan.local_batch(case.batch, comm.rank), comm)

    return run_ranks(plan.world_size, run)


def assert_equal(found: dict[str, Tensor], reference: nn.Module) -> None:
    """Fail unless the gradients are those of a model on one device."""
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


# --- the backward runs as its forward did --------------------------------------------------


class Noisy(nn.Module):
    """A layer and a norm or dropout, which compute something else in evaluation."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), middle, nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x).tanh()))
        return y.square().mean()


@pytest.mark.parametrize("middle", [nn.Dropout(0.5), nn.BatchNorm1d(16)])
def test_a_backward_uses_the_mode_of_its_own_forward(middle: nn.Module) -> None:
    torch.manual_seed(0)
    case = make_case(Noisy(middle), (torch.randn(8, 8),))
    plan = random_plan(case, 2, 0)

    def act(module: HapModule, batch: Any, comm: Comm) -> list[dict[str, Tensor]]:
        found = []
        for between in (False, True):
            module.zero_grad()
            module._ctx.step = 0  # the same random numbers
            loss = call(module, batch)
            if between:
                module.eval()
                with torch.no_grad():
                    call(module, batch)
            loss.backward()
            module.train()
            found.append(whole_gradients(plan, module, comm))
        return found

    for alone, between in on_ranks(case, plan, act):
        assert all(torch.equal(between[name], grad) for name, grad in alone.items())


def test_second_derivatives_are_refused() -> None:
    torch.manual_seed(0)
    case = make_case(Noisy(nn.Tanh()), (torch.randn(8, 8),))
    module = HapModule(random_plan(case, 1, 0), case.model, LocalComm(), CPU)
    loss, parameters = call(module, case.batch), list(module.parameters())
    with pytest.raises(PlanError, match="second derivatives"):
        torch.autograd.grad(loss, parameters, create_graph=True)
    call(module, case.batch).backward()  # first derivatives are still there


class View(nn.Module):
    """Returns a view, as collectives of the loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum(0).view(())


@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_may_be_changed_in_place(world: int) -> None:
    torch.manual_seed(0)
    case = make_case(View(), (torch.randn(8, 8),))
    plan, reference = random_plan(case, world, 2), copy.deepcopy(case.model)
    (case.loss_of(reference) / 4 + 1).backward()

    def act(module: HapModule, batch: Any, comm: Comm) -> dict[str, Tensor]:
        loss = call(module, batch)
        loss /= 4
        loss += 1
        loss.backward()
        return whole_gradients(plan, module, comm)

    for found in on_ranks(case, plan, act):
        assert_equal(found, reference)


# --- the batch -------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        h = self.embed(ids)
        h = h if mask is None else h * mask.unsqueeze(-1)
        return F.cross_entropy(self.head(h.cumsum(1)).flatten(0, 1) * scale, ids.flatten())


def module_for(batch: Any) -> HapModule:
    """Return a module of :class:`Words` that is planned for one device and this batch."""
    torch.manual_seed(0)
    case = make_case(Words(), batch)
    plan = random_plan(case, 1, 0)
    plan = replace(plan, recipe=replace(plan.recipe, batch=form_of(batch)))
    return HapModule(plan, case.model, LocalComm(), CPU)


IDS = torch.arange(24).view(4, 6) % 20
MASK = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"mask": MASK}, "another batch: mask"),
        ({"scale": 5.0}, r"another batch: scale \(5.0, planned: 1.0\)"),
        ({"scale": torch.tensor(1.0)}, r"another batch: scale \(a tensor, planned: 1.0\)"),
    ],
)
def test_a_batch_with_other_entries_is_refused(other: dict[str, Any], said: str) -> None:
    batch = {"ids": IDS, "scale": 1.0}
    module = module_for(batch)
    with pytest.raises(PlanError, match=said):
        module(**batch | other)
    assert module(**batch, mask=None).item() == module(**batch).item()


def test_a_batch_of_one_tensor_is_known() -> None:
    module = module_for(IDS)
    assert module(IDS).item() == module(IDS, mask=None).item() > 0
    with pytest.raises(PlanError, match=r"another batch|the batch is missing"):
        module(IDS, MASK)
    with pytest.raises(PlanError, match="another batch: mask"):
        module(IDS, mask=MASK)


def test_the_leaves_of_a_form_are_its_entries_by_name() -> None:
    assert leaves(form_of(IDS)) == {"*": TENSOR}
    assert leaves(form_of((IDS, {"a": [IDS, 2]}))) == {"0": TENSOR, "1.a.0": TENSOR, "1.a.1": 2}
    assert leaves(form_of({"x": None, "y": "z", "none": {}})) == {"x": None, "y": "z"}


@pytest.mark.parametrize(
    ("planned", "args", "kwargs", "other"),
    [
        (IDS, (IDS,), {}, []),
        (IDS, (IDS, None), {}, []),
        (IDS, (IDS, IDS), {}, ["1"]),
        (IDS, (IDS,), {"mask": IDS}, ["mask"]),
        ((IDS,), (IDS,), {}, []),
        ((IDS,), (IDS, None), {}, []),
        ((IDS,), (IDS, IDS), {}, ["1"]),
        ({"x": IDS}, (), {"x": IDS, "y": None}, []),
        ({"x": [IDS, 1]}, (), {"x": [IDS, 2]}, ["x.1 (2, planned: 1)"]),
        ({"x": IDS}, (), {"x": None}, ["x (None, planned: a tensor)"]),
    ],
)
def test_other_entries_of_a_call_are_named(
    planned: Any, args: tuple[Any, ...], kwargs: dict[str, Any], other: list[str]
) -> None:
    assert other_entries(form_of(planned), args, kwargs) == other


# --- torch.autocast around the module ------------------------------------------------------


def net(autocast: str = "") -> tuple[Case, Plan]:
    torch.manual_seed(0)
    model, batch = Noisy(nn.Linear(16, 16)), (torch.randn(8, 8),)
    case = make_case(model, batch, graph=capture(model, batch, autocast=autocast))
    plan = random_plan(case, 2, 1)
    return case, replace(plan, recipe=replace(plan.recipe, autocast=autocast))


@pytest.mark.parametrize(("planned", "said"), [("", "no autocast"), ("float16", "float16")])
def test_another_autocast_than_the_plans_is_refused(planned: str, said: str) -> None:
    case, plan = net(planned)

    def act(module: HapModule, batch: Any, comm: Comm) -> None:
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(PlanError, match=f"with bfloat16, the plan has {said}"),
        ):
            call(module, batch)

    on_ranks(case, plan, act)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_the_plans_own_autocast_changes_nothing(backward_inside: bool) -> None:
    case, plan = net("bfloat16")

    def act(module: HapModule, batch: Any, comm: Comm) -> list[dict[str, Tensor]]:
        found = []
        for inside in (False, True):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss = call(module, batch)
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            found.append({"": loss.detach(), **whole_gradients(plan, module, comm)})
        return found

    for outside, inside in on_ranks(case, plan, act):
        for name, grad in outside.items():
            assert torch.equal(inside[name], grad) and inside[name].dtype == grad.dtype


def test_a_backward_inside_autocast_is_in_the_plans_dtypes() -> None:
    case, plan = net()
    reference = copy.deepcopy(case.model)
    case.loss_of(reference).backward()

    def act(module: HapModule, batch: Any, comm: Comm) -> dict[str, Tensor]:
        loss = call(module, batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return whole_gradients(plan, module, comm)

    for found in on_ranks(case, plan, act):
        assert_equal(found, reference)


# --- gradients of their own ----------------------------------------------------------------


class Sums(nn.Module):
    """Two parameters are added, so they have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(8, 6), nn.Parameter(torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.row
        return y.tanh().square().mean()


@pytest.mark.parametrize("seed", range(4))
def test_parameters_with_one_gradient_are_clipped_and_accumulated_once(seed: int) -> None:
    torch.manual_seed(0)
    case = make_case(Sums(), (torch.randn(8, 8),))
    plan = random_plan(case, 2, seed)
    clipped, twice = copy.deepcopy(case.model), copy.deepcopy(case.model)
    case.loss_of(clipped).backward()
    nn.utils.clip_grad_norm_(clipped.parameters(), 0.01)
    for _ in range(2):
        case.loss_of(twice).backward()

    def act(module: HapModule, batch: Any, comm: Comm) -> list[dict[str, Tensor]]:
        call(module, batch).backward()
        hap.clip_grad_norm_(module, 0.01)
        found = [whole_gradients(plan, module, comm)]
        module.zero_grad()
        for _ in range(2):
            call(module, batch).backward()
        return [*found, whole_gradients(plan, module, comm)]

    for once, both in on_ranks(case, plan, act):
        assert_equal(once, clipped)
        assert_equal(both, twice)


def test_gradients_are_taken_apart_where_they_overlap() -> None:
    x, bucket, empty = torch.ones(4), torch.ones(4), torch.ones(0)
    given = [x, x.view(2, 2), x[2:], bucket[:2], bucket[2:], empty, empty]
    found = apart(given)
    for gradient in found:
        gradient.mul_(2)
    assert [g.shape for g in found] == [g.shape for g in given]
    assert all((g == 2).all() for g in found)
    assert all(found[k] is given[k] for k in (0, 3, 4)), "nothing is copied that is apart"
