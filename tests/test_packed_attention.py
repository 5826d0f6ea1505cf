"""Attention inside of the parts of a packed sequence, and features that are added to an image's tokens."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage import case_of, entries
from hap.capture import deepstack
from hap.capture.fixed_entries import fix_entries
from hap.capture.packed_attention import packed_attention, packed_in_one_call
from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.ir.graph import Graph
from tests.random_plans import make_case, random_plan, verdict
from tests.test_coverage import ONE_LAYER, SEEING, configured


def one_by_one(q: Tensor, k: Tensor, v: Tensor, begins: list[int], **options: Any) -> Tensor:
    parts = []
    for begin, end in itertools.pairwise(begins):
        part = [t[:, :, begin:end] for t in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*part, **options))
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    "begins", [[0, 3, 6, 9], [0, 2, 5, 9], [0, 3, 4, 7, 8, 9], [0, 3, 3, 6, 9], [0, 9]]
)
def test_packed_attention_is_attention_of_each_part(
    begins: list[int], heads: int, causal: bool
) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 4, 9, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, heads, 9, 8, dtype=torch.float64)
    found, weights = packed_attention(
        nn.Module(), q, k, v, None, scaling=0.3, cu_seq_lens_q=torch.tensor(begins),
        is_causal=causal,
    )  # fmt: skip
    expected = one_by_one(q, k, v, begins, scale=0.3, is_causal=causal, enable_gqa=heads != 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert weights is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_mask": torch.zeros(9, 9)}, "a mask"),
        ({"attention_mask": None, "softcap": 3.0}, "softcap"),
        ({"attention_mask": None, "sliding_window": 2}, "sliding_window"),
    ],
)
def test_other_attention_over_packed_sequences_is_refused(
    options: dict[str, Any], said: str
) -> None:
    q = torch.zeros(1, 2, 9, 4)
    with pytest.raises(ModelError, match=said):
        packed_attention(nn.Module(), q, q, q, cu_seq_lens_q=torch.tensor([0, 9]), **options)


def attentions(graph: Graph) -> int:
    """Return the number of attentions, without those that the backward computes again."""
    return sum(n.op == "hap.sdpa.default" and n.name not in graph.backward for n in graph.nodes)


@pytest.mark.slow
def test_a_captured_step_has_one_attention_per_layer() -> None:
    """One layer reads images, one reads text."""
    case = case_of(configured(entries()["qwen2-vl"], SEEING))
    assert attentions(case.graph) == 2
    assert case.model.config.vision_config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.slow
def test_windows_of_unequal_size_and_checkpoints_are_verified() -> None:
    """An image of 3 x 3 merged patches has windows of four sizes; one layer reads it, one reads text."""
    eye = {"depth": 1, "fullatt_block_indexes": []}
    entry = configured(entries()["qwen2.5-vl"], {"text_config": ONE_LAYER, "vision_config": eye})
    torch.manual_seed(0)
    model, batch = entry.tiny()
    rows, side = len(batch["input_ids"]), 6
    image = model.config.image_token_id
    ids = torch.randint(3, 50, (rows, side**2 // 4 + 8))
    ids[:, : side**2 // 4] = image
    batch |= {
        "input_ids": ids, "labels": ids.masked_fill(ids == image, -100),
        "pixel_values": torch.randn(rows * side**2, batch["pixel_values"].shape[1]),
        "image_grid_thw": torch.tensor([[1, side, side]] * rows),
        "position_ids": torch.arange(ids.shape[1]).expand(3, *ids.shape).contiguous(),
    }  # fmt: skip
    model.gradient_checkpointing_enable()
    graph = capture(model, fix_entries(batch, entry.fixed))
    assert attentions(graph) == 2
    assert model.config.vision_config._attn_implementation == "sdpa"
    case = make_case(model, batch, None, partial(torch.optim.SGD, lr=0.01), graph)
    seen = verdict(case, random_plan(case, 3, 3))
    assert seen.ok, seen.first_bad


def test_modules_without_a_configuration_stay_as_they_are() -> None:
    class Packed(nn.Module):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            return x

    module = Packed()
    with packed_in_one_call(module):
        assert not hasattr(module, "config")


def test_features_are_added_to_the_tokens_that_a_mask_selects() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64)
    mask = torch.rand(3, 5) > 0.5
    features = torch.randn(int(mask.sum()), 4, dtype=torch.float64)
    expected = hidden.clone()
    expected[mask, :] = hidden[mask, :] + features

    class Text(nn.Module):
        def _deepstack_process(self, hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
            raise AssertionError

    module = Text()
    with deepstack.features_scattered(module):
        found = module._deepstack_process(hidden, mask, features)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        module._deepstack_process(hidden, mask, features)
