"""Small batches for the models of transformers, by what they are trained for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ROWS = 6
LABELS = 2

Batch = dict[str, Tensor]


def text(config: Any) -> Iterator[Batch]:
    """Yield sentences, whose words are the labels."""
    words = min(61, config.get_text_config().vocab_size)
    ids = torch.randint(3, words, (ROWS, 8))
    labels = ids[:, :-2].contiguous() if config.is_encoder_decoder else ids.clone()
    yield {"input_ids": ids, "labels": labels}


_PARTS = ("vision_config", "backbone_config", "encoder_config", "audio_config", "encoder")
"""Names of the configurations of parts that read images or sound."""


def _field(config: Any, name: str, otherwise: Any = None) -> Any:
    """Return a field of a configuration, or of one of its parts."""
    parts = (config, *(getattr(config, part, None) for part in _PARTS))
    return next((v for part in parts if (v := getattr(part, name, None)) is not None), otherwise)


def _sides(config: Any) -> tuple[int, int]:
    size = _field(config, "image_size", 32)
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _images(config: Any) -> Tensor:
    return torch.randn(ROWS, _field(config, "num_channels", 3), *_sides(config))


def classified_images(config: Any) -> Iterator[Batch]:
    """Yield images of one class each."""
    labels = torch.randint(0, LABELS, (ROWS,))
    yield {"pixel_values": _images(config), "labels": labels}
    yield {"input_ids": torch.randint(0, 61, (ROWS, 16)), "labels": labels}  # colours as words


def labelled_pixels(config: Any) -> Iterator[Batch]:
    """Yield images with a class for each pixel."""
    labels = torch.randint(0, LABELS, (ROWS, *_sides(config)))
    yield {"pixel_values": _images(config), "labels": labels}


def hidden_patches(config: Any) -> Iterator[Batch]:
    """Yield images some of whose patches are hidden from the model."""
    height, width = _sides(config)
    patch = _field(config, "patch_size", 8)
    for scale in (1, 8):  # the last stage of some has patches of eight times the size
        count = (height // patch // scale) * (width // patch // scale)
        yield {"pixel_values": _images(config), "bool_masked_pos": torch.rand(ROWS, count) > 0.5}


def classified_videos(config: Any) -> Iterator[Batch]:
    """Yield videos of one class each."""
    frames = _field(config, "num_frames", _field(config, "frames_per_clip", 4))
    videos = torch.randn(ROWS, frames, _field(config, "num_channels", 3), *_sides(config))
    for name in ("pixel_values", "pixel_values_videos"):
        yield {name: videos, "labels": torch.randint(0, LABELS, (ROWS,))}


def _sounds(config: Any) -> Iterator[Batch]:
    """Yield waves, then tables of frequencies, in the orders of dims that models use."""
    bins = next((n for name in _BINS if isinstance(n := _field(config, name), int)), 80)
    frames = 2 * _field(config, "max_source_positions", 16)
    features = torch.randn(ROWS, 32, bins)
    yield {"input_values": torch.randn(ROWS, 4000)}
    yield {"input_values": torch.randn(ROWS, _field(config, "max_length", 32), bins)}
    yield {"input_features": features}
    yield {"input_features": features, "attention_mask": torch.ones(ROWS, 32, dtype=torch.long)}
    yield {"input_features": torch.randn(ROWS, 32, _field(config, "hidden_size", bins))}
    yield {"input_features": torch.randn(ROWS, bins, frames)}


_BINS = ("num_mel_bins", "feature_projection_input_dim", "input_dim", "input_feat_per_channel")
"""Names of the fields that tell the number of frequencies."""


def classified_sounds(config: Any) -> Iterator[Batch]:
    """Yield sounds of one class each."""
    for sounds in _sounds(config):
        yield {**sounds, "labels": torch.randint(0, LABELS, (ROWS,))}


def spoken(config: Any) -> Iterator[Batch]:
    """Yield sounds with words."""
    words = min(61, config.get_text_config().vocab_size)
    for sounds in _sounds(config):
        yield {**sounds, "labels": torch.randint(3, words, (ROWS, 3))}


BATCHES: dict[str, Callable[[Any], Iterator[Batch]]] = {
    "causal": text, "masked": text, "pairs": text, "images": classified_images, "pixels": labelled_pixels,
    "patches": hidden_patches, "videos": classified_videos, "sounds": classified_sounds, "ctc": spoken,
    "speech": spoken,
}  # fmt: skip
"""Kind of model -> what it is trained on; several if the configuration does not tell which."""
