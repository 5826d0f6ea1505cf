"""Group norm as logical operators, whose arguments hold for a part of the batch or of the groups.

ATen's operators count samples, channels and groups among their arguments, and these are other
numbers on a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x`` (N, C, ...) normalised over groups, with means and 1/deviations (N, groups).

    Args:
        weight, bias: of the channels (C,).
        size: channels of each group.
    """
    if not x.numel():
        return _empty(x, size)
    scale, shift = (None if v is None else v.to(x.dtype) for v in (weight, bias))
    return torch.native_group_norm(x.contiguous(), scale, shift, *_sizes(x, size), eps)


def group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, of a weight (C,) and of a bias (C,), also if there is none."""
    kind = x.dtype if weight is None else weight.dtype
    if not x.numel():
        none = x.new_zeros(x.shape[1], dtype=kind)
        return torch.empty_like(x, memory_format=torch.contiguous_format), none, none.clone()
    scale = x.new_ones(x.shape[1]) if weight is None else weight.to(x.dtype)
    given = grad.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous(), scale
    dx, dw, db = aten.native_group_norm_backward(*given, *_sizes(x, size), [True, True, True])
    return dx, dw.to(kind), db.to(kind)


def _sizes(x: Tensor, size: int) -> tuple[int, int, int, int]:
    """Return what ATen's operators ask for: samples, channels, their pixels, and groups."""
    n, c = x.shape[:2]
    return n, c, x.numel() // (n * c), c // size


def _empty(x: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[0], x.shape[1] // size
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, x.new_empty(shape), x.new_empty(shape)


_forward, _backward = (
    torch.library.custom_op(f"hap::{function.__name__}", mutates_args=())(function)
    for function in (group_norm, group_norm_backward)
)


@_forward.register_fake
def _(x, weight, bias, size, eps):  # type: ignore[no-untyped-def]
    return _empty(x, size)


@_backward.register_fake
def _(grad, x, mean, rstd, weight, size):  # type: ignore[no-untyped-def]
    like = x if weight is None else weight
    results = (like.new_empty(x.shape[1]) for _ in range(2))
    return torch.empty_like(x, memory_format=torch.contiguous_format), *results


def decomposed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, pixels: int,
    groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Replace ``aten.native_group_norm``."""
    found: tuple[Tensor, Tensor, Tensor]
    found = torch.ops.hap.group_norm(x, weight, bias, c // groups, eps)
    return found


def decomposed_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, c: int,
    pixels: int, groups: int, mask: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Replace ``aten.native_group_norm_backward``."""
    found = torch.ops.hap.group_norm_backward(grad, x, mean, rstd, weight, c // groups)
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))
