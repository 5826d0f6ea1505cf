"""Calls of einops are traced as calls: its patterns are not parsed by the tracer."""

from __future__ import annotations

import einops
import pytest
import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from hap.capture.dynamo_private import dynamo_graph
from tests.random_plans import make_case, random_plan, verdict


class Attention(nn.Module):
    """Attention over patches, in the manner of many vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2), nn.Linear(12, 8)
        )
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        first = einops.repeat(self.first, "1 n d -> b n d", b=len(x))
        x, shapes = einops.pack([first, x], "b * d")
        q, k, v = einops.rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=2)
        weights = einops.einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        out = einops.rearrange(weights @ v, "b h n d -> b n (h d)")
        start, rest = einops.unpack(out, shapes, "b * d")
        widest = einops.reduce(rest, "b n d -> b d", torch.amax)
        return einops.reduce(widest.square(), "b d -> ", "mean") + start.mean()


def test_a_pattern_is_one_call() -> None:
    torch.manual_seed(0)
    traced = dynamo_graph(Attention(), (torch.randn(4, 3, 6, 6),))
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called.count(einops.rearrange) == 2
    assert {einops.repeat, einops.einsum} <= {*called}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_plans_are_verified(seed: int) -> None:
    torch.manual_seed(0)
    case = make_case(Attention(), torch.randn(6, 3, 4, 4))
    assert verdict(case, random_plan(case, 2 + seed % 2, seed)).ok
