"""Small batches for the models of transformers, by what they are trained for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.image_text import packed

ROWS = 6
LABELS = 2

Batch = dict[str, Any]


def text(config: Any) -> Iterator[Batch]:
    """Yield sentences, whose words are the labels."""
    words = min(61, config.get_text_config().vocab_size)
    ids = torch.randint(3, words, (ROWS, 8))
    labels = ids[:, :-2].contiguous() if config.is_encoder_decoder else ids.clone()
    yield {"input_ids": ids, "labels": labels}


def _padded(config: Any) -> Batch:
    """Return sentences of two lengths, each with its end."""
    words = min(57, getattr(config.get_text_config(), "vocab_size", 57))
    ids = torch.randint(3, words, (ROWS, 8))
    mask = torch.ones_like(ids)
    mask[: ROWS // 2, 6:] = 0
    ids = torch.where(mask.bool(), ids, config.get_text_config().pad_token_id)
    ids[range(ROWS), mask.sum(1) - 1] = config.get_text_config().eos_token_id
    return {"input_ids": ids, "attention_mask": mask}


def _with_and_without_mask(batch: Batch) -> Iterator[Batch]:
    yield batch
    yield {name: value for name, value in batch.items() if name != "attention_mask"}


def classified_sentences(config: Any) -> Iterator[Batch]:
    """Yield sentences of one class each."""
    yield from _with_and_without_mask(
        _padded(config) | {"labels": torch.randint(0, LABELS, (ROWS,))}
    )


def classified_words(config: Any) -> Iterator[Batch]:
    """Yield sentences with a class for each word; padding has none."""
    batch = _padded(config)
    labels = torch.randint(0, LABELS, (ROWS, 8)).masked_fill(batch["attention_mask"] == 0, -100)
    yield from _with_and_without_mask(batch | {"labels": labels})


def answers(config: Any) -> Iterator[Batch]:
    """Yield sentences with the places where an answer starts and ends; one is outside of the sentence."""
    first, last = torch.randint(0, 5, (ROWS,)), torch.randint(5, 8, (ROWS,))
    last[0] = 8
    batch = _padded(config) | {"start_positions": first, "end_positions": last}
    yield from _with_and_without_mask(batch)


def captions(config: Any) -> Iterator[Batch]:
    """Yield images and sentences, each of which belongs to one image."""
    images, sentences = {"pixel_values": _images(config)}, _padded(config)
    yield {**sentences, **images, "return_loss": True}


def described_images(config: Any) -> Iterator[Batch]:
    """Yield prompts that begin with an image, in the forms that models use."""
    for tokens in (16, 4, 1, 17, 64, 8, 2, 5, 9):
        batch = _after_an_image(config, tokens) | {"pixel_values": _images(config)}
        yield batch
        yield batch | {"token_type_ids": (batch["labels"] == -100).long()}
    if hasattr(getattr(config, "vision_config", None), "temporal_patch_size"):
        batch = packed(config, ROWS)
        yield batch
        yield {name: value for name, value in batch.items() if name != "position_ids"}


def _after_an_image(config: Any, tokens: int) -> Batch:
    """Return sentences after that many tokens of an image; words of the sentence are the labels."""
    image = next((n for name in _IMAGES if isinstance(n := getattr(config, name, None), int)), 60)
    text = torch.randint(3, 57, (ROWS, tokens + 8))
    text[:, :tokens] = image
    return {"input_ids": text, "labels": text.masked_fill(text == image, -100)}


_IMAGES = ("image_token_id", "image_token_index", "media_placeholder_token_id")
"""Names of the fields that tell the number of an image's tokens."""

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
    "speech": spoken, "sentences": classified_sentences, "words": classified_words, "answers": answers,
    "captions": captions, "described": described_images,
}  # fmt: skip
"""Kind of model -> what it is trained on; several if the configuration does not tell which."""
