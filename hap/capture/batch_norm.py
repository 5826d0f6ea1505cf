"""Batch norm as logical operators: statistics of the *global* batch, one program for both modes.

ATen's operators count their own elements, which on a rank are a part of the batch.
Here a channel's mean and variance are sums, of which each rank has a term,
and the normalisation is elementwise. After SyncBatchNorm of PyTorch, which sends the same figures.
Each operator is one pass of a kernel of torch that takes given statistics, on CUDA of SyncBatchNorm's.

The captured program is that of training. When the program runs, :func:`by_mode` chooses the
batch's statistics in training and the running ones in ``eval()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hap.capture.wide_dtype import wide_dtype


@torch.library.custom_op("hap::by_mode", mutates_args=())
def by_mode(training: Tensor, otherwise: Tensor) -> Tensor:
    """Return ``training`` in training, ``otherwise`` in ``eval()``; called alone: ``training``."""
    return training.clone()


@torch.library.custom_op("hap::in_training", mutates_args=())
def in_training(x: Tensor) -> Tensor:
    """Return ``x`` in training, zeros in ``eval()``; called alone: ``x``."""
    return x.clone()


def channel_mean(x: Tensor, count: int) -> Tensor:
    """Return a term of the mean per channel (C,) of ``count`` elements, of which ``x`` (N, C, ...) has some.

    It is float32 for half precision.
    """
    if x.numel() == count * x.shape[1]:
        return x.mean(_others(x), dtype=wide_dtype(x))
    return x.sum(_others(x), dtype=wide_dtype(x)) / count


def channel_variance(x: Tensor, mean: Tensor, count: int) -> Tensor:
    """Return a term of the variance per channel (C,) of ``count`` elements, whose mean is ``mean``."""
    if not x.numel():
        return torch.zeros_like(mean)
    if x.is_cuda:
        (x,) = _alike(x)
    old_mean = old_var = None
    if x.dtype != mean.dtype:  # the results have the dtype of the running statistics
        old_mean, old_var = torch.zeros_like(mean), torch.ones_like(mean)
    own, var = torch.batch_norm_update_stats(x, old_mean, old_var, 0.0)
    mine = x.numel() // x.shape[1]
    return var if mine == count else (var + (own - mean).square()) * (mine / count)


def normalize(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``(x - mean) * invstd * weight + bias`` in the dtype of ``x``; the others are (C,)."""
    if not x.numel():
        return x.clone()
    scale, shift = weight.to(mean.dtype), bias.to(mean.dtype)
    if x.is_cuda:
        (x,) = _alike(x)
        return torch.batch_norm_elemt(x, scale, shift, mean, invstd, 0.0)
    return torch.native_batch_norm(x, scale, shift, mean, invstd.pow(-2), False, 0.0, 0.0)[0]


def normalize_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums per channel of ``grad``, and of ``grad`` times the normalised ``x``."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    one = None if x.dtype == mean.dtype else torch.ones_like(mean)  # the results have its dtype
    if x.is_cuda:
        x, grad = _alike(x, grad)
        wanted = True, False, False
        total, centred, *_ = torch.batch_norm_backward_reduce(grad, x, mean, invstd, one, *wanted)
        return total, centred * invstd
    given = one, mean, invstd.pow(-2), None, None, False, 0.0, [False, True, True]
    _, weighted, total = torch.ops.aten.native_batch_norm_backward(grad, x, *given)
    return total, weighted


