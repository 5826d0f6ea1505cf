"""Decompositions that make local element counts explicit where ATen hides them. (torch)

A mean divides by the number of its rank's elements; a program must divide by the global number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor as TorchTensor

from hap.capture import torch_private
from hap.capture.attention_kernels import KERNELS
from hap.capture.decompositions import DECOMPOSED
from hap.capture.random_numbers import DRAWS

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)
"""Types whose sums may overflow or lose digits where their means do not."""


def _mean(x: TorchTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    count = 1
    for d in dims:
        count *= x.shape[d]
    made = dtype or x.dtype
    if made in HALVES:
        total = torch.sum(x, list(dims), keepdim, dtype=torch.float32)
        return (total / count).to(made)
    return torch.sum(x, list(dims), keepdim, dtype=dtype) / count


def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Return ``source``, stored like ``x``: its readers may rely on a view."""
    whole = source.to(x.dtype).expand(x.shape)
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    if order == list(range(x.dim())):
        return whole.clone(memory_format=torch.contiguous_format)
    stored = whole.permute(order).clone(memory_format=torch.contiguous_format)
    return stored.permute([order.index(d) for d in range(x.dim())])


def _nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    if reduction != 1:
        return NotImplemented
    total, count = aten.nll_loss_forward(x, target, weight, 2, ignore)
    return total / count, count


def _nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, count: Any
) -> Any:
    if reduction != 1:
        return NotImplemented
    return aten.nll_loss_backward(grad / count, x, target, weight, 2, ignore, count)


def _convolution_backward(grad: Any, x: Any, w: Any, bias: Any, *rest: Any) -> Any:
    *options, (want_x, want_w, want_bias) = rest
    if not want_bias:
        return NotImplemented
    dx, dw, _ = aten.convolution_backward(grad, x, w, None, *options, [want_x, want_w, False])
    return dx, dw, grad.sum([0, *range(2, grad.dim())])


def _sign(x: TorchTensor) -> Any:
    return NotImplemented if x.is_complex() else torch.sign(x)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **torch_private.get_decompositions([
        aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward, aten.huber_loss, aten.huber_loss_backward,
        aten.binary_cross_entropy_with_logits, aten.binary_cross_entropy,
        aten.binary_cross_entropy_backward, aten.soft_margin_loss, aten.soft_margin_loss_backward,
        aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.xlogy, aten.norm, aten.lerp,
        aten.var, aten.var_mean, aten.std, aten.addcmul, aten.addcdiv, aten.rsub,
    ]),
    **DECOMPOSED,
    **DRAWS,
    **KERNELS,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.convolution_backward.default: _convolution_backward,
    aten.copy.default: _copy,
    aten.sgn.default: _sign,
    aten.zero.default: torch.zeros_like,
    aten.fill.Scalar: torch.full_like,
}  # fmt: skip
"""Mean reductions become a sum over the shards and a division by the *global* count; a
convolution's bias gradient, which needs no input channel, becomes an operator of its own."""
