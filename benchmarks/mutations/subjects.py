"""Models and plans to mutate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.mutations.independent import Expected, expect
from hap.ir.plan import Plan
from tests.random_plans import Case, benchmark_case, make_case, random_plan
from tests.random_stages import random_staged_plan
from tests.test_two_axes import random_mesh_plan


class Normed(nn.Module):
    """A small convolutional network with batch norm, and buffers that are integer and boolean."""

    steps: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu().mean((2, 3))
        logits = self.head(hidden)
        if self.training:
            self.steps += 1
            self.seen.copy_(self.seen | (logits.detach().sum(0) > 0))
        return nn.functional.cross_entropy(logits, labels)


class Subject(NamedTuple):
    """A plan as its file's data, with its model and the results of one device."""

    name: str
    data: dict[str, Any]
    case: Case
    expected: Expected


MODELS = ("mlp", "vgg19", "vit", "normed")
STAGED = ("mlp", "vit")
"""Models whose step can be run in microbatches, without dropout."""
GROUPS = ((1, 1), (2, 1), (1, 2, 1))


def subjects(seeds: int = 3) -> Iterator[Subject]:
    """Yield random plans of four models over one mesh axis and over two, and with stages."""
    for model in MODELS:
        case, expected = _case(model)
        for seed in range(seeds):
            plans: dict[str, Plan] = {
                "one axis": random_plan(case, 2 + seed % 3, 40 + seed),
                "two axes": random_mesh_plan(case, 2, 2, 40 + seed),
            }
            if model in STAGED:
                plans["stages"] = random_staged_plan(case, GROUPS[seed % len(GROUPS)], 40 + seed)
            for axes, plan in plans.items():
                yield Subject(f"{model}, {axes}, {seed}", plan.to_json(), case, expected)


@cache
def _case(model: str) -> tuple[Case, Expected]:
    if model == "normed":
        torch.manual_seed(0)
        images, labels = torch.randn(12, 3, 6, 6), torch.randint(5, (12,))
        case = make_case(Normed(), (images, labels))
    else:
        case = benchmark_case(model, "tiny")
    return case, expect(case, seed=991)
