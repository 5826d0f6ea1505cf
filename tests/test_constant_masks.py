"""Attention masks that every step computes alike become a flag, or nothing; all others stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import gpt2, llama
from hap.capture import constant_masks
from hap.capture.tracing import capture
from hap.ir.graph import Graph
from tests.random_plans import make_case, random_plan, verdict

LENGTH = 6


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)


def positions(x: Tensor) -> Tensor:
    """Return the mask as libraries make it: from positions, for each sequence."""
    at = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    same = (at.diff(dim=-1, prepend=at[:, :1] - 1) != 1).cumsum(-1)
    mask = at[:, None, :] <= at[:, :, None]
    return (mask & (same[:, None, :] == same[:, :, None]))[:, None]


MASKS = {
    "lower triangle": (lambda x: ones(x).tril(), "causal"),
    "positions": (positions, "causal"),
    "minus infinity": (lambda x: torch.full(ones(x).shape, -torch.inf).triu(1), "causal"),
    "least number": (
        lambda x: torch.zeros_like(ones(x), dtype=x.dtype).masked_fill(
            ones(x).triu(1), torch.finfo(x.dtype).min
        ), "causal",
    ),
    "all": (lambda x: ones(x)[None, None].expand(x.shape[0], 1, -1, -1), "none"),
    "zeros": (lambda x: ones(x).to(x.dtype) - 1, "none"),
    "window": (lambda x: ones(x).tril() & ones(x).triu(-2), "mask"),
    "upper triangle": (lambda x: ones(x).triu(), "mask"),
    "bias": (lambda x: ones(x).tril().to(x.dtype), "mask"),
    "one row": (lambda x: ones(x)[:1].cumsum(-1) < 4, "mask"),
    "data": (lambda x: ones(x).tril() & (x[:, None, :, :1] < 9), "mask"),
    "random": (lambda x: ones(x).tril() & (torch.rand_like(x[:, None, :, :1]) < 2), "mask"),
}  # fmt: skip


class Attends(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mask = MASKS[kind][0]
        # The gradient of a key's bias is rounding alone, which Adam divides by its own size.
        self.project = nn.Linear(8, 24, bias=False)
        self.register_buffer("stored", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        q, k, v = self.project(x).view(b, length, 2, 3, 4).permute(3, 0, 2, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return out.square().sum()


def seen(graph: Graph) -> set[str]:
    """Return the masks of all attention in a graph."""
    found = set()
    for node in graph.nodes:
        if node.op.startswith("hap.sdpa"):
            masked = len(node.inputs) in (4, 7)
            causal = any(a is True for a in node.args)
            found.add("mask" if masked else "causal" if causal else "none")
    return found


@pytest.mark.parametrize("kind", MASKS)
def test_constant_masks_become_flags(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Attends(kind).double(), torch.randn(4, LENGTH, 8, dtype=torch.float64)
    case = make_case(model, x)
    assert seen(case.graph) == {MASKS[kind][1]}
    if MASKS[kind][1] != "mask":
        assert not [n for n in case.graph.nodes if not n.inputs], "what made the mask is gone"
    for world in (2, 3):
        found = verdict(case, random_plan(case, world, seed=1))
        assert found.ok, found.first_bad


class Stored(Attends):
    """The mask is a buffer, which a user may change between steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = lambda x: self.stored
        return super().forward(x)


def test_a_mask_in_a_buffer_stays() -> None:
    assert seen(capture(Stored("all"), torch.randn(4, LENGTH, 8))) == {"mask"}


class Crossed(nn.Module):
    """Fewer queries than keys: a flag would count both from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)[:, None]
        mask = ones(x).tril()[:4]
        return F.scaled_dot_product_attention(y[:, :, :4], y, y, attn_mask=mask).square().sum()


def test_a_mask_of_fewer_queries_than_keys_stays() -> None:
    assert seen(capture(Crossed(), torch.randn(4, LENGTH, 8))) == {"mask"}


@pytest.mark.slow
def test_causal_models_of_a_library_have_no_mask() -> None:
    for module in (gpt2, llama):
        model = module.build(**module.TINY | {"layers": 1})
        assert seen(capture(model, module.tiny_batch())) == {"causal"}


def test_masks_are_looked_at_in_compact_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of all sequences is larger than what may be computed; that of one is not."""
    monkeypatch.setattr(constant_masks, "LARGEST", 2 * LENGTH**2)
    x = torch.randn(8, LENGTH, 8)
    assert seen(capture(Attends("positions"), x)) == {"causal"}
    monkeypatch.setattr(constant_masks, "LARGEST", LENGTH**2 - 1)
    assert seen(capture(Attends("positions"), x)) == {"mask"}
