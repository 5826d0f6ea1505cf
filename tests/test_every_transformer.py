"""Every model of transformers of some kinds is built small, verified and listed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import every_transformer, small_configurations
from benchmarks.coverage_document import every_transformer as section
from benchmarks.coverage_results import KINDS
from benchmarks.transformer_batches import BATCHES

transformers: Any = pytest.importorskip("transformers")


def test_sizes_follow_from_the_names_of_fields() -> None:
    mixture = small_configurations.small(transformers.Qwen3MoeConfig)
    assert (mixture.hidden_size, mixture.num_experts, mixture.vocab_size) == (32, 4, 61)
    latent = small_configurations.small(transformers.DeepseekV3Config)
    assert latent.num_key_value_heads == latent.num_attention_heads
    hybrid = small_configurations.small(transformers.Gemma3TextConfig)
    assert len({*hybrid.layer_types}) == hybrid.num_hidden_layers == 2


def test_each_kind_has_a_table_a_batch_and_a_name() -> None:
    assert every_transformer.TABLES.keys() == BATCHES.keys() == KINDS.keys()
    assert all("Config" in name for kind in KINDS for name in every_transformer.names(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    "one", [("causal", "GPTNeoConfig"), ("sentences", "GPT2Config"), ("described", "LlavaConfig")]
)
def test_an_architecture_is_verified_in_a_fork(one: tuple[str, str]) -> None:
    ((kind, name, found),) = every_transformer._found([one])
    assert (kind, name) == one
    assert found["ok"], found["reason"]
    assert found["error"] < 1e-12


@pytest.mark.slow
def test_a_model_that_is_not_small_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_transformer, "LARGEST", 100)
    found = every_transformer.verify("causal", "GPT2Config")
    assert "parameters at the sizes" in found["alone"]


def test_results_become_a_section() -> None:
    results: dict[str, Any] = {
        "transformers": {
            "version": {"number": "5.0"}, "listed": {"causal": 9, "masked": 1, "pairs": 1},
        },
        "causal": {
            "AConfig": {"ok": True, "error": 2e-15}, "BConfig": {"alone": "too small"},
            "CConfig": {"ok": False, "reason": "c.py:3: no"},
        },
    }  # fmt: skip
    text = section(results)
    assert "| decoder | 9 | 3 | 1 | 1 | 1 |" in text
    assert "| CConfig | decoder | c.py:3: no |" in text
    assert "error is 2e-15" in text
    assert section({}) == ""
