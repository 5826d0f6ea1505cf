"""Decompositions of torch's attention kernels to the logical operator of :mod:`.attention`. (torch)

``F.scaled_dot_product_attention`` dispatches to a kernel of the capturing device, also inside
``nn.MultiheadAttention``, and a model may call a kernel by its name. In the graph all of them
are ``hap::sdpa`` and its backward, which every device runs by its best kernel. A kernel that drops
weights draws its own mask, which differs between devices: such a call keeps its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    """Return (result, log-sum-exp), unless weights are dropped."""
    if dropout:
        return NotImplemented
    return torch.ops.hap.sdpa(q, k, v, mask, causal, _scale(q, scale))


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    dropout: float, causal: bool, scale: float | None,
) -> Any:  # fmt: skip
    if dropout:
        return NotImplemented
    mask = mask if mask is not None and mask.numel() else None  # no mask may come as an empty one
    return torch.ops.hap.sdpa_backward(grad, q, k, v, mask, out, lse, causal, _scale(q, scale))


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _none(q: Tensor) -> Tensor:
    """Return a substitute for a kernel's backward state, such as that of its generator."""
    return q.new_empty((0,), dtype=torch.int64)


def _cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
    return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale)


def _cpu_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    return _gradients(grad, q, k, v, attn_mask, out, lse, dropout_p, is_causal, scale)


def _noted(q: Tensor, k: Tensor, found: Any) -> Any:
    """Return the results of the flash, cuDNN and overrideable kernels."""
    if found is NotImplemented:
        return found
    return (*found, _none(q), _none(q), q.shape[-2], k.shape[-2], *(_none(q) for _ in range(3)))


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    return _noted(q, k, _attend(q, k, v, None, dropout_p, is_causal, scale))


def _flash_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *,
    scale=None,
):  # fmt: skip
    return _gradients(grad, q, k, v, None, out, lse, dropout_p, is_causal, scale)


def _cudnn(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    return _noted(q, k, _attend(q, k, v, attn_bias, dropout_p, is_causal, scale))


def _cudnn_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k, dropout_p,
    is_causal, *, scale=None,
):  # fmt: skip
    return _gradients(grad, q, k, v, attn_bias, out, lse, dropout_p, is_causal, scale)


def _overrideable(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    return _noted(q, k, _attend(q, k, v, attn_bias, dropout_p, is_causal, scale))


def _overrideable_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, attn_bias, grad_input_mask, out, lse, cum_q, cum_k, max_q, max_k, dropout_p,
    is_causal, seed, offset, *, scale=None,
):  # fmt: skip
    if grad_input_mask[3]:
        return NotImplemented
    found = _gradients(grad, q, k, v, attn_bias, out, lse, dropout_p, is_causal, scale)
    return found if found is NotImplemented else (*found, None)


def _efficient(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    found = _attend(q, k, v, attn_bias, dropout_p, is_causal, scale)
    return found if found is NotImplemented else (*found, _none(q), _none(q))


def _efficient_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    if grad_input_mask[3]:
        return NotImplemented
    found = _gradients(grad, q, k, v, attn_bias, out, lse, dropout_p, is_causal, scale)
    return found if found is NotImplemented else (*found, None)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_backward,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: _overrideable,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _overrideable_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
"""Kernel -> its decomposition. Kernels by matrix products decompose themselves."""
