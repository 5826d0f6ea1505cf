"""Bags of embeddings have the results of torch's operator, and are split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.embedding_bag import embedding_bag
from hap.capture.tracing import capture
from hap.rule_sources import with_rules
from tests.random_plans import make_case, random_plan, verdict

STARTS = [0, 3, 3, 8, 10]


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *itertools.product(("sum", "mean", "max"), ("equal", "offsets", "last offset")),
        *itertools.product(("sum",), ("weights", "equal weights")),  # torch has them for sums alone
    ],
)
def test_results_and_gradients_are_those_of_torch(
    mode: str, kind: str, padding: int | None
) -> None:
    torch.manual_seed(0)
    wide: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    table = torch.randn(10, 5, **wide)
    given: dict[str, Any] = {"mode": mode, "padding_idx": padding}
    if "equal" in kind:
        index = torch.randint(10, (7, 4))
        index[2], index[3] = 3, 9  # bags of padding alone
    else:
        index = torch.randint(10, (20,))
        index[8:10] = 3
        last = kind == "last offset"
        given["offsets"] = torch.tensor([*STARTS, 20] if last else STARTS)
        given["include_last_offset"] = last
    leaves = [table]
    if "weights" in kind:
        given["per_sample_weights"] = torch.randn(index.shape, **wide)
        leaves.append(given["per_sample_weights"])
    wanted, found = (f(index, table, **given) for f in (F.embedding_bag, embedding_bag))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    for ours, theirs in zip(
        *(torch.autograd.grad(r, leaves, weights) for r in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_empty_bags_are_zeros() -> None:
    none = torch.empty(3, 0, dtype=torch.int64)
    for mode in ("sum", "mean", "max"):
        found = embedding_bag(none, torch.randn(4, 2), mode=mode)
        assert torch.equal(found, torch.zeros(3, 2)), mode


class Ranking(nn.Module):
    """Bags of equal and of unequal sizes, as a model of recommendations has."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.equal = nn.EmbeddingBag(10, 6, mode=mode, padding_idx=0)
        self.bags = nn.EmbeddingBag(12, 6, mode=mode)
        self.head = nn.Linear(12, 1)

    def forward(self, index: Tensor, flat: Tensor, starts: Tensor) -> Tensor:
        bags = torch.cat([self.equal(index), self.bags(flat, starts)], 1)
        return self.head(bags).square().mean()


@pytest.mark.parametrize(("mode", "seed"), [*itertools.product(("sum", "mean", "max"), range(2))])
def test_plans_are_verified(mode: str, seed: int) -> None:
    torch.manual_seed(0)
    batch = torch.randint(10, (5, 4)), torch.randint(12, (20,)), torch.tensor(STARTS)
    model = Ranking(mode)
    case = make_case(model, batch, graph=with_rules(capture(model, batch), {}))
    assert verdict(case, random_plan(case, 2 + seed, seed)).ok
