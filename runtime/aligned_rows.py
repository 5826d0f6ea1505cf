"""Products of matrices whose rows do not begin at multiples of 16 bytes, for CUDA.

Tensor cores read rows in pieces of 16 bytes. cuBLAS is several times slower if rows do not begin or end
at multiples of that, such as the logits of GPT-2's 50,257 words in half precision, so people enlarge their
vocabulary to 50,304. A size is *odd* here if so many elements do not fill whole pieces. Rows of odd sizes are
stored with a gap after each, and their products are computed in parts of even sizes. Shapes and values
stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
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
    made = torch.empty((*outer, stored), dtype=dtype, device=device)
    if device.type == "cpu":  # where products in half precision read pairs: the gap, times zero
        made[..., size:] = 0
    return made[..., :size]


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
    return _product(None, a, b)


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``bias + a @ b``; the bias has a dim or two."""
    return _product(bias, a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.t() + bias`` of ``[..., k]``, ``[n, k]`` and ``[n]``."""
    return with_dims_of(x, _product(bias, x.flatten(0, -2), weight.t()))


def matmul(x: Tensor, b: Tensor) -> Tensor:
    """Return ``x @ b`` of ``[..., k]`` and ``[k, n]``."""
    return with_dims_of(x, mm(x.flatten(0, -2), b))


def tensordot(x: Tensor, y: Tensor, dims: Sequence[int], others: Sequence[int]) -> Tensor:
    """Return the sum of products over the leading dims, which are all but the last, of both."""
    assert list(dims) == list(others) == [*range(x.dim() - 1)] == [*range(y.dim() - 1)]
    return mm(x.flatten(0, -2).t(), y.flatten(0, -2))


def with_dims_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return a matrix with the leading dims of ``x`` in place of its rows."""
    made: Tensor = rows.unflatten(0, x.shape[:-1])
    return made


def to(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy, by default in the same dtype."""
    return empty(x.shape, dtype=dtype or x.dtype, device=x.device).copy_(x)


def _product(bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Compute a product in parts whose sizes are even, since rows of aligned memory do not suffice.

    Columns of ``b`` are added until their number is even; along the other two dims, the rest is apart.
    """
    a, b = aligned(a), aligned(b)
    (rows, inner), columns = a.shape, b.shape[1]
    stored = empty((rows, columns), dtype=a.dtype, device=a.device)
    wide = _with_gaps(stored)
    b = _widened(b, wide.shape[1])
    if bias is not None and bias.shape[-1] == columns != wide.shape[1]:
        bias = F.pad(bias, (0, wide.shape[1] - columns))
    # Rows of ``a`` are rows in memory unless it is transposed, and so on.
    first, *rest = _parts(inner, a.dtype, split=a.stride(1) == 1 or b.stride(0) == 1)
    for part in _parts(rows, a.dtype, split=a.stride(0) == 1):
        into = wide[part]
        if bias is None:
            torch.mm(a[part, first], b[first], out=into)
        else:
            own = bias[part] if bias.dim() == 2 and len(bias) == rows else bias
            torch.addmm(own, a[part, first], b[first], out=into)
        for more in rest:
            into.addmm_(a[part, more], b[more])
    return stored


def _parts(size: int, dtype: torch.dtype, *, split: bool) -> list[slice]:
    """Return the even part of a dim and the rest, or all of it."""
    per_step = STEP // dtype.itemsize
    even = size // per_step * per_step
    return [slice(0, even), slice(even, size)] if split and 0 < even < size else [slice(0, size)]


def _with_gaps(x: Tensor) -> Tensor:
    """Return a matrix together with the gaps after its rows; all of them are in its storage."""
    return x.as_strided((x.shape[0], x.stride(0)), x.stride()) if x.shape[0] > 1 else x


def _widened(b: Tensor, columns: int) -> Tensor:
    """Return a matrix with more columns, whose products nobody reads."""
    if b.shape[1] == columns:
        return b
    stored = b.untyped_storage().nbytes() // b.itemsize - b.storage_offset()
    if b.stride() == (columns, 1) and len(b) * columns <= stored:  # a slice may end earlier
        return b.as_strided((len(b), columns), b.stride())
    turned = b.new_zeros((columns, b.shape[0])) if b.stride(0) == 1 else None
    if turned is None:
        return F.pad(b, (0, columns - b.shape[1]))
    turned[: b.shape[1]] = b.t()
    return turned.t()
