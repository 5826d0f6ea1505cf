"""Chunk sizes of the cross-entropy kernels, shared by the runtime and the memory model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CHUNK: Final[Mapping[str, int]] = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Kind of device -> elements per piece, which the next kernel can read from the cache."""

CHUNKS: Final[Mapping[str, int]] = {
    "hap.cross_entropy.default": 1, "hap.cross_entropy_backward.default": 2
}  # fmt: skip
"""Operator -> number of pieces, in single precision or better, that it holds besides its inputs
and results; with logits of half precision it holds one more."""
