"""Decompositions of operators whose merged dims or size arguments would prevent sharding.

A group norm takes the sizes of the batch, the channels and the pixels as numbers, which a rank's
share changes; as a layer norm of the groups, its batch and its groups are separate dims that can
be split. A repetition becomes an expansion between two views, a strided view of a dense tensor an
ordinary view, and a tensor that fills another replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hap.capture import group_norm, torch_private

aten = torch.ops.aten


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    norm = (v * v).sum(_but(v, dim), True).sqrt()
    return v * (g / norm), norm


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> Any:
    along = (grad * v).sum(_but(v, dim), True) / norm
    return (grad - v * (along / norm)) * (g / norm), along


def _but(v: Tensor, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim % v.dim()]


def _repeat(x: Tensor, repeats: list[int]) -> Tensor:
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    pairs = list(zip(repeats, shape, strict=True))
    apart = x.reshape([n for _, size in pairs for n in (1, size)])
    spread = apart.expand([n for pair in pairs for n in pair])
    # A copy, of which any view can be taken.
    return spread.clone(memory_format=torch.contiguous_format).view([r * n for r, n in pairs])


def _dense(shape: list[int], stride: list[int]) -> bool:
    """Return whether the elements are stored contiguously, in order."""
    step = 1
    for size, by in reversed(list(zip(shape, stride, strict=True))):
        if size != 1 and by != step:
            return False
        step *= size
    return True


def _as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Any:
    """Return a view if both sides hold all elements in one order; else ``NotImplemented``."""
    whole = math.prod(size) == x.numel() and not offset and x.storage_offset() == 0
    if whole and _dense(list(x.shape), list(x.stride())) and _dense(size, stride):
        return x.view(size)
    return NotImplemented


def _as_strided_scatter(
    x: Tensor, source: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Any:
    """Return ``source``, stored like ``x``: its readers may rely on a view."""
    seen = _as_strided(x, size, stride, offset)
    return seen if seen is NotImplemented else source.reshape(x.shape).contiguous()


def _fill(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


def _split(x: Tensor, size: int, dim: int = 0) -> Any:
    return aten.split.Tensor(x, size, dim)


def _split_with_sizes(x: Tensor, sizes: list[int], dim: int = 0) -> Any:
    return aten.split_with_sizes.default(x, sizes, dim)


def _index(x: Tensor, indices: list[Any]) -> Any:
    return aten.index.Tensor(x, indices)


def _index_put(x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> Any:
    return aten.index_put.default(x, indices, values, accumulate)


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    return NotImplemented if alpha == 1 else torch.index_add(x, dim, index, source * alpha)


def _adaptive_pool(x: Tensor, size: list[int]) -> Any:
    """Return ``x`` with each pixel repeated, if the output has a multiple of its pixels."""
    by = _repeats(x.shape[-2:], size)
    if by is None:
        return NotImplemented
    (h, w), (rows, columns) = x.shape[-2:], by
    pixels = x.reshape(*x.shape[:-2], h, 1, w, 1)
    spread = pixels.expand(*x.shape[:-2], h, rows, w, columns)
    return spread.clone(memory_format=torch.contiguous_format).view(*x.shape[:-2], *size)


def _adaptive_pool_backward(grad: Tensor, x: Tensor) -> Any:
    """Return the sum over each pixel's repetitions, where CUDA's kernel adds them atomically.

    In half precision an atomic addition is a loop: it took 29 of 37 ms of a step of VGG19.
    """
    by = _repeats(x.shape[-2:], grad.shape[-2:])
    if by is None:
        return NotImplemented
    (h, w), (rows, columns) = x.shape[-2:], by
    return grad.reshape(*x.shape[:-2], h, rows, w, columns).sum((-3, -1))


def _repeats(pixels: Sequence[int], out: Sequence[int]) -> tuple[int, int] | None:
    if any(size % given for given, size in zip(pixels, out, strict=True)):
        return None
    return out[0] // pixels[0], out[1] // pixels[1]


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    **torch_private.get_decompositions([aten.baddbmm]),
    aten.native_group_norm.default: group_norm.decomposed,
    aten.native_group_norm_backward.default: group_norm.decomposed_backward,
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.repeat.default: _repeat,
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten._adaptive_avg_pool2d.default: _adaptive_pool,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_pool_backward,
    aten.fill.Tensor: _fill,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
    aten._unsafe_index.Tensor: _index,
    aten._unsafe_index_put.default: _index_put,
    aten.index_add.default: _index_add,
}
