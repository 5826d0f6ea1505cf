"""Optimizers on shards: elementwise, with norms of whole tensors, refused; scaling and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.user_optimizer import examine, make_optimizer
from hap.errors import InputError, ModelError
from hap.ir.batch import call
from hap.ir.graph import Input
from hap.ir.mesh import divide
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plan import Plan
from hap.optim import Lamb, Lars, tensor_norms
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import GradScaler, HapModule
from tests.random_plans import Case, make_case, random_plan, verdict
from tests.test_two_axes import random_mesh_plan

CPU = torch.device("cpu")
PLANS = ((2, 0), (3, 1), (5, 2))
O = torch.optim  # noqa: E741


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.norm = nn.Embedding(11, 6), nn.Linear(6, 13), nn.LayerNorm(13)
        self.head = nn.Linear(13, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.hidden(self.embed(x)).tanh())), y)


@cache
def net() -> Case:
    torch.manual_seed(2)
    return make_case(Net(), (torch.randint(11, (7,)), torch.randint(11, (7,))))


def trains(optimizer: Any, case: Case | None = None) -> None:
    """Check that three steps under random plans end where one device ends."""
    case = replace(case or net(), loss=None, optimizer=optimizer)
    for world, seed in PLANS:
        found = verdict(case, random_plan(case, world, seed))
        wrong = [(row.what, row.tensor, row.error) for row in found.rows if not row.ok]
        assert found.ok, (world, seed, wrong[:4])


def on_ranks(plan: Plan, act: Callable[[HapModule, Any, Comm], Any]) -> list[Any]:
    def run(comm: Comm) -> Any:
        module = HapModule(plan, net().model, comm, CPU)
        return act(module, plan.local_batch(net().batch, comm.rank), comm)

    return run_ranks(plan.world_size, run)


OPTIMIZERS: dict[str, Callable[[Any], O.Optimizer]] = {
    "SGD": lambda params: O.SGD(params, lr=0.1),
    "momentum": lambda params: O.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: O.Adam(params, lr=1e-2, weight_decay=0.1),
    "AMSGrad": lambda params: O.Adam(params, lr=1e-2, amsgrad=True),
    "AdamW": lambda params: O.AdamW(params, lr=1e-2, weight_decay=0.1),
    "Adagrad": lambda params: O.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: O.RMSprop(params, lr=1e-2, momentum=0.5),
    "Adamax": lambda params: O.Adamax(params, lr=1e-2),
    "Lamb": lambda params: Lamb(params, lr=1e-2),
    "Lars": lambda params: Lars(params, lr=0.5, weight_decay=0.01, trust=0.02),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_train_like_the_whole(name: str) -> None:
    trains(OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "states"), [("SGD", 0), ("momentum", 1), ("AdamW", 2), ("AMSGrad", 3), ("Adagrad", 1),
                         ("Lamb", 2), ("Lars", 1)],
)  # fmt: skip
def test_states_are_counted(name: str, states: int) -> None:
    assert examine(OPTIMIZERS[name]).states == states
    assert examine(OPTIMIZERS[name], Net()).states == states


# --- parameter groups ----------------------------------------------------------------------


def by_name(named_parameters: Any) -> O.Optimizer:
    """Typical groups: no decay of biases and norms, another rate for the embedding."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in named_parameters:
        decay = 0.0 if name.endswith("bias") or name.startswith("norm") else 0.1
        groups.setdefault((1e-3 if name.startswith("embed") else 1e-2, decay), []).append(parameter)
    return O.AdamW([
        {"params": params, "lr": lr, "weight_decay": decay}
        for (lr, decay), params in groups.items()
    ])  # fmt: skip


def test_groups_by_name() -> None:
    trains(by_name)
    assert len(make_optimizer(by_name, Net()).param_groups) == 3
    assert examine(by_name, Net()).states == 2


def test_groups_by_dims_and_of_lamb() -> None:
    def lamb(params: Any) -> O.Optimizer:
        params = list(params)
        return Lamb([
            {"params": [p for p in params if p.dim() > 1], "lr": 1e-2},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ])  # fmt: skip

    trains(lamb)


def test_frozen_parameters_are_not_given_to_the_optimizer() -> None:
    model = Net()
    model.embed.requires_grad_(False)
    seen: list[str] = []

    def make(named_parameters: Any) -> O.Optimizer:
        pairs = list(named_parameters)
        seen.extend(name for name, _ in pairs)
        return O.SGD([p for _, p in pairs], lr=0.1)

    trains(make, make_case(model, net().batch))
    assert seen and not any(name.startswith("embed") for name in seen)


