"""Losses of torch, with any divisor, on uneven and empty shards against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.ir.placement import P
from hap.ir.program import Compute
from tests.random_plans import Case, make_case, random_plan, verdict

ROWS, CLASSES = 7, 11
PLANS = ((2, 0), (3, 1), (5, 2))
"""(world size, seed) of the random plans of each case."""


class Net(nn.Module):
    """Two layers and a loss, which may take class weights."""

    def __init__(self, loss: Callable[..., Tensor], weighted: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 13), nn.Linear(13, CLASSES)
        self.loss = loss
        self.register_buffer("weight", torch.rand(CLASSES) + 0.5 if weighted else None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.second(self.first(x).tanh())
        return self.loss(out, y) if self.weight is None else self.loss(out, y, self.weight)


def classes() -> Tensor:
    return torch.tensor([3, 10, -100, 0, 3, 7, 3])


def numbers() -> Tensor:
    return torch.randn(ROWS, CLASSES)


def odds() -> Tensor:
    return torch.rand(ROWS, CLASSES).softmax(-1)


def signs() -> Tensor:
    return torch.randn(ROWS, CLASSES).sign()


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor], bool]] = {
    "cross-entropy": (F.cross_entropy, classes, False),
    "cross-entropy, weighted": (F.cross_entropy, classes, True),
    "cross-entropy, ignoring class 3": (
        lambda x, y, **k: F.cross_entropy(x, y.clamp(min=0), ignore_index=3, **k), classes, False,
    ),
    "cross-entropy, smoothed": (
        lambda x, y, **k: F.cross_entropy(x, y, label_smoothing=0.1, **k), classes, False,
    ),
    "cross-entropy, smoothed and weighted": (
        lambda x, y, w, **k: F.cross_entropy(x, y, w, label_smoothing=0.1, **k), classes, True,
    ),
    "cross-entropy of probabilities": (F.cross_entropy, odds, False),
    "NLL": (lambda x, y, **k: F.nll_loss(x.log_softmax(-1), y, **k), classes, False),
    "NLL, weighted": (lambda x, y, w, **k: F.nll_loss(x.log_softmax(-1), y, w, **k), classes, True),
    "BCE with logits": (F.binary_cross_entropy_with_logits, odds, False),
    "BCE with logits, weighted": (F.binary_cross_entropy_with_logits, odds, True),
    "BCE with logits, positives weighted": (
        lambda x, y, w, **k: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, **k),
        odds, True,
    ),
    "BCE": (lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y, **k), odds, False),
    "MSE": (F.mse_loss, numbers, False),
    "smooth L1": (lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.7, **k), numbers, False),
    "Huber": (lambda x, y, **k: F.huber_loss(x, y, delta=0.7, **k), numbers, False),
    "L1": (F.l1_loss, numbers, False),
    "soft margin": (F.soft_margin_loss, signs, False),
    "KL": (lambda x, y, **k: F.kl_div(x.log_softmax(-1), y, **k), odds, False),
    "KL of logarithms": (
        lambda x, y, **k: F.kl_div(x.log_softmax(-1), y.log(), log_target=True, **k), odds, False,
    ),
    "Poisson": (lambda x, y, **k: F.poisson_nll_loss(x, y.abs(), **k), numbers, False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_global_batch(name: str) -> None:
    """The mean and the sum in one program."""
    loss, target, weighted = LOSSES[name]

    def both(*args: Tensor) -> Tensor:
        return loss(*args, reduction="mean") + 0.3 * loss(*args, reduction="sum")

    torch.manual_seed(3)
    holds(Net(both, weighted), (torch.randn(ROWS, 5), target()))


def holds(model: nn.Module, batch: Any) -> None:
    plans_hold(make_case(model, batch))


def plans_hold(case: Case) -> None:
    for world, seed in PLANS:
        found = verdict(case, random_plan(case, world, seed))
        wrong = [(row.what, row.tensor, row.error) for row in found.rows if not row.ok]
        assert found.ok, (world, seed, found.first_bad, wrong[:4])


def test_the_batchmean_of_kl() -> None:
    model = Net(lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"))
    holds(model, (torch.randn(ROWS, 5), odds()))


def test_a_mean_of_no_targets_is_nan() -> None:
    """The loss is 0 / 0, which verification reports as an error, so the test reads the loss."""
    batch = (torch.randn(ROWS, 5), torch.full((ROWS,), -100))
    case = make_case(Net(F.cross_entropy), batch)
    assert case.loss_of(case.model).isnan()
    rows = verdict(case, random_plan(case, 3, 1)).rows
    assert all(row.error == float("inf") for row in rows if row.what == "loss")


def test_some_plans_split_the_divisors_of_losses() -> None:
    """Some plans hold the counts as partial sums; else dividing by local counts would pass."""
    torch.manual_seed(3)
    case = make_case(Net(F.cross_entropy, weighted=True), (torch.randn(ROWS, 5), classes()))
    sums = [n.name for n in case.graph.nodes if n.op.startswith("aten.sum")]
    split = 0
    for world, seed in PLANS:
        steps = random_plan(case, world, seed).program.instructions
        split += sum(isinstance(s, Compute) and s.node in sums and P in s.outs for s in steps)
    assert split >= 2
