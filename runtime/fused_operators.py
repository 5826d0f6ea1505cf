"""Logical operators in terms of others, for a compiler that fuses them.

A custom operator is a wall for fusion, and each call costs the host as much as several kernels. The
eager cross-entropy avoids tensors as large as the logits by chunks; compiled, its steps are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hap.capture.attention import attention, attention_backward
from hap.capture.batch_norm import channel_mean, per_channel
from hap.capture.wide_dtype import wide_dtype


def cross_entropy_terms(x: Tensor, target: Tensor, skip: int) -> tuple[Tensor, Tensor]:
    """See :func:`hap.capture.cross_entropy.cross_entropy_terms`."""
    wide = x.to(wide_dtype(x))
    skipped = target == skip
    at = target.masked_fill(skipped, 0).unsqueeze(-1)
    picked = wide.gather(-1, at).squeeze(-1).masked_fill(skipped, 0.0)
    return torch.logsumexp(wide, -1), picked


def cross_entropy_backward(
    grad_lse: Tensor, grad_picked: Tensor, x: Tensor, target: Tensor, lse: Tensor, skip: int
) -> Tensor:
    """See :func:`hap.capture.cross_entropy.cross_entropy_backward`."""
    soft = grad_lse.unsqueeze(-1) * torch.exp(x.to(lse.dtype) - lse.unsqueeze(-1))
    skipped = target == skip
    classes = torch.arange(x.shape[-1], device=x.device)
    there = classes == target.masked_fill(skipped, 0).unsqueeze(-1)
    more = torch.where(there, grad_picked.masked_fill(skipped, 0.0).unsqueeze(-1), 0.0)
    return (soft + more).to(x.dtype)


def channel_variance(x: Tensor, mean: Tensor, count: int) -> Tensor:
    """See :func:`hap.capture.batch_norm.channel_variance`."""
    others = [d for d in range(x.dim()) if d != 1]
    return (x.to(mean.dtype) - per_channel(mean, x)).square().sum(others) / count


def normalize(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See :func:`hap.capture.batch_norm.normalize`."""
    centred = x - per_channel(mean, x)
    return (centred * per_channel(invstd * weight, x) + per_channel(bias, x)).to(x.dtype)


def normalize_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hap.capture.batch_norm.normalize_sums`."""
    others = [d for d in range(x.dim()) if d != 1]
    weighted = grad.to(mean.dtype) * (x - per_channel(mean, x))
    return grad.sum(others, dtype=mean.dtype), weighted.sum(others) * invstd


def normalize_backward(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor,
    weighted: Tensor, count: int,
) -> Tensor:  # fmt: skip
    """See :func:`hap.capture.batch_norm.normalize_backward`."""
    slope, shift = invstd * weighted / count, total / count
    centred = x - per_channel(mean, x)
    rest = grad - per_channel(shift, x) - centred * per_channel(slope, x)
    return (rest * per_channel(invstd * weight, x)).to(x.dtype)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, size: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hap.capture.group_norm.group_norm`."""
    groups = x.unflatten(1, (-1, size)).to(wide_dtype(x))
    inner = list(range(2, groups.dim()))
    var, mean = torch.var_mean(groups, inner, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    y = ((groups - mean) * rstd).flatten(1, 2)
    if weight is not None:
        y = y * per_channel(weight, x)
    if bias is not None:
        y = y + per_channel(bias, x)
    mean, rstd = (t.reshape(t.shape[:2]).to(x.dtype) for t in (mean, rstd))
    return y.to(x.dtype), mean, rstd


FUSED: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.hap.sdpa.default: attention,
    torch.ops.hap.sdpa_backward.default: attention_backward,
    torch.ops.hap.channel_mean.default: channel_mean,
    torch.ops.hap.channel_variance.default: channel_variance,
    torch.ops.hap.normalize.default: normalize,
    torch.ops.hap.normalize_sums.default: normalize_sums,
    torch.ops.hap.normalize_backward.default: normalize_backward,
    torch.ops.hap.group_norm.default: group_norm,
    torch.ops.hap.cross_entropy.default: cross_entropy_terms,
    torch.ops.hap.cross_entropy_backward.default: cross_entropy_backward,
}
"""Logical operator -> a function of operators that the compiler knows."""