# --- norms of whole tensors ----------------------------------------------------------------


def test_norms_are_those_of_the_whole_tensors() -> None:
    reference = copy.deepcopy(net().model)
    net().loss_of(reference).backward()
    want = [p.grad.norm().item() for p in reference.parameters() if p.grad is not None]
    sizes = [p.detach().norm().item() for p in reference.parameters()]

    def act(module: HapModule, batch: Any, comm: Comm) -> tuple[list[float], list[float]]:
        call(module, batch).backward()
        params = list(module.parameters())
        grads = [p.grad for p in params if p.grad is not None]
        return tensor_norms(params, grads).tolist(), tensor_norms(params, params).tolist()

    for world, seed in PLANS:
        for found, own in on_ranks(random_plan(net(), world, seed), act):
            assert found == pytest.approx(want, rel=1e-4)
            assert own == pytest.approx(sizes, rel=1e-5)


def test_norms_of_plain_parameters() -> None:
    params = [nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor(2.0))]
    assert tensor_norms(params, params).tolist() == [5.0, 2.0]
    assert tensor_norms([], []).tolist() == []
    with pytest.raises(InputError, match="2 parameters, but 1 values"):
        tensor_norms(params, params[:1])


def test_shards_and_others_do_not_mix() -> None:
    def act(module: HapModule, batch: Any, comm: Comm) -> None:
        params = [*module.parameters(), nn.Parameter(torch.ones(2))]
        with pytest.raises(InputError, match="some of these parameters are shards"):
            tensor_norms(params, params)

    on_ranks(random_plan(net(), 2, 0), act)


def test_lamb_is_the_textbooks() -> None:
    w, slopes = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    parameter = nn.Parameter(w.clone())
    optimizer = Lamb([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3)
    m = v = torch.zeros_like(w)
    for t, g in enumerate(slopes, 1):
        parameter.grad = g.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        r = (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-5) + 0.3 * w
        w = w - 0.1 * w.norm() / r.norm() * r
        torch.testing.assert_close(parameter.detach(), w)
    zero = nn.Parameter(torch.zeros(2))
    zero.grad = torch.tensor([1.0, -1.0])
    Lamb([zero], lr=0.1).step()  # a norm of zero: the ratio is 1
    torch.testing.assert_close(zero.detach(), torch.tensor([-0.1, 0.1]), rtol=1e-4, atol=0)


def test_lars_is_the_textbooks() -> None:
    w, slopes = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    parameter = nn.Parameter(w.clone())
    optimizer = Lars([parameter], lr=0.5, momentum=0.7, weight_decay=0.2, trust=0.1)
    u = torch.zeros_like(w)
    for g in slopes:
        parameter.grad = g.clone()
        optimizer.step()
        rate = 0.1 * w.norm() / (g.norm() + 0.2 * w.norm())
        u = 0.7 * u + 0.5 * rate * (g + 0.2 * w)
        w = w - u
        torch.testing.assert_close(parameter.detach(), w)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lamb([], lr=-1.0), lambda: Lamb([nn.Parameter(torch.ones(1))], betas=(0.9, 1.0)),
        lambda: Lars([nn.Parameter(torch.ones(1))], lr=0.1, momentum=1.0),
        lambda: Lars([nn.Parameter(torch.ones(1))], lr=0.1, trust=-1.0),
    ],
)  # fmt: skip
def test_wrong_rates_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError):
        make()


# --- refusals ------------------------------------------------------------------------------


def normalised(params: Any) -> O.Optimizer:
    class Normalised(O.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.grad.div_(p.grad.norm())
            super().step()

    return Normalised(params, lr=0.1)


def normalised_over_channels(params: Any) -> O.Optimizer:
    class Normalised(O.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.dim() == 4:
                    p.grad.div_(p.grad.norm(dim=1, keepdim=True))
            super().step()

    return Normalised(params, lr=0.1)


def clipped(params: Any) -> O.Optimizer:
    """Clip a norm that exceeds those of the small parameters' usual gradients."""
    params = list(params)
    optimizer = O.SGD(params, lr=0.1)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(params, 100.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def warmed_up(optimizer: O.Optimizer) -> O.Optimizer:
    """Raise the rate from zero, after each step."""
    scheduler = O.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 1000))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def matrices(params: Any) -> list[Tensor]:
    return [p for p in params if p.dim() == 2]


def noisy(params: Any) -> O.Optimizer:
    optimizer = O.SGD(params, lr=0.1)

    def shaken(*_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p))

    optimizer.register_step_pre_hook(shaken)
    return optimizer


