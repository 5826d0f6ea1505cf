"""Batch norm as logical operators: statistics of the *global* batch, one program for both modes.

ATen's operators count their own elements, which on a rank are a part of the batch.
Here a channel's mean and its squared deviations are sums, of which each rank has a term,
and the normalisation is elementwise. After SyncBatchNorm of PyTorch, which
sends the same figures. Kernels of torch that take given statistics compute them, in one pass each.

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


@torch.library.custom_op("hap::channel_sums", mutates_args=())
def channel_sums(x: Tensor) -> Tensor:
    """Return sums per channel (C,) of ``x`` (N, C, ...); float32 for half precision."""
    return x.sum(_others(x), dtype=wide_dtype(x))


@torch.library.custom_op("hap::channel_deviations", mutates_args=())
def channel_deviations(x: Tensor, mean: Tensor) -> Tensor:
    """Return sums per channel (C,) of the squares of ``x - mean``; ``mean`` is (C,)."""
    if not x.numel():
        return torch.zeros_like(mean)
    given = torch.zeros_like(mean), torch.ones_like(mean)  # the results have their dtype
    own, var = torch.batch_norm_update_stats(x, *given, 0.0)
    return (var + (own - mean).square()) * (x.numel() // x.shape[1])


@torch.library.custom_op("hap::normalize", mutates_args=())
def normalize(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``(x - mean) * invstd * weight + bias`` in the dtype of ``x``; the others are (C,)."""
    if not x.numel():
        return x.clone()
    wide = weight.to(mean.dtype), bias.to(mean.dtype)
    return torch.native_batch_norm(x, *wide, mean, invstd.pow(-2), False, 0.0, 0.0)[0]


@torch.library.custom_op("hap::normalize_sums", mutates_args=())
def normalize_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums per channel of ``grad``, and of ``grad`` times the normalised ``x``."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    given = torch.ones_like(mean), mean, invstd.pow(-2), None, None
    _, weighted, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, *given, False, 0.0, [False, True, True]
    )
    return total, weighted


@torch.library.custom_op("hap::normalize_backward", mutates_args=())
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
        counts = torch.full((1,), count, dtype=torch.int32, device=x.device)
        given = _dense(grad), _dense(x), mean, invstd, weight.to(mean.dtype)
        return torch.batch_norm_backward_elemt(*given, total, weighted / invstd, counts)
    scale = invstd * weight
    slope = -scale * invstd * weighted / count
    shift = -scale * total / count - slope * mean
    rest = torch.addcmul(_per_channel(shift, x), x, _per_channel(slope, x))
    return rest.addcmul_(grad, _per_channel(scale, x)).to(x.dtype)


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` in a memory format that SyncBatchNorm, too, gives to its kernels."""
    formats = torch.channels_last, torch.channels_last_3d
    return x if any(x.is_contiguous(memory_format=f) for f in formats) else x.contiguous()


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view(-1, *(1 for _ in range(x.dim() - 2)))


@by_mode.register_fake
def _(training, otherwise):  # type: ignore[no-untyped-def]
    return torch.empty_like(training)


@in_training.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@channel_sums.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[1], dtype=wide_dtype(x))


@channel_deviations.register_fake
def _(x, mean):  # type: ignore[no-untyped-def]
    return torch.empty_like(mean)


@normalize.register_fake
def _(x, mean, invstd, weight, bias):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@normalize_sums.register_fake
def _(grad, x, mean, invstd):  # type: ignore[no-untyped-def]
    return torch.empty_like(mean), torch.empty_like(mean)


@normalize_backward.register_fake
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
    given = running_mean if running_mean is not None else input
    ones = torch.ones(input.shape[1], dtype=acc, device=given.device)
    scale = ones if weight is None else weight
    shift = torch.zeros_like(ones) if bias is None else bias
    if not training:
        assert running_mean is not None
        assert running_var is not None
        factor = scale * (running_var + eps).rsqrt()
        rest = shift - running_mean * factor
        out = input * _per_channel(factor, input) + _per_channel(rest, input)
        return out.to(input.dtype)
    count = input.numel() // input.shape[1]
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    with torch.no_grad():
        mean = torch.ops.hap.channel_sums(input) / count
        var = torch.ops.hap.channel_deviations(input, mean) / count
        if running_mean is not None and running_var is not None:
            before = running_mean.clone(), running_var.clone()
            unbiased = momentum * count / (count - 1)
            running_mean.copy_(torch.add(before[0] * (1 - momentum), mean, alpha=momentum))
            running_var.copy_(torch.add(before[1] * (1 - momentum), var, alpha=unbiased))
            mean = torch.ops.hap.by_mode(mean, before[0].to(mean.dtype))
            var = torch.ops.hap.by_mode(var, before[1].to(var.dtype))
        invstd = (var + eps).rsqrt()
    return _Normalized.apply(  # type: ignore[no-untyped-call, no-any-return]
        input, mean, invstd, scale, shift, count
    )
