"""Language models of transformers: encoders, decoders, encoder-decoders, mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import pretrained

SEQUENCE = {6: 9, 64: 128, 8: 4}
"""Rows of a batch -> tokens per row."""


def tokens(config: Any, rows: int) -> torch.Tensor:
    return torch.randint(2, config.vocab_size, (rows, SEQUENCE[rows]))


def causal(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Text whose next token is asked for."""
    text = tokens(config, rows)
    return {"input_ids": text, "labels": text.clone()}


def masked(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Padded text of which some tokens are asked for."""
    text = tokens(config, rows)
    real = torch.ones_like(text)
    real[:, -2:] = torch.arange(rows).remainder(2).unsqueeze(-1)  # every second row is padded
    wanted = torch.where(torch.arange(SEQUENCE[rows]) % 3 == 0, text, -100)
    return {"input_ids": text, "attention_mask": real, "labels": wanted}


def replaced(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Text of which some tokens were replaced: which ones?"""
    text = tokens(config, rows)
    return {"input_ids": text, "labels": (text % 5 == 0).long()}


def translated(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Text, and the text that it becomes, which is shorter."""
    return {"input_ids": tokens(config, rows), "labels": tokens(config, rows)[:, :-2].contiguous()}


SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}

ENCODERS = (
    pretrained(
        "bert", "encoder", "absolute positions, tied vocabulary",
        "BertForMaskedLM", "BertConfig", masked, tiny=SMALL,
    ),
    pretrained(
        "roberta", "encoder", "positions made from the padding, vocabulary 50265",
        "RobertaForMaskedLM", "RobertaConfig", masked,
        tiny=SMALL, full={"vocab_size": 50265, "max_position_embeddings": 514},
    ),
    pretrained(
        "distilbert", "encoder", "half the layers",
        "DistilBertForMaskedLM", "DistilBertConfig", masked,
        tiny={
            "vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 40,
            "max_position_embeddings": 32,
        },
    ),
    pretrained(
        "electra", "encoder", "embeddings narrower than the layers, a loss per token",
        "ElectraForPreTraining", "ElectraConfig", replaced,
        tiny=SMALL | {"embedding_size": 10},
        full={"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    pretrained(
        "deberta-v2", "encoder", "attention to relative positions, both ways",
        "DebertaV2ForMaskedLM", "DebertaV2Config", masked,
        both={"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
              "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False},
        tiny=SMALL,
        full={"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    pretrained(
        "albert", "shared layers", "one layer's parameters used in all layers",
        "AlbertForMaskedLM", "AlbertConfig", masked,
        tiny=SMALL | {"embedding_size": 10},
        full={"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
)  # fmt: skip

DECODERS = (
    pretrained(
        "gpt2", "decoder", "learned positions, products as 1x1 convolutions",
        "GPT2LMHeadModel", "GPT2Config", causal,
        tiny={"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    pretrained(
        "gpt-neox", "decoder", "rotary embeddings on a part of each head, parallel branches",
        "GPTNeoXForCausalLM", "GPTNeoXConfig", causal,
        tiny=SMALL, full={"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8,
                          "intermediate_size": 8192, "vocab_size": 50304},
    ),
    pretrained(
        "opt", "decoder", "positions by counting the mask",
        "OPTForCausalLM", "OPTConfig", causal,
        tiny={"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "ffn_dim": 40,
              "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 24},
    ),
    pretrained(
        "bloom", "decoder", "ALiBi: a bias by distance",
        "BloomForCausalLM", "BloomConfig", causal,
        tiny={"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 4},
        full={"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    ),
    pretrained(
        "llama", "decoder", "rotary embeddings, gated feed-forward",
        "LlamaForCausalLM", "LlamaConfig", causal, tiny=SMALL,
    ),
    pretrained(
        "mistral", "decoder", "grouped queries, a sliding window",
        "MistralForCausalLM", "MistralConfig", causal, tiny=GROUPED | {"sliding_window": 4},
        full={"sliding_window": 64},
    ),
    pretrained(
        "qwen2", "decoder", "grouped queries with biases",
        "Qwen2ForCausalLM", "Qwen2Config", causal, tiny=GROUPED,
        full={"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
              "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True},
    ),
    pretrained(
        "gemma", "decoder", "one key and value head, wide heads, scaled embeddings",
        "GemmaForCausalLM", "GemmaConfig", causal,
        tiny=GROUPED | {"num_key_value_heads": 1, "head_dim": 8},
        full={"hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
              "num_key_value_heads": 1, "intermediate_size": 16384},
    ),
    pretrained(
        "phi", "decoder", "parallel branches of one norm",
        "PhiForCausalLM", "PhiConfig", causal,
        tiny=SMALL | {"hidden_size": 32},
    ),
    pretrained(
        "mamba", "decoder", "a state space model: convolutions along the text, a scan",
        "MambaForCausalLM", "MambaConfig", causal,
        tiny={"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 4,
              "time_step_rank": 3},
        full={"num_hidden_layers": 2},
    ),
    pretrained(
        "falcon", "decoder", "queries of all heads with one key, fused in one product",
        "FalconForCausalLM", "FalconConfig", causal,
        tiny={"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
        full={"num_hidden_layers": 32},
    ),
)  # fmt: skip

PAIRS = (
    pretrained(
        "t5", "encoder-decoder", "relative position biases, shared by the layers",
        "T5ForConditionalGeneration", "T5Config", translated,
        tiny={"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2,
              "num_heads": 4, "relative_attention_num_buckets": 8,
              "relative_attention_max_distance": 16},
        full={"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        both={"decoder_start_token_id": 0},
    ),
    pretrained(
        "bart", "encoder-decoder", "learned positions with an offset, a bias of the logits",
        "BartForConditionalGeneration", "BartConfig", translated,
        tiny={"vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
              "decoder_ffn_dim": 40, "max_position_embeddings": 32},
        full={"d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
              "encoder_attention_heads": 12, "decoder_attention_heads": 12,
              "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    ),
)  # fmt: skip

EXPERTS = (
    pretrained(
        "mixtral", "mixture of experts", "two of eight experts per token",
        "MixtralForCausalLM", "MixtralConfig", causal,
        tiny=GROUPED | {"num_local_experts": 4}, full={"num_hidden_layers": 2},
    ),
    pretrained(
        "qwen2-moe", "mixture of experts", "experts beside one that all tokens share",
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", causal,
        tiny=GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                        "shared_expert_intermediate_size": 20},
        full={"num_hidden_layers": 4},
    ),
    pretrained(
        "qwen3-moe", "mixture of experts", "eight of 128 experts per token, norms of queries and keys",
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", causal,
        tiny=GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                        "head_dim": 8},
        full={"num_hidden_layers": 4},
    ),
    pretrained(
        "gpt-oss", "mixture of experts", "experts with biases, attention with sinks and a sliding window",
        "GptOssForCausalLM", "GptOssConfig", causal,
        tiny=GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        full={"num_hidden_layers": 2, "num_local_experts": 32},
    ),
    pretrained(
        "llama4", "mixture of experts", "rotary embeddings by complex numbers, all experts on all tokens",
        "Llama4ForCausalLM", "Llama4TextConfig", causal,
        tiny=GROUPED | {"num_local_experts": 4, "head_dim": 6, "intermediate_size_mlp": 40,
                        "attention_chunk_size": 4},
        full={"num_hidden_layers": 4, "num_local_experts": 4, "pad_token_id": 0},
    ),
    pretrained(
        "deepseek-v3", "mixture of experts", "latent attention, experts chosen by groups",
        "DeepseekV3ForCausalLM", "DeepseekV3Config", causal,
        tiny=SMALL | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                      "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 10,
                      "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6},
        full={"num_hidden_layers": 4, "n_routed_experts": 64},
    ),
)  # fmt: skip

TEXT = (*ENCODERS, *DECODERS, *PAIRS, *EXPERTS)
