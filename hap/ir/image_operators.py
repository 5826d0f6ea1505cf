"""ATen's operators of images and volumes, by what they do."""

from __future__ import annotations

POOLS = tuple(f"{op}{n}d" for op in ("_adaptive_avg_pool", "avg_pool") for n in (2, 3))
MAX_POOLS = "max_pool2d_with_indices", "max_pool3d_with_indices"
ADAPTIVE_MAX_POOLS = "adaptive_max_pool2d", "adaptive_max_pool3d"

RESIZES = (
    *(f"{op}{n}d" for op in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Argument 2 of their backward is the shape of its result."""


def image_dims(op: str) -> int:
    """Return the number of dims of an image, the last ones, by the name of one of its operators."""
    return next(n for n in (1, 2, 3) if f"{n}d" in op)
