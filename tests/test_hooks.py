"""Hooks and reparametrizations take part in a step as in eager PyTorch, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import hap
from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.shards import gather
from tests.random_plans import make_case, random_plan, two_machines, verdict

BATCH = torch.randn(8, 12, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * 2


class TensorHook(nn.Module):
    """A forward that registers a hook on a tensor that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner[0](x)
        h.register_hook(lambda g: g * 3)
        return self.inner[2](h)


def hooked(register: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = net()
    register(model)
    return model


HONOURED: dict[str, Callable[[], nn.Module]] = {
    "forward": lambda: hooked(lambda m: m[0].register_forward_hook(lambda s, i, o: o * 1.7)),
    "forward of the model": lambda: hooked(
        lambda m: m.register_forward_hook(lambda s, i, o: o + o.sin())
    ),
    "forward with kwargs": lambda: hooked(
        lambda m: m[2].register_forward_hook(lambda s, a, k, o: o * 3, with_kwargs=True)
    ),
    "forward pre": lambda: hooked(
        lambda m: m[2].register_forward_pre_hook(lambda s, i: (i[0] * 0.3 + 1,))
    ),
    "a gradient hook on the output": lambda: hooked(
        lambda m: m[0].register_forward_hook(lambda s, i, o: o.register_hook(lambda g: g * 2) and None)
    ),
    "a tensor inside": TensorHook,
    "weight_norm": lambda: hooked(
        lambda m: parametrizations.weight_norm(m[0]).parametrizations.weight.original0.data.mul_(1.5)
    ),
    "spectral_norm": lambda: hooked(lambda m: parametrizations.spectral_norm(m[0])),
    "old weight_norm": lambda: hooked(lambda m: nn.utils.weight_norm(m[0]).weight_g.data.mul_(1.5)),
    "old spectral_norm": lambda: hooked(lambda m: nn.utils.spectral_norm(m[2])),
    "pruning": lambda: hooked(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)),
    "pruning twice": lambda: hooked(
        lambda m: [prune.random_unstructured(m[2], "weight", part) for part in (0.3, 0.5)]
    ),
    "parametrize": lambda: hooked(
        lambda m: parametrize.register_parametrization(m[2], "weight", Doubled())
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", HONOURED)
def test_hooks_of_the_forward_compute_what_eager_pytorch_does(kind: str) -> None:
    model, plain = HONOURED[kind](), net()
    plan = hap.plan(
        model, BATCH, two_machines(2), loss=loss, options=hap.PlanOptions(all_devices=True)
    )

    def step(comm: Comm) -> dict[str, Tensor]:
        module = HapModule(plan, model, comm, torch.device("cpu"))
        found = {"loss": module(plan.local_batch(BATCH, comm.rank))}
        found["loss"].backward()
        tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
        whole = {
            n: gather(plan, tensors[n], p.grad, [comm], comm.rank)
            for n, p in module.named_parameters() if p.grad is not None
        }  # fmt: skip
        return found | whole

    first, _ = run_ranks(2, step)
    value = loss(model(BATCH), BATCH)
    value.backward()
    eager = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    loss(plain(BATCH), BATCH).backward()
    moved = [
        not torch.allclose(p.grad, plain.get_parameter(n.removeprefix("inner.")).grad)
        for n, p in model.named_parameters()
        if p.grad is not None and n.removeprefix("inner.") in dict(plain.named_parameters())
    ]
    assert any(moved) or not moved, "the hook changes nothing, so that this test shows nothing"
    assert torch.allclose(first["loss"], value)
    for name, gradient in eager.items():
        torch.testing.assert_close(first[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def scaled(module: nn.Module, grads: Any, *rest: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in grads)


REFUSED: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "gradient hook": (
        lambda m: m[0].weight.register_hook(lambda g: g * 2),
        r"the parameter '0.weight' has a hook \(register_hook\)",
    ),
    "hook after accumulation": (
        lambda m: m[2].bias.register_post_accumulate_grad_hook(lambda p: None),
        r"the parameter '2.bias' has a hook \(register_post_accumulate_grad_hook\)",
    ),
    "full backward hook": (
        lambda m: m[2].register_full_backward_hook(scaled),
        r"the module '2' \(Linear\) has a backward hook \(register_full_backward_hook\)",
    ),
    "full backward pre-hook": (
        lambda m: m.register_full_backward_pre_hook(scaled),
        r"the model itself has a backward hook \(register_full_backward_pre_hook\)",
    ),
    "a weight made by hand": (
        lambda m: (
            delattr(m[0], "weight"),
            setattr(m[0], "weight", torch.ones(16, 12) * m[2].bias[0]),
        ),
        r"the module '0' \(Linear\) can't be captured: it holds the tensor 'weight'",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_hooks_that_the_graph_can_not_hold_are_refused_by_name(kind: str) -> None:
    register, message = REFUSED[kind]
    with pytest.raises(ModelError, match=message):
        capture(hooked(register), BATCH, loss)


def test_a_hook_on_all_modules_is_refused() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o)
    try:
        with pytest.raises(ModelError, match="register_module_forward_hook"):
            capture(net(), BATCH, loss)
    finally:
        handle.remove()
    capture(net(), BATCH, loss)


class Replaced(nn.Module):
    """Replaces a registered buffer, or a tensor that is a plain attribute, in the forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.out, self.kind = nn.Linear(12, 8), kind
        self.register_buffer("seen", torch.zeros(8))
        self.last = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(x)
        new = 0.9 * self.seen + h.detach().mean(0)
        if self.kind == "buffer":
            self.seen = new
        elif self.kind == "attribute":
            h = h * (1 + self.last)
            self.last = new
        elif self.kind == "not read":
            self.last = new
        else:
            self.seen.copy_(new)
        return h.square().mean()


@pytest.mark.parametrize(("kind", "name"), [("buffer", "seen"), ("attribute", "last")])
def test_a_buffer_that_the_forward_replaces_is_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"the forward replaces the buffer '{name}'"):
        capture(Replaced(kind), BATCH)


@pytest.mark.parametrize("kind", ["in place", "not read"])
def test_a_buffer_that_the_forward_writes_into_is_captured(kind: str) -> None:
    model = Replaced(kind)
    before = copy.deepcopy(model)
    graph = capture(model, BATCH)
    written = [o.target for o in graph.outputs if o.role == "buffer"]
    assert written == (["seen"] if kind == "in place" else [])
    assert torch.equal(model.seen, before.seen) and torch.equal(model.last, before.last)


class Remembered(nn.Module):
    """Replaces a buffer that is not saved before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 8)
        self.register_buffer("places", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(x)
        self.places = torch.arange(h.shape[1]).to(h)
        return (h * self.places).square().mean()


def test_a_buffer_that_is_made_anew_in_the_forward_is_not_compared() -> None:
    case = make_case(Remembered(), BATCH)
    seen = verdict(case, random_plan(case, 3, seed=1))
    assert seen.ok, seen.first_bad
    assert "places" not in {row.tensor for row in seen.rows}
    assert {"out.weight", "out.bias"} <= {row.tensor for row in seen.rows}


def test_a_hook_that_the_forward_registers_on_a_parameter_is_refused() -> None:
    class Registers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.register_hook(lambda g: g * 10)
            return super().forward(x)

    with pytest.raises(ModelError, match=r"the parameter 'weight' has a hook \(register_hook\)"):
        capture(Registers(12, 8), BATCH, loss)