ACROSS = {
    "Adafactor": lambda params: O.Adafactor(params, lr=1e-2),
    "own": normalised,
    "over channels": normalised_over_channels,
    "Muon": lambda params: O.Muon(matrices(params), lr=1e-2),
    "small Muon": lambda params: O.Muon(matrices(params), lr=1e-6),
    "warm Muon": lambda params: warmed_up(O.Muon(matrices(params), lr=1e-2)),
    "clipped": clipped,
}
"""Optimizers that would train shards in another way than whole parameters."""


@pytest.mark.parametrize("name", ACROSS)
def test_an_optimizer_that_reads_across_parameters_gets_them_whole(name: str) -> None:
    """Parameters are stored whole; what is computed may be split."""
    kind = examine(ACROSS[name], nn.ModuleList([Net(), nn.Conv2d(2, 2, 2)]))
    assert kind.whole_parameters
    assert "whole parameters on every rank" in str(kind)
    whole = replace(net().graph, whole_parameters=True)
    case = make_case(net().model, net().batch, None, ACROSS[name], whole)
    split = 0
    for seed in range(3):
        plan = replace(random_plan(case, 3, seed), optimizer=kind)
        assert not any(map(_is_cut(plan), plan.graph.role("parameter")))
        assert verdict(case, plan).ok
        assert Plan.from_json(plan.to_json()).graph.whole_parameters
        split += bool(plan.program.used_axes())
    assert split > 0


@pytest.mark.slow
def test_whole_parameters_stay_whole_over_two_mesh_axes() -> None:
    whole = replace(net().graph, whole_parameters=True)
    case = make_case(net().model, net().batch, None, ACROSS["Muon"], whole)
    for seed in range(2):
        plan = random_mesh_plan(case, 2, 2, seed)
        assert plan.inside is not None
        inner = plan.inside.program.inputs
        for i in plan.graph.role("parameter"):
            assert not plan.program.inputs[i.tensor].sharded
        assert not any(p.sharded for t, p in inner.items() if t in _stored(plan))
        assert verdict(case, plan).ok


def _stored(plan: Plan) -> set[str]:
    return {i.tensor for i in divide(plan.graph, plan.program, plan.shares).role("parameter")}


def _is_cut(plan: Plan) -> Callable[[Input], bool]:
    return lambda i: plan.program.inputs[i.tensor].sharded


def test_a_plan_that_cuts_what_the_optimizer_reads_whole_is_refused() -> None:
    plans = (random_plan(net(), 3, seed) for seed in range(20))
    sharded = next(p for p in plans if any(map(_is_cut(p), p.graph.role("parameter"))))
    kind = OptimizerKind(name="Muon", states=1, whole_parameters=True)
    content = replace(sharded, optimizer=kind).to_json()
    with pytest.raises(ValueError, match="is stored in shards, but the optimizer reads it whole"):
        Plan.from_json(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (noisy, "SGD trains the same parameters in another way each time"),
        (
            lambda params: O.SGD(Net().parameters(), lr=0.1),
            "trains 7 tensors that are not in params",
        ),
        (lambda params: O.SGD(params, lr=0.0), "SGD changes no parameter"),
        (lambda params: O.LBFGS(params), "steps? without a closure|closure"),
        (lambda params: O.SparseAdam(list(params)), "fails on small parameters"),
        (lambda params: [], "fails on small parameters|no"),
    ],
    ids=["noisy", "of others", "no rate", "LBFGS", "SparseAdam", "no optimizer"],
)
def test_an_optimizer_that_ranks_cannot_run_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        examine(make, nn.ModuleList([Net(), nn.Conv2d(2, 2, 2)]))
    assert torch.get_default_dtype() == torch.float32


def test_an_optimizer_of_other_tensors_is_refused_on_shards() -> None:
    """A model that is global is not what is trained."""
    with pytest.raises(ModelError, match="not in params, the first of shape") as error:
        make_optimizer(lambda params: O.SGD([*params, torch.ones(3)], lr=0.1), Net())
    assert "from params alone" in error.value.hint


ELEMENTWISE: list[tuple[type[Any], dict[str, Any]]] = [
    (O.Adadelta, {}), (O.Adagrad, {"lr_decay": 0.1}), (O.Adagrad, {"fused": True}),
    (O.Adam, {"amsgrad": True, "weight_decay": 0.3}), (O.Adam, {"foreach": True}),
    (O.AdamW, {"fused": True, "amsgrad": True}), (O.Adamax, {}), (O.ASGD, {}),
    (O.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}), (O.RAdam, {}),
    (O.RMSprop, {"centered": True, "momentum": 0.9}), (O.Rprop, {}),
    (O.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}), (O.SGD, {"fused": True}),
]  # fmt: skip


