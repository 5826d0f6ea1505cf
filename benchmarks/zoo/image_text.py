"""Language models of transformers that read images: features of the image replace embeddings of its tokens."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import pretrained

IMAGE = 60
"""The number of an image's tokens in the tiny models."""


def described(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Prompts that begin with an image each, and go on in text; the text is the target."""
    image = getattr(config, "image_token_id", IMAGE)
    tokens = _tokens_of_an_image(config)
    words = config.text_config.vocab_size
    length = tokens + (8 if rows < 32 else 128)
    text = torch.randint(3, min(50, words) if rows < 32 else 30000, (rows, length))
    text[:, :tokens] = image
    size = config.vision_config.image_size
    size = size if isinstance(size, int) else size[0]
    batch = {
        "input_ids": text, "pixel_values": torch.randn(rows, 3, size, size),
        "labels": text.masked_fill(text == image, -100),
    }  # fmt: skip
    if config.model_type == "gemma3":
        batch["token_type_ids"] = (text == image).long()
    if config.model_type == "paligemma":
        batch["token_type_ids"] = (text != image).long()
    return batch


def packed(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Prompts that begin with an image each; the patches of all images are one packed sequence."""
    eye, tiny = config.vision_config, rows < 32
    side = 2 * eye.spatial_merge_size if tiny else 32
    tokens = (side // eye.spatial_merge_size) ** 2
    text = torch.randint(3, 50 if tiny else 30000, (rows, tokens + (8 if tiny else 128)))
    text[:, :tokens] = config.image_token_id
    values = eye.in_channels * eye.temporal_patch_size * eye.patch_size**2
    return {
        "input_ids": text, "pixel_values": torch.randn(rows * side**2, values),
        "image_grid_thw": torch.tensor([[1, side, side]] * rows),
        "position_ids": torch.arange(text.shape[1]).expand(3, *text.shape).contiguous(),
        "labels": text.masked_fill(text == config.image_token_id, -100),
    }  # fmt: skip


def _tokens_of_an_image(config: Any) -> int:
    for name in ("mm_tokens_per_image", "image_seq_length", "num_query_tokens"):
        if isinstance(count := getattr(config, name, None), int):
            return count
    eye = config.vision_config
    return int(eye.image_size // eye.patch_size) ** 2


EYE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
MOUTH: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0,
}  # fmt: skip

GRID = ("image_grid_thw",)
PACKED_EYE: dict[str, Any] = {
    "depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 24, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
WORDS_OF_IMAGES: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57,
}  # fmt: skip


def _turning(sections: list[int], **options: Any) -> dict[str, Any]:
    """Rotary embeddings of times, rows and columns, in sections of a head's features."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return {"rope_parameters": rope | options}


IMAGE_TEXT = (
    pretrained(
        "llava", "image and text", "features of patches in place of the prompt's image tokens",
        "LlavaForConditionalGeneration", "LlavaConfig", described,
        tiny={"text_config": MOUTH | {"model_type": "llama"}, "vision_config": EYE | {"model_type": "clip_vision_model"},
              "image_token_index": IMAGE, "image_seq_length": 16},
    ),
    pretrained(
        "paligemma", "image and text", "attention in both directions over the prompt",
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", described,
        tiny={"text_config": MOUTH | {"model_type": "gemma"}, "vision_config": EYE | {"model_type": "siglip_vision_model"},
              "image_token_index": IMAGE, "projection_dim": 24},
        full={"text_config": {"model_type": "gemma", "vocab_size": 257216, "hidden_size": 2048,
                              "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
                              "num_key_value_heads": 1, "head_dim": 256}},
    ),
    pretrained(
        "gemma3", "image and text", "pooled patches, windows and whole attention by layers, masks by vmap",
        "Gemma3ForConditionalGeneration", "Gemma3Config", described,
        tiny={"text_config": MOUTH | {"sliding_window": 4}, "vision_config": EYE, "mm_tokens_per_image": 4,
              "image_token_index": IMAGE},
        full={"text_config": {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
                              "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
                              "head_dim": 256, "sliding_window": 1024},
              "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                                "num_attention_heads": 16, "image_size": 896, "patch_size": 14}},
    ),
    pretrained(
        "internvl", "image and text", "patches shuffled into channels",
        "InternVLForConditionalGeneration", "InternVLConfig", described,
        tiny={"text_config": MOUTH | {"model_type": "qwen2"},
              "vision_config": EYE | {"image_size": [16, 16], "patch_size": [4, 4]},
              "image_token_id": IMAGE, "image_seq_length": 4},
        full={"text_config": {"model_type": "qwen2", "vocab_size": 151674, "hidden_size": 896,
                              "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                              "num_key_value_heads": 2}},
    ),
    pretrained(
        "blip-2", "image and text", "queries that read an image by cross-attention",
        "Blip2ForConditionalGeneration", "Blip2Config", described,
        tiny={"text_config": {"model_type": "opt", "vocab_size": 61, "hidden_size": 24, "ffn_dim": 40,
                              "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 24,
                              "max_position_embeddings": 64, "pad_token_id": 1},
              "vision_config": EYE,
              "qformer_config": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
                                 "num_attention_heads": 4, "encoder_hidden_size": 24, "vocab_size": 61},
              "num_query_tokens": 4, "image_token_index": IMAGE},
        full={"text_config": {"model_type": "opt", "hidden_size": 2560, "ffn_dim": 10240,
                              "num_hidden_layers": 32, "num_attention_heads": 32,
                              "word_embed_proj_dim": 2560},
              "image_token_index": 50265},
    ),
    pretrained(
        "qwen2-vl", "image and text", "patches of all images packed, attention inside of each image",
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", packed, rows=(6, 32), fixed=GRID,
        tiny=WORDS_OF_IMAGES | {"text_config": MOUTH | _turning([1, 1, 1]),
              "vision_config": PACKED_EYE | {"embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2}},
        full={"text_config": _turning([16, 24, 24]) | {
                  "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                  "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
              "vision_config": {"hidden_size": 1536}, "tie_word_embeddings": True},
    ),
    pretrained(
        "qwen2.5-vl", "image and text", "packed patches, attention inside of windows of each image",
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", packed, rows=(6, 32), fixed=GRID,
        tiny=WORDS_OF_IMAGES | {"text_config": MOUTH | _turning([1, 1, 1]),
              "vision_config": PACKED_EYE | {"window_size": 8, "fullatt_block_indexes": [1]}},
        full={"text_config": _turning([16, 24, 24]) | {
                  "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                  "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True},
              "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                                "out_hidden_size": 2048, "fullatt_block_indexes": [7, 15, 23, 31]},
              "tie_word_embeddings": True},
    ),
    pretrained(
        "qwen3-vl", "image and text", "features of three layers of the image added in the first layers of the text",
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", packed, rows=(6, 32), fixed=GRID,
        tiny=WORDS_OF_IMAGES | {"text_config": MOUTH | _turning([1, 1, 1], mrope_interleaved=True),
              "vision_config": PACKED_EYE | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
        full={"text_config": _turning([24, 20, 20], mrope_interleaved=True) | {
                  "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                  "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                  "tie_word_embeddings": True},
              "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
                                "deepstack_visual_indexes": [5, 11, 17]},
              "tie_word_embeddings": True},
    ),
    pretrained(
        "glm-4v", "image and text", "packed patches, learned positions resampled to each image's grid",
        "Glm4vForConditionalGeneration", "Glm4vConfig", packed, rows=(6, 32), fixed=GRID,
        tiny={"text_config": MOUTH | _turning([1, 1, 1], partial_rotary_factor=1.0),
              "vision_config": PACKED_EYE | {"image_size": 16}, "image_token_id": IMAGE, "video_token_id": 59,
              "image_start_token_id": 58, "image_end_token_id": 57},
        full={"text_config": _turning([8, 12, 12], partial_rotary_factor=0.5)},
    ),
)  # fmt: skip
