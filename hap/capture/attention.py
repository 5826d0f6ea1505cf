"""Attention and channel dropout as logical operators, run by the best kernel of each device.

A captured graph must not depend on the machine that captured it, but the ATen operators of
scaled-dot-product attention name kernels of one device. ``hap::sdpa`` replaces them in
the graph, with a backward that reuses the saved log-sum-exp.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.wide_dtype import wide_dtype

aten = torch.ops.aten


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention without dropout.

    Shapes: ``q`` (B, H, L, D), ``k`` (B, H, M, D), ``v`` (B, H, M, E), ``mask`` broadcasts
    to (B, H, L, M), boolean (True: attend) or added. Returns (B, H, L, E) and the float
    log-sum-exp of the scores, (B, H, L).
    """
    if q.numel() == 0 or k.numel() == 0:
        return _like_fake(q, v)
    q, k, v = map(_rows, (q, k, v))
    kernel = _kernel(q, k, v, mask, causal)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_additive(mask, q), scale=scale
        )
        return _fresh(out), lse.contiguous()
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return _fresh(out), lse.contiguous()
    if kernel == "efficient":
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned(mask, q, k), True, 0.0, causal, scale=scale
        )
        return _fresh(out), lse[..., : q.shape[-2]].contiguous()
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # weights of 0 where all of a row is masked
    return _fresh((torch.exp(scores - lse.unsqueeze(-1)) @ v.to(lse.dtype)).to(q.dtype)), lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``q``, ``k`` and ``v``; ``mask`` gets none."""
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (_fresh(torch.zeros_like(x)) for x in (q, k, v))
        return dq, dk, dv
    grad, q, k, v, out = map(_rows, (grad, q, k, v, out))
    kernel = _kernel(q, k, v, mask, causal)
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(mask, q), scale=scale
        )
    elif kernel == "flash":
        none = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, causal, none,
            none, scale=scale,
        )  # fmt: skip
    elif kernel == "efficient":
        rows = -(-q.shape[-2] // 32) * 32  # the kernel reads the log-sum-exp in padded rows
        padded = lse
        if rows > lse.shape[-1]:
            padded = F.pad(lse, (0, rows - lse.shape[-1]), value=math.inf)
        none = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _aligned(mask, q, k), out, padded, none, none, 0.0, [True, True, True, False],
            causal, scale=scale,
        )  # fmt: skip
    else:
        dtype = q.dtype
        weights = torch.exp(_scores(q, k, mask, causal, scale) - lse.unsqueeze(-1))
        grad, q, k, v, out = (x.to(lse.dtype) for x in (grad, q, k, v, out))
        dv = weights.transpose(-2, -1) @ grad
        inner = (grad * out).sum(-1, keepdim=True)
        ds = weights * (grad @ v.transpose(-2, -1) - inner) * scale
        dq, dk = ds @ k, ds.transpose(-2, -1) @ q
        dq, dk, dv = (x.to(dtype) for x in (dq, dk, dv))
    return _fresh(dq), _fresh(dk), _fresh(dv)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str:
    """Return the name of a kernel, the same in forward and backward.

    CUDA's kernels read rows of 16 bytes; :func:`torch.nn.functional.scaled_dot_product_attention`
    chooses by the same rules.
    """
    width = q.shape[-1]
    if width != v.shape[-1]:
        return "math"
    if q.device.type != "cuda":
        return "cpu" if q.device.type == "cpu" else "math"
    if q.dtype == torch.float64 or width * q.dtype.itemsize % 16:
        return "math"
    if q.dtype == torch.bfloat16 and not _has_flash(q.device):
        return "math"  # GPUs before Ampere have no kernel for it
    square = q.shape[-2] == k.shape[-2] or not causal
    half = q.dtype in (torch.bfloat16, torch.float16)
    flash = mask is None and half and square and width <= 256 and _has_flash(q.device)
    return "flash" if flash else "efficient"


@functools.cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the scores in the dtype of the log-sum-exp: half precision is too coarse for them."""
    dtype = wide_dtype(q)
    scores = (q.to(dtype) @ k.to(dtype).transpose(-2, -1)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    bias = _additive(mask, q)
    return scores if bias is None else scores + bias


def _rows(x: Tensor) -> Tensor:
    # The CPU kernel assumes a stride of 1 in the last dim, and fails silently otherwise.
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    mask = _rows(mask.reshape((1,) * (4 - mask.dim()) + mask.shape))
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, -math.inf).to(q.dtype)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the added mask, (B, H, L, M); the CUDA kernel reads its rows in blocks of 16."""
    bias = _additive(mask, q)
    if bias is None:
        return None
    if bias.shape[-1] == 1:
        bias = bias.expand(*bias.shape[:-1], k.shape[-2])
    width = bias.shape[-1]
    if width % 16 or bias.storage_offset() % 16 or not bias.is_contiguous():
        bias = F.pad(bias, (0, -width % 16))[..., :width]
    return bias.expand(*q.shape[:-1], k.shape[-2])


def _fresh(out: Tensor) -> Tensor:
    # The layout that the kernels write and that models undo at once with a transpose. Compiled
    # code relies on it: strides must equal those of the fake tensors below.
    turned = out.transpose(1, 2)
    return out if turned.is_contiguous() else turned.contiguous().transpose(1, 2)


def _like_fake(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, length, _ = q.shape
    out = q.new_zeros((b, length, h, v.shape[-1])).transpose(1, 2)
    return out, q.new_zeros((b, h, length), dtype=wide_dtype(q))


sdpa = torch.library.custom_op("hap::sdpa", mutates_args=())(attention)
sdpa_backward = torch.library.custom_op("hap::sdpa_backward", mutates_args=())(attention_backward)


@sdpa.register_fake
def _(q, k, v, mask, causal, scale):  # type: ignore[no-untyped-def]
    return _like_fake(q, v)


@sdpa_backward.register_fake
def _(grad, q, k, v, mask, out, lse, causal, scale):  # type: ignore[no-untyped-def]
    return tuple(_fresh(torch.empty_like(x)) for x in (q, k, v))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    grads = torch.ops.hap.sdpa_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *grads, None, None, None


sdpa.register_autograd(_backward, setup_context=_setup)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Replace the function of the same name in a captured graph.

    Dropout, and a mask that is trained, have no fused kernel on all devices: those
    calls are decomposed, so that the rules see their matmuls and their dropout.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (_repeat_heads(x, query.shape[-3]) for x in (key, value))
    if torch.is_autocast_enabled("cpu"):  # torch's own function casts; a custom op doesn't
        half = torch.get_autocast_dtype("cpu")
        query, key, value = (lowered(x, half) for x in (query, key, value))
        attn_mask = None if attn_mask is None else lowered(attn_mask, half)
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    trained = attn_mask is not None and attn_mask.requires_grad
    if query.dim() == 4 and dropout_p == 0.0 and not trained:
        out: Tensor = torch.ops.hap.sdpa(query, key, value, attn_mask, is_causal, scale)[0]
        return out
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
    # A mask may hide whole rows, whose weights are 0.
    weights = scores.softmax(-1) if attn_mask is None else aten._safe_softmax(scores, -1)
    return torch.matmul(F.dropout(weights, dropout_p), value)


def lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    b, h, length, d = x.shape
    return x.unsqueeze(2).expand(b, h, heads // h, length, d).reshape(b, heads, length, d)


def channel_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Replace ``dropout1d``, ``dropout2d`` and ``dropout3d`` of a batch in a captured graph.

    The mask has a number per channel, from the operator that knows the mode at run time.
    """
    if not training:
        return input
    ones = torch.ones(
        (*input.shape[:2], *(1 for _ in input.shape[2:])), dtype=input.dtype, device=input.device
    )
    return input * F.dropout(ones, p)
