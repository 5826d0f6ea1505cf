"""Vision models of transformers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import pretrained


def images(config: Any, rows: int) -> torch.Tensor:
    size = getattr(config, "image_size", None) or (32 if rows < 32 else 224)
    return torch.randn(rows, config.num_channels, size, size)


def classified(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Images and their classes."""
    labels = torch.randint(config.num_labels, (rows,))
    return {"pixel_values": images(config, rows), "labels": labels}


def segmented(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Images and the class of each pixel."""
    pixels = images(config, rows)
    labels = torch.randint(config.num_labels, (rows, *pixels.shape[-2:]))
    return {"pixel_values": pixels, "labels": labels}


TINY: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "image_size": 16, "patch_size": 4, "num_labels": 7,
}  # fmt: skip
CLASSES = {"num_labels": 1000}

VISION = (
    pretrained(
        "vit", "vision", "a convolutional stem of patches",
        "ViTForImageClassification", "ViTConfig", classified, tiny=TINY, full=CLASSES,
    ),
    pretrained(
        "deit", "vision", "a token to distil into",
        "DeiTForImageClassification", "DeiTConfig", classified, tiny=TINY, full=CLASSES,
    ),
    pretrained(
        "swin", "vision", "windows, shifted; a bias per pair of places; merging of patches",
        "SwinForImageClassification", "SwinConfig", classified,
        tiny={"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2],
              "num_heads": [2, 4], "window_size": 4, "num_labels": 7},
        full=CLASSES, both={"drop_path_rate": 0.0},
    ),
    pretrained(
        "beit", "vision", "relative position biases, layers scaled per channel",
        "BeitForImageClassification", "BeitConfig", classified,
        tiny=TINY | {"use_relative_position_bias": True}, full=CLASSES | {"use_relative_position_bias": True},
        both={"drop_path_rate": 0.0},
    ),
    pretrained(
        "convnext", "vision", "depthwise convolutions, norms over channels",
        "ConvNextForImageClassification", "ConvNextConfig", classified,
        tiny={"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1], "num_labels": 7},
        full=CLASSES,
    ),
    pretrained(
        "resnet", "vision", "convolutions with batch norm in training",
        "ResNetForImageClassification", "ResNetConfig", classified,
        tiny={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 7},
        full=CLASSES,
    ),
    pretrained(
        "segformer", "vision", "keys and values of reduced images, bilinear resizing",
        "SegformerForSemanticSegmentation", "SegformerConfig", segmented,
        tiny={"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 12,
              "num_attention_heads": [1, 2, 2, 4], "num_labels": 7},
        full={"num_labels": 150}, both={"drop_path_rate": 0.0},
    ),
)  # fmt: skip
