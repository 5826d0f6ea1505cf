"""Adapters of peft for a language model of transformers: few parameters are trained, the others are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.entry import Built, Entry
from benchmarks.zoo.optional import package

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def adapted(
    name: str, brings: str, kind: str, options: Mapping[str, Any], *, checkpoints: bool = False
) -> Entry:
    """An entry for Llama with an adapter.

    Args:
        kind: the adapter's configuration in peft, and ``options`` of it.
        checkpoints: recompute the layers, whose input then asks for a gradient.
    """

    def build(sizes: Mapping[str, Any], rows: int, length: int) -> Built:
        transformers, peft = package("transformers"), package("peft")
        config = transformers.LlamaConfig(**sizes)
        model = transformers.LlamaForCausalLM(config)
        if checkpoints:
            model.activation_checkpointing_enable()
            model.enable_input_require_grads()
        adapter = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        text = torch.randint(3, config.vocab_size, (rows, length))
        batch = {"input_ids": text, "labels": text.clone()}
        return peft.get_peft_model(model, adapter).train(), batch

    return Entry(
        name=name, family="adapters", brings=brings, tiny=partial(build, TINY, 6, 8),
        full=partial(build, {}, 64, 128), requires="peft",
    )  # fmt: skip


ADAPTERS = (
    adapted("lora", "low-rank updates beside frozen products, with dropout", "LoraConfig",
            {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}),
    adapted("lora, recomputed", "layers recomputed, an embedding that asks for a gradient", "LoraConfig",
            {"r": 4, "target_modules": ["q_proj", "v_proj"]}, checkpoints=True),
    adapted("dora", "norms of whole updated weights", "LoraConfig",
            {"r": 4, "use_dora": True, "target_modules": "all-linear"}),
    adapted("ia3", "scales of activations", "IA3Config",
            {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    adapted("oft", "orthogonal transforms of blocks", "OFTConfig",
            {"r": 0, "oft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    adapted("prompt tuning", "trained tokens before the text", "PromptTuningConfig",
            {"num_virtual_tokens": 4}),
)  # fmt: skip
