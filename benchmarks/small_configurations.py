"""Configurations of transformers made small by the names of their fields."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_encoder_layers",
                     "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_encoder_attention_heads",
                     "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk", "n_group",
                     "type_vocab_size"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "encoder_ffn_dim",
                     "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                     "qk_rope_head_dim", "rotary_dim", "time_step_rank", "sliding_window",
                     "attention_window"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "state_size", "num_buckets",
                     "relative_attention_num_buckets", "mamba_d_state"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank",
                     "kv_lora_rank", "embedding_size", "mamba_d_head"), 16),
    "image_size": 32, "patch_size": 8, "vocab_size": 61, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "mamba_n_heads": 4, "mamba_expand": 2, "depth": 2,
    **dict.fromkeys(("image_token_id", "image_token_index"), 60), "video_token_id": 59, "audio_token_id": 58,
    **dict.fromkeys(("projection_dim", "out_hidden_size"), 32), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Name of a field -> its small value; whole numbers alone are replaced."""

OFF = {
    "layerdrop": 0.0, "speech_encoder_layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip
"""Name of a field that makes the forward depend on numbers that Python draws -> its value without."""

ONCE = ("depths", "layer_depths", "num_blocks", "stage_num_blocks")
"""Names of fields with a number of layers for each stage; each has one."""

_SWIN: dict[str, Any] = {
    "patch_size": 4, "window_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "encoder_stride": 8
}  # fmt: skip

_CONVNEXT: dict[str, Any] = {
    "num_hidden_layers": None, "num_stages": None, "patch_size": 4, "hidden_sizes": [16, 24, 32, 48]
}  # fmt: skip

OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("SwinConfig", "Swinv2Config", "DonutSwinConfig"), _SWIN),
    **dict.fromkeys(("ConvNextConfig", "ConvNextV2Config"), _CONVNEXT),
    "ASTConfig": {"max_length": 64, "num_mel_bins": 32},
    "BambaConfig": {"attn_layer_indices": [1]},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "BitConfig": {"embedding_size": 64},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "CohereCompassTextConfig": {"layer_types": None},
    "DPTConfig": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16,
    },
    "Data2VecAudioConfig": {"mask_time_prob": 0.0},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "DeiTConfig": {"encoder_stride": 8},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {"num_key_value_heads": 4},
    "EfficientNetConfig": {"width_coefficient": 0.3, "depth_coefficient": 0.3, "hidden_dim": 384},
    "EsmConfig": {"vocab_size": 61, "pad_token_id": 0, "mask_token_id": 2},
    "EsmcConfig": {"num_key_value_heads": 4},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "FunnelConfig": {"num_hidden_layers": None, "block_sizes": [1, 1], "d_head": 8, "d_inner": 48},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 48,
    },
    "Gemma4TextConfig": {
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "GraniteSpeech5EncoderConfig": {"context_size": 16},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "LayoutLMv3Config": {"coordinate_size": 4, "shape_size": 8},
    "LevitConfig": {"image_size": 64, "patch_size": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LiltConfig": {"hidden_size": 48},
    "LongcatFlashConfig": {"head_dim": 4},
    "LukeConfig": {"entity_vocab_size": 11},
    "MPNetConfig": {
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "relative_attention_num_buckets": None,
    },
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "MinistralConfig": {"head_dim": 8},
    "MobileViTV2Config": {"image_size": 64, "patch_size": 2},
    "MoonshineConfig": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "NemotronConfig": {"num_key_value_heads": 2},
    "NemotronHConfig": {"layer_types": None},
    "NeoMMEConfig": {"head_dim": 16},
    "NeoMMETextConfig": {"head_dim": 16},
    "ProphetNetConfig": {"num_hidden_layers": None},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_shape": [2, 4],
        "axial_pos_embds_dim": [16, 16],
    },
    "SqueezeBertConfig": {"embedding_size": 32},
    "TextNetConfig": {"image_size": [64, 64]},
    "ViTConfig": {"encoder_stride": 8},
    "Wav2Vec2BertConfig": {"vocab_size": 61},
    "Wav2Vec2ConformerConfig": {"vocab_size": 61},
    "WhisperConfig": {"decoder_start_token_id": 2, "max_source_positions": 32},
    "XLNetConfig": {"max_position_embeddings": None},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "ZambaConfig": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"mode": "train", "return_last_states": False, "chunk_size": 4},
}
"""Configuration -> fields with values of their own; ``None``: the field keeps its usual value."""


def small(kind: type) -> Any:
    """Return a configuration of that class with small sizes."""
    usual: Any = kind()
    given = {
        name: value for name, value in SIZES.items()
        if isinstance(_usual(usual, name), int) and _can_be_set(kind, name)
    }  # fmt: skip
    parts = {name: getattr(usual, name, None) for name in getattr(kind, "sub_configs", {})}
    given |= {name: small(type(part)) for name, part in parts.items() if part is not None}
    if "kv_lora_rank" in given:  # latent attention has no groups, and names the widths of its heads
        given |= {"num_key_value_heads": None, "head_dim": None}
        if hasattr(usual, "num_key_value_heads"):
            given["num_key_value_heads"] = given["num_attention_heads"]
    types = getattr(usual, "layer_types", None)
    if isinstance(types, list) and _can_be_set(kind, "layer_types"):
        given["layer_types"] = [types[0], *(t for t in types[::-1] if t != types[0]), types[0]][:2]
    given |= {name: value for name, value in OFF.items() if hasattr(usual, name)}
    for name in ONCE:
        if isinstance(stages := getattr(usual, name, None), list | tuple):
            given[name] = [1] * len(stages)
    given |= OWN.get(kind.__name__, {})
    return kind(**{name: value for name, value in given.items() if value is not None})


def _usual(config: Any, name: str) -> Any:
    """Return the default of a field; a configuration has none of its own for one that differs by layer."""
    own = getattr(type(config), name, None)
    return own if isinstance(own, int) else getattr(config, name, None)


def _can_be_set(kind: Any, name: str) -> bool:
    own = getattr(kind, kind.attribute_map.get(name, name), None)
    return not isinstance(own, property) or own.fset is not None