@pytest.mark.parametrize("rate", [1e-6, 1.0])
@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(
    kind: type[Any], options: dict[str, Any], rate: float
) -> None:
    model = nn.ModuleList([Net(), nn.Conv2d(2, 2, 2), nn.PReLU()])
    model.scale = nn.Parameter(torch.ones(()))

    def make(params: Any) -> O.Optimizer:
        params = list(params)
        groups = [{"params": params[:3], "lr": 2 * rate}, {"params": params[3:]}]
        return warmed_up(kind(groups, lr=rate, **options))

    assert examine(make, model).name == kind.__name__


def test_parameters_that_are_left_out_are_named() -> None:
    with pytest.warns(UserWarning, match="SGD does not train hidden.bias, norm.weight, norm.bias"):
        examine(lambda params: O.SGD(matrices(params), lr=0.1), Net())


def test_the_small_parameters_have_the_attributes_of_the_real_ones() -> None:
    model, seen = Net(), []
    model.norm.weight.no_decay = True  # type: ignore[assignment]

    def make(named_parameters: Any) -> O.Optimizer:
        seen.append([n for n, p in named_parameters if getattr(p, "no_decay", False)])
        return O.SGD([p for _, p in named_parameters], lr=0.1)

    examine(make, model)
    assert seen[0] == seen[-1] == ["norm.weight"]


# --- clipping, accumulation ----------------------------------------------------------------


def whole(case: Case, plan: Plan, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
    found = {}
    for name in parts[0]:
        placement = plan.program.inputs[tensors[name]]
        pieces = [p[name] for p in parts]
        found[name] = torch.cat(pieces, placement.dim) if placement.sharded else pieces[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["value", "norm"])
def test_a_clipped_and_accumulated_step(clip: str) -> None:
    """Three backwards, then clipping, then a step."""

    def train(module: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        optimizer = O.AdamW(module.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            for scale in (1.0, 0.5, 2.0):
                (scale * loss()).backward()
            if clip == "value":
                nn.utils.clip_grad_value_(module.parameters(), 0.02)
            elif isinstance(module, HapModule):
                hap.clip_grad_norm_(module, 0.1)
            else:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    reference = copy.deepcopy(net().model)
    want = train(reference, lambda: net().loss_of(reference))
    for world, seed in PLANS:
        plan = random_plan(net(), world, seed)
        parts = on_ranks(
            plan, lambda module, batch, comm: train(module, lambda: call(module, batch))
        )
        for name, value in whole(net(), plan, parts).items():
            torch.testing.assert_close(value, want[name], rtol=2e-4, atol=1e-5, msg=name)


# --- gradient scaling ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("world", "seed"), PLANS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(world: int, seed: int, bad: float) -> None:
    plan = random_plan(net(), world, seed)

    def act(module: HapModule, batch: Any, comm: Comm) -> tuple[list[float], float, bool, bool]:
        scaler = GradScaler(module, init_scale=1024.0, growth_interval=100)
        optimizer = O.SGD(module.parameters(), lr=0.1)
        scales, moved = [], []
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(call(module, batch)).backward()
            if step == 1:  # overflows on one rank alone: the last that has elements
                mine = [p for p in module.parameters() if p.numel()]
                holders = comm.all_gather(
                    torch.tensor([float(bool(mine))]), 0, (1,) * comm.world_size, "padded"
                )
                last = int(holders.nonzero().max())
                if comm.rank == last:
                    assert mine[0].grad is not None
                    mine[0].grad.view(-1)[0] = bad
            before = [p.detach().clone() for p in module.parameters()]
            scaler.step(optimizer)
            scaler.update()
            now = list(module.parameters())
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, now, strict=True)))
            scales.append(scaler.get_scale())
        has = any(p.numel() for p in module.parameters())
        return scales, module.grad_norm().item(), moved[0] == moved[2] == has, moved[1]

    for scales, _, trained, moved in on_ranks(plan, act):
        assert scales == [1024.0, 512.0, 512.0]
        assert trained and not moved


def test_scaled_steps_are_those_of_one_device() -> None:
    reference = copy.deepcopy(net().model)

    def train(module: nn.Module, scaler: Any, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        optimizer = O.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    want = train(reference, torch.amp.GradScaler("cpu"), lambda: net().loss_of(reference))
    plan = random_plan(net(), 3, 1)
    parts = on_ranks(
        plan,
        lambda module, batch, comm: train(module, GradScaler(module), lambda: call(module, batch)),
    )
    for name, value in whole(net(), plan, parts).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-6, msg=name)
