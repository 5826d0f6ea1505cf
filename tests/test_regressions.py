"""Failures that fuzzing found, each as small as it could be made, and what was wrong."""

from __future__ import annotations

import torch

from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from tests.fuzz.check import Outcome, check
from tests.fuzz.recipe import Machine, Recipe

TWO = (Machine("a", 1e9), Machine("a", 1e9))


def test_a_rank_that_goes_on_changes_nothing_that_another_still_reads() -> None:
    """The emulator gave tensors away; their owner then updated them in place."""

    def gather_and_update(comm: Comm) -> float:
        mine = torch.ones(100)
        seen = 0.0
        for _ in range(200):
            seen += float(comm.all_gather(mine, 0, (100, 100), "padded").sum())
            mine.add_(1)
        return seen

    total = 200 * sum(range(1, 201))
    assert run_ranks(2, gather_and_update) == [total, total]


def test_dropout_of_an_input_has_no_noise_in_the_reference() -> None:
    """What needs no gradient is dropped by another operator, which may be given no probability."""
    recipe = Recipe(
        params={"p0": (3,)}, inputs={"x0": ((3,), "float")}, devices=TWO,
        lines=("v0 = F.dropout(x0)", "loss = (v0 * self.p0).sum()", "return loss"),
    )  # fmt: skip
    assert check(recipe) is Outcome.CLEAN
