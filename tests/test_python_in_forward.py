"""Python code of a forward: numbers and branches, checks of data, kept constants, gradients of its own.

PYTEST_DONT_REWRITE: a rewritten ``assert`` in a forward would branch otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.rule_sources import with_rules
from tests.random_plans import make_case, random_plan, verdict

LOGGER = logging.getLogger(__name__)


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), forward
        self.kept: Any = None
        self.table: dict[int, Tensor] = {}
        self.length = 0
        self.register_buffer("rows", torch.ones(2), persistent=False)
        self.register_buffer("begun", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def tensor_as_dims(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).sum(torch.arange(1, x.dim()).tolist()).square().mean()


def numpy_check(net: Net, x: Tensor) -> Tensor:
    if (np.array(x.shape) % np.power(2, 1) > 0).any():
        raise ValueError("odd sizes")
    return net.layer(x).square().mean()


def branch_on_numbers(net: Net, x: Tensor) -> Tensor:
    counts = torch.zeros(3, dtype=torch.long)
    counts[1] = 2
    counts += 1
    if torch.tensor([1, 2, 3]).sum() > 5:
        x = x * 2
    return (net.layer(x) * int(counts.sum())).square().mean()


def written_through_a_view(net: Net, x: Tensor) -> Tensor:
    table = torch.ones(2, 2, dtype=torch.int32)
    flat = table.view(-1)
    table.fill_(3)
    if not (flat == 3).all():
        x = x * 2
    return net.layer(x).square().mean() * flat[0].item()


def check_of_data(net: Net, x: Tensor) -> Tensor:
    if x.max() >= 1e9:
        what = f"too large: {x.shape}"
        raise ValueError(what)
    if x.isnan().any() or x.isinf().any():
        raise ValueError("not finite")
    if (x < 1e9).all():
        x = x * 2
    else:
        raise ValueError
    return net.layer(x).square().mean()


def check_inside_of_with(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        if x.max() >= 1e9:
            raise ValueError
    return net.layer(x).square().mean()


def class_of_weight(net: Net, x: Tensor) -> Tensor:
    if type(net.layer.weight).__module__.startswith("torchao."):
        return x.mean()
    return net.layer(x).square().mean()


def needless_no_grad(net: Net, x: Tensor) -> Tensor:
    eye = torch.eye(4)
    eye.requires_grad = False
    return (net.layer(x) @ eye).square().mean()


def gradient_penalty(net: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    out = net.layer(x).tanh().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    return out.square() / 100 + (gradient.norm(dim=1) - 1).square().mean()


def input_asks_for_gradient(net: Net, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.linear(x, net.rows.new_ones(4, 4))
    hidden.requires_grad_(True)
    return torch.utils.checkpoint.checkpoint(net.layer, hidden, use_reentrant=False).square().mean()


def kept_table(net: Net, x: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = torch.linspace(0, 1, 4)
    return (net.layer(x) * net.kept).square().mean()


def kept_in_a_list(net: Net, x: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = [torch.linspace(0, 1, 4), 2]
    return (net.layer(x) * net.kept[0] * net.kept[1]).square().mean()


def kept_in_a_dict(net: Net, x: Tensor) -> Tensor:
    if 4 not in net.table:
        net.table[4] = torch.linspace(0, 1, 4)
    return (net.layer(x) * net.table[4]).square().mean()


def kept_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    if net.length < 4:
        net.length = 4
        net.register_buffer("rows", torch.linspace(0, 1, 4), persistent=False)
    return (net.layer(x) * net.rows[:4]).square().mean()


def kept_beside_results(net: Net, x: Tensor) -> Tensor:
    net.table[0] = net.layer(x)
    return kept_table(net, net.table[0])


def mean_over_a_count(net: Net, x: Tensor) -> Tensor:
    chosen = x > 0
    return (net.layer(x) * chosen).square().sum() / max(int(chosen.sum()), 1)


def scaled_by_the_largest(net: Net, x: Tensor) -> Tensor:
    h = net.layer(x)
    return (h / h.abs().max().item()).square().mean()


def arithmetic_of_numbers(net: Net, x: Tensor) -> Tensor:
    above, below, mean = int((x > 0).sum()), int((x < 0).sum()), float(x.abs().mean())
    weight = above / (above + below) * mean**2 + above // 2 - above % 3 + min(mean, 0.5)
    return net.layer(x).square().mean() * weight * math.sqrt(mean)


def number_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).square().mean() * (net.begun.item() + 2)


def tensors_of_numbers(net: Net, x: Tensor) -> Tensor:
    scale = torch.tensor([x.sum().item(), 1.0, 2.0, 3.0])
    return (net.layer(x) * scale * torch.tensor(x.mean().item())).square().mean()


def numbers_of_linspace(net: Net, x: Tensor) -> Tensor:
    return sum(net.layer(x).square().mean() * float(s) for s in torch.linspace(0, 1, 4))  # type: ignore[return-value]


def number_written_into_zeros(net: Net, x: Tensor) -> Tensor:
    numbers = torch.zeros(4)
    numbers[0] = x[0, 0]
    return net.layer(x).square().mean() * numbers.sum().item()


def asserts(net: Net, x: Tensor) -> Tensor:
    assert x.max().item() < 1e9
    assert torch.all(x < 1e9).item(), "too large"
    if x.abs().max().item() > 1e9:
        raise ValueError
    return net.layer(x).square().mean()


def fields_of_a_loss(net: Net, x: Tensor) -> Tensor:
    usual, loss = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(None, ignore_index=3, reduction="sum")
    numbers = torch.tensor([usual.ignore_index, loss.ignore_index]).clamp(min=0)
    labels = torch.where(x[:, 0] > 0, numbers[0], numbers[1])
    return loss(net.layer(x), labels) * (2 if loss.reduction == "sum" else 1) + usual(
        net.layer(x), labels
    )


def messages(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    print("shape", y.shape, f"mean {y.mean().item():.3f}")
    logging.info("mean %s", y.mean())
    LOGGER.debug("mean %s", y.mean())
    if x.shape[0] < 8:
        warnings.warn(f"few rows: {x.shape}", UserWarning, stacklevel=2)
    return y.square().mean()


CAPTURED: dict[str, tuple[Callable[[Net, Tensor], Tensor], ...]] = {
    "constants": (fields_of_a_loss, tensor_as_dims, numpy_check, branch_on_numbers, written_through_a_view),
    "checks": (check_of_data, check_inside_of_with, class_of_weight, asserts, messages),
    "gradients": (needless_no_grad, gradient_penalty, input_asks_for_gradient),
    "kept": (kept_table, kept_in_a_list, kept_in_a_dict, kept_in_a_buffer, kept_beside_results),
    "numbers of data": (mean_over_a_count, scaled_by_the_largest, arithmetic_of_numbers, tensors_of_numbers),
    "numbers": (number_of_a_buffer, numbers_of_linspace, number_written_into_zeros),
}  # fmt: skip


NOT_BY_2_11 = (messages, gradient_penalty, input_asks_for_gradient)
"""Forwards that torch 2.11 does not capture: they format a number of a tensor, or call requires_grad_()."""


class Together(nn.Module):
    """The sum of several forwards, each of a module of its own."""

    def __init__(self, forwards: tuple[Callable[[Net, Tensor], Tensor], ...]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(map(Net, forwards))

    def forward(self, x: Tensor) -> Tensor:
        return sum(net(x) for net in self.nets)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAPTURED)
def test_python_code_that_no_data_decides_is_captured(kind: str) -> None:
    torch.manual_seed(0)
    lacking = NOT_BY_2_11 if torch.__version__.startswith("2.11.") else ()
    forwards = tuple(f for f in CAPTURED[kind] if f not in lacking)
    net, x = Together(forwards), torch.randn(6, 4)
    case = make_case(net, x, graph=with_rules(capture(net, x), {}))
    seen = verdict(case, random_plan(case, 3, 0))
    assert seen.ok, seen.first_bad


def buffer_decides(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if net.begun > 0 else x * 2).square().mean()


def batch_decides(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if x.sum() > 0 else x * 2).square().mean()


def chance_decides(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if torch.rand(1) > 0.5 else x * 2).square().mean()


def drawn_into_zeros(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if torch.zeros(3).uniform_().sum() > 1 else x * 2).square().mean()


def batch_copied_into_zeros(net: Net, x: Tensor) -> Tensor:
    numbers = torch.zeros(4)
    numbers.copy_(x[0])
    return net.layer(x if numbers.sum() > 0 else x * 2).square().mean()


def number_decides(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if x.sum().item() > 0 else x * 2).square().mean()


def pairs_of_rows(net: Net, x: Tensor) -> Tensor:
    """torch picks the pairs by a mask, which fake tensors do not know."""
    return net.layer(x).sum() + torch.combinations(x[:, 0]).sum()


def number_is_a_size(net: Net, x: Tensor) -> Tensor:
    return net.layer(x)[: int((x > 0).sum())].square().mean()


def number_is_a_length(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).square().mean() * torch.arange(int((x > 0).sum())).sum()


def number_is_a_key(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).square().mean() * {0: 2.0, 1: 3.0}.get(int(net.begun), 1.0)


def number_is_in_a_set(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).square().mean() * (2.0 if net.begun.item() in (3, 4) else 1.0)


def floats_decide(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if torch.linspace(0, 1, 4)[1] > 1 / 3 else x * 2).square().mean()


def error_is_caught(net: Net, x: Tensor) -> Tensor:
    try:
        if x.max() > 1:
            raise ValueError
    except ValueError:
        x = x * 2
    return net.layer(x).square().mean()


def _checked(x: Tensor) -> Tensor:
    with torch.no_grad():
        if x.max() > 1:
            raise ValueError
    return x


def caller_catches_the_error(net: Net, x: Tensor) -> Tensor:
    try:
        with torch.enable_grad():
            x = _checked(x)
    except Exception:
        x = x * 2
    return net.layer(x).square().mean()


@pytest.mark.parametrize(
    "forward",
    [
        buffer_decides, batch_decides, chance_decides, drawn_into_zeros, batch_copied_into_zeros,
        number_decides, pairs_of_rows, number_is_a_size, number_is_a_length, number_is_a_key, number_is_in_a_set, floats_decide, error_is_caught, caller_catches_the_error,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_what_data_or_chance_decides_is_refused(forward: Any) -> None:
    with pytest.raises(ModelError, match="can't be captured as one graph"):
        capture(Net(forward), torch.randn(6, 4))


def keeps_a_mean(net: Net, x: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = x.detach().mean()
    return (net.layer(x) * net.kept).square().mean()


def keeps_random_numbers(net: Net, x: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = torch.rand(4)
    return (net.layer(x) * net.kept).square().mean()


def keeps_a_weight(net: Net, x: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = net.layer.weight.detach().clone()
    return (net.layer(x) @ net.kept).square().mean()


def keeps_a_row(net: Net, x: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = torch.zeros(4)
        net.kept.copy_(x.detach()[0])
    return (net.layer(x) * net.kept).square().mean()


def keeps_other_numbers_each_time(net: Net, x: Tensor) -> Tensor:
    net.length += 1
    net.kept = torch.full((4,), float(net.length))
    return (net.layer(x) * net.kept).square().mean()


def keeps_one_more_each_time(net: Net, x: Tensor) -> Tensor:
    net.table[len(net.table)] = torch.arange(4.0)
    return (net.layer(x) * len(net.table)).square().mean()


def reads_the_last_constant(net: Net, x: Tensor) -> Tensor:
    last = net.kept if net.kept is not None else torch.zeros(4)
    net.kept = torch.ones(4)
    return (net.layer(x) * (1 + last)).square().mean()


@pytest.mark.parametrize(
    "forward",
    [
        keeps_a_mean, keeps_random_numbers, keeps_a_weight, keeps_a_row, keeps_other_numbers_each_time,
        keeps_one_more_each_time, reads_the_last_constant,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_tensor_kept_for_later_steps_that_is_no_constant_is_refused(forward: Any) -> None:
    with pytest.raises(
        ModelError, match=r"changes the attribute '.*', and then computes something"
    ):
        capture(Net(forward), torch.randn(6, 4))


def test_the_tracer_is_left_as_it_was() -> None:
    with contextlib.suppress(ModelError):
        capture(Net(batch_decides), torch.randn(6, 4))
    net = Net(check_of_data)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(net, backend="eager", fullgraph=True)(torch.randn(6, 4))


class Attributes(nn.Module):
    """Has floats that no state dict knows: a plain attribute, and one inside of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.parts = nn.Linear(4, 4), torch.rand(4), [torch.rand(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) @ self.parts[0] * self.scale).square().mean()


class Masked(nn.Module):
    """Has a buffer with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return ((h @ h.T + self.mask).softmax(-1) @ h).square().mean()


@pytest.mark.parametrize("net", [Attributes, Masked])
def test_verification_in_float64_of_constants(net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    case = make_case(net(), torch.randn(6, 4))
    assert verdict(case, random_plan(case, 3, 0)).ok
