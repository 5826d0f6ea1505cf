"""Failures that fuzzing found, each as small as possible, with their cause."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx, nn

from hap.capture.tracing import capture
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import emit
from tests.fuzz.check import Outcome, check
from tests.fuzz.recipe import Machine, Recipe
from tests.random_plans import make_case, random_plan

RIGHT = (Outcome.CLEAN, Outcome.DISCOVERED)

TWO = (Machine("a", 1e9), Machine("a", 1e9))


def test_a_rank_that_goes_on_changes_nothing_that_another_still_reads() -> None:
    """The emulator passed tensors on without a copy; their owner then updated them in place."""

    def gather_and_update(comm: Comm) -> float:
        mine = torch.ones(100)
        seen = 0.0
        for _ in range(200):
            seen += float(comm.all_gather(mine, 0, (100, 100), "padded").sum())
            mine.add_(1)
        return seen

    total = 200 * sum(range(1, 201))
    assert run_ranks(2, gather_and_update) == [total, total]


@pytest.mark.parametrize("seed", range(8))
def test_every_collective_that_a_rank_issues_is_waited_for(seed: int) -> None:
    """A rank without a share of the next operator read no result, and never waited.

    Its optimizer could then update a parameter that other ranks had yet to gather.
    """
    recipe = Recipe(
        params={"p0": (3, 4), "p1": (3,)}, inputs={"x0": ((2, 4), "float")}, devices=TWO,
        lines=("v0 = F.linear(x0, self.p0, self.p1)", "loss = v0.flip(0).mean()", "return loss"),
    )  # fmt: skip
    case = make_case(recipe.model(), recipe.batch())
    plan = random_plan(case, 4, seed)
    for rank in range(4):
        emitted = emit(plan, rank, torch.device("cpu"))
        for code in (emitted.forward, emitted.backward):
            for node in code.nodes:
                assert node.target != "issue" or _waited(node)


def _waited(node: fx.Node) -> bool:
    """Return whether a result is awaited, or another collective's result made from it."""
    return node.target == "wait" or any(map(_waited, node.users))


@pytest.mark.slow
def test_writes_into_a_view_keep_the_strides_of_the_base() -> None:
    """The backward of the product takes a view of the gradient, which was permuted."""
    recipe = Recipe(
        params={"p0": (2, 3)}, inputs={"x0": ((2, 2, 2), "float")}, devices=TWO,
        lines=("v0 = torch.einsum('bik,ko->bio', x0, self.p0)", "v1 = v0.permute((1, 0, 2))",
               "v1.add_(v1)", "loss = v1.mean()", "return loss"),
    )  # fmt: skip
    assert check(recipe) is Outcome.CLEAN


def test_a_batch_that_the_forward_writes_into_is_written_within_the_step_alone() -> None:
    recipe = Recipe(
        params={"p0": (4, 3)}, inputs={"x0": ((5, 4), "float")}, devices=TWO,
        lines=("v0 = x0[:, 1:]", "v0.mul_(0.5)", "loss = (x0 @ self.p0).mean()", "return loss"),
    )  # fmt: skip
    assert check(recipe) in RIGHT


def test_dropout_of_an_input_has_no_noise_in_the_reference() -> None:
    """Dropout of an input without gradient is another operator, which may lack the probability."""
    recipe = Recipe(
        params={"p0": (3,)}, inputs={"x0": ((3,), "float")}, devices=TWO,
        lines=("v0 = F.dropout(x0)", "loss = (v0 * self.p0).sum()", "return loss"),
    )  # fmt: skip
    assert check(recipe) is Outcome.CLEAN


@functools.lru_cache
def _positions(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


class Caching(nn.Module):
    """Caches positions unless compiled, like the vision models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = _positions.__wrapped__ if torch.compiler.is_compiling() else _positions
        return (self.linear(x) + made(4)).square().mean()


def test_capturing_leaves_no_fake_tensor_in_a_models_cache() -> None:
    model, x = Caching(), torch.randn(3, 4)
    capture(model, x)
    assert model(x).item() > 0
