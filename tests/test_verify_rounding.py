"""A model that amplifies rounding from step to step is verified; a wrong program of it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hap.capture.user_optimizer import MakeOptimizer
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.verify import TOLERANCE, Observer
from tests.random_plans import Case, make_case, random_plan, verdict


def sgd(rate: float) -> MakeOptimizer:
    return partial(torch.optim.SGD, lr=rate)


RATE = 0.1


class Normalized(nn.Module):
    """Layers that normalize three rows, so that rounding grows from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()) for _ in range(16)]
        self.layers = nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


@cache
def normalized() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 24), "y": torch.randint(0, 24, (3,))}
    return make_case(Normalized(), batch, optimizer=sgd(RATE))


def run_with(**changes: Any) -> Callable[[int, Callable[[Comm], Any]], list[Any]]:
    """Return a function that runs ranks, which train otherwise than one device does."""

    def run(world: int, target: Callable[[Comm], Any]) -> list[Any]:
        assert isinstance(target, Observer)
        return run_ranks(world, replace(target, **changes))

    return run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_errors_are_those_of_rounding(seed: int) -> None:
    case = normalized()
    plan = random_plan(case, 3, seed)
    found = verdict(case, plan)
    assert found.ok, found.first_bad
    assert found.amplified > TOLERANCE["float64"]
    first = next(row for row in found.rows if row.tensor == "loss of step 1")
    assert first.error < 1e-12


def test_a_wrong_learning_rate_is_found() -> None:
    case = normalized()
    plan = random_plan(case, 3, 0)
    assert not verdict(case, plan, run=run_with(optimizer=sgd(RATE * (1 - 1e-4)))).ok


def test_a_wrong_gradient_is_found() -> None:
    case = normalized()
    plan = random_plan(case, 3, 0)

    def run(world: int, target: Callable[[Comm], Any]) -> list[Any]:
        seen = run_ranks(world, target)
        for rank in seen:
            rank["gradient"]["layers.0.weight"] *= 1 + 1e-7
        return seen

    found = verdict(case, plan, run=run)
    assert [row.tensor for row in found.rows if not row.ok] == ["layers.0.weight"]


def test_a_model_that_amplifies_nothing_has_no_room() -> None:
    case = make_case(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
        {"input": torch.randn(6, 8)}, loss=lambda output, batch: output.square().mean(), optimizer=sgd(RATE),
    )  # fmt: skip
    plan = random_plan(case, 2, 0)
    assert not verdict(case, plan, run=run_with(optimizer=sgd(RATE * (1 - 1e-7)))).ok
    assert verdict(case, plan).amplified == 0
