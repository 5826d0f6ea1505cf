"""Audio models of transformers, and models of two kinds of input."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import pretrained
from benchmarks.zoo.vision import images


def spoken(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Waves and the class of each."""
    labels = torch.randint(config.num_labels, (rows,))
    return {"input_values": torch.randn(rows, 400 if rows < 32 else 16000), "labels": labels}


def transcribed(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Spectra and the text that is said."""
    labels = torch.randint(2, config.vocab_size, (rows, 7 if rows < 32 else 128))
    spectra = torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": spectra, "labels": labels}


def paired(config: Any, rows: int) -> dict[str, Any]:
    """Images and their captions."""
    length = config.text_config.max_position_embeddings
    text = torch.randint(2, config.text_config.vocab_size - 1, (rows, length))
    text[:, -1] = config.text_config.vocab_size - 1  # the end, where a caption is read off
    pixels = images(config.vision_config, rows)
    return {"input_ids": text, "pixel_values": pixels, "return_loss": True}


TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
WAVES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [12, 12, 12], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "num_labels": 7,
    "classifier_proj_size": 10,
}  # fmt: skip
# Layers left out at random, and spectra masked by numpy, are no part of one graph.
STEADY = {"layerdrop": 0.0, "apply_spec_augment": False}

OTHER = (
    pretrained(
        "wav2vec2", "audio", "a tower of 1-d convolutions, grouped ones for positions, weight norm",
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", spoken, tiny=WAVES, both=STEADY,
        rows=(6, 32),
    ),
    pretrained(
        "hubert", "audio", "the same tower, other heads",
        "HubertForSequenceClassification", "HubertConfig", spoken, tiny=WAVES, both=STEADY,
        rows=(6, 32),
    ),
    pretrained(
        "whisper", "audio", "an encoder of spectra with a convolutional stem, a decoder of text",
        "WhisperForConditionalGeneration", "WhisperConfig", transcribed,
        tiny={"vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
              "decoder_ffn_dim": 40, "num_mel_bins": 10, "max_source_positions": 11,
              "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
              "decoder_start_token_id": 1},
        full={"d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
              "encoder_attention_heads": 8, "decoder_attention_heads": 8,
              "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048},
        rows=(6, 32),
    ),
    pretrained(
        "clip", "contrastive", "two towers, every image against every text",
        "CLIPModel", "CLIPConfig", paired,
        tiny={"text_config": TOWER | {"vocab_size": 61, "max_position_embeddings": 9, "eos_token_id": 60},
              "vision_config": TOWER | {"image_size": 16, "patch_size": 4}, "projection_dim": 12},
    ),
)  # fmt: skip
