"""Products of matrices whose rows do not begin at multiples of 16 bytes, for CUDA.

Tensor cores read rows in pieces of 16 bytes. cuBLAS is several times slower if a row is no multiple
of them, such as the logits of GPT-2's 50,257 words in half precision, so people enlarge their
vocabulary to 50,304. Here the rows of such tensors are stored with a gap after each: shapes and values
stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

STEP: Final = 16
"""Bytes of which the distance between rows is a multiple."""

FEWEST: Final = 1 << 16
"""Fewest elements of a tensor that is copied for the sake of its rows."""


def is_odd(size: int, dtype: torch.dtype) -> bool:
    """Return whether rows of this many elements end inside a piece of 16 bytes."""
    return bool(size * dtype.itemsize % STEP)


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose rows, along the last dim, begin at multiples of 16 bytes."""
    *outer, size = shape
    per_step = STEP // dtype.itemsize
    stored = -(-size // per_step) * per_step
    return torch.empty((*outer, stored), dtype=dtype, device=device)[..., :size]


def aligned(x: Tensor) -> Tensor:
    """Return a matrix, or a copy of it with aligned rows; small ones stay."""
    if x.numel() < FEWEST:
        return x
    if x.stride(0) == 1 and x.stride(1) != 1:
        return aligned(x.t()).t()
    if x.stride(1) == 1 and not is_odd(x.stride(0), x.dtype):
        return x
    return empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``."""
    out = empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    return product(out, aligned(a), aligned(b))


import os

SPLIT = bool(os.environ.get("HAP_SPLIT"))


def product(out, a, b, bias=None):
    if not SPLIT:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    per = STEP // a.dtype.itemsize
    cuts = lambda n: (
        [slice(0, n // per * per), slice(n // per * per, n)]
        if n % per and n > per
        else [slice(0, n)]
    )
    for rows in cuts(a.shape[0]):
        for cols in cuts(b.shape[1]):
            o = out[rows, cols]
            first, *rest = cuts(a.shape[1])
            if bias is None:
                torch.mm(a[rows, first], b[first, cols], out=o)
            else:
                torch.addmm(bias[cols], a[rows, first], b[first, cols], out=o)
            for ks in rest:
                o.addmm_(a[rows, ks], b[ks, cols])
    return out


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``bias + a @ b``."""
    out = empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    return product(out, aligned(a), aligned(b), bias)


def to(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return a copy in another dtype."""
    return empty(x.shape, dtype=dtype, device=x.device).copy_(x)