def normalize_backward(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor,
    weighted: Tensor, count: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of ``x`` through its value and the statistics of ``count`` elements.

    Args:
        total, weighted: the sums of :func:`normalize_sums` over the whole batch, or zeros if
            the statistics do not depend on ``x``.
    """
    if x.is_cuda and x.numel():
        x, grad = _alike(x, grad)
        given = mean, invstd, weight.to(mean.dtype), total, weighted / invstd
        counts = torch.full((1,), count, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(grad, x, *given, counts)
    scale = invstd * weight
    slope = -scale * invstd * weighted / count
    shift = -scale * total / count - slope * mean
    rest = torch.addcmul(per_channel(shift, x), x, per_channel(slope, x))
    return rest.addcmul_(grad, per_channel(scale, x)).to(x.dtype)


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in the memory format of the first, which the kernels of SyncBatchNorm need."""
    formats = torch.channels_last, torch.channels_last_3d
    last = (f for f in formats if tensors[0].is_contiguous(memory_format=f))
    layout = next(last, torch.contiguous_format)
    return [t.contiguous(memory_format=layout) for t in tensors]


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """Return ``v`` (C,) in the shape in which it broadcasts to ``x`` (N, C, ...)."""
    return v.view(-1, *(1 for _ in range(x.dim() - 2)))


_channel_mean, _channel_variance, _normalize, _normalize_sums, _normalize_backward = (
    torch.library.custom_op(f"hap::{function.__name__}", mutates_args=())(function)
    for function in (
        channel_mean, channel_variance, normalize, normalize_sums, normalize_backward
    )
)  # fmt: skip


@by_mode.register_fake
def _(training, otherwise):  # type: ignore[no-untyped-def]
    return torch.empty_like(training)


@in_training.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@_channel_mean.register_fake
def _(x, count):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[1], dtype=wide_dtype(x))


@_channel_variance.register_fake
def _(x, mean, count):  # type: ignore[no-untyped-def]
    return torch.empty_like(mean)


@_normalize.register_fake
def _(x, mean, invstd, weight, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_normalize_sums.register_fake
def _(grad, x, mean, invstd):  # type: ignore[no-untyped-def]
    return torch.empty_like(mean), torch.empty_like(mean)


@_normalize_backward.register_fake
def _(grad, x, mean, invstd, weight, total, weighted, count):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Normalized(torch.autograd.Function):
    """Normalises by statistics of the batch; the gradient passes through them, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor, count: int
    ) -> Tensor:
        ctx.save_for_backward(x, mean, invstd, weight)
        ctx.count = count
        out: Tensor = torch.ops.hap.normalize(x, mean, invstd, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mean, invstd, weight = ctx.saved_tensors
        total, weighted = torch.ops.hap.normalize_sums(grads[0], x, mean, invstd)
        dx = torch.ops.hap.normalize_backward(
            grads[0], x, mean, invstd, weight, torch.ops.hap.in_training(total),
            torch.ops.hap.in_training(weighted), ctx.count,
        )  # fmt: skip
        return dx, None, None, weighted.to(weight.dtype), total.to(weight.dtype), None


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Replace the function of the same name in a captured graph."""
    acc = wide_dtype(input)
    channels, device = input.shape[1], (input if running_mean is None else running_mean).device
    scale = torch.ones(channels, dtype=acc, device=device) if weight is None else weight
    shift = torch.zeros(channels, dtype=acc, device=device) if bias is None else bias
    if not training:
        assert running_mean is not None
        assert running_var is not None
        factor = scale * (running_var + eps).rsqrt()
        rest = shift - running_mean * factor
        out = input * per_channel(factor, input) + per_channel(rest, input)
        return out.to(input.dtype)
    count = input.numel() // input.shape[1]
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    with torch.no_grad():
        mean = torch.ops.hap.channel_mean(input, count)
        var = torch.ops.hap.channel_variance(input, mean, count)
        if running_mean is not None and running_var is not None:
            unbiased = momentum * count / (count - 1)
            of_batch = mean, var
            mean = torch.ops.hap.by_mode(mean, running_mean.to(mean.dtype))
            var = torch.ops.hap.by_mode(var, running_var.to(var.dtype))
            # Traced, a copy_ is three operators, of which the graph needs none.
            running_mean.mul_(1 - momentum).add_(of_batch[0], alpha=momentum)
            running_var.mul_(1 - momentum).add_(of_batch[1], alpha=unbiased)
        invstd = (var + eps).rsqrt()
    return _Normalized.apply(  # type: ignore[no-untyped-call, no-any-return]
        input, mean, invstd, scale, shift, count
    )
