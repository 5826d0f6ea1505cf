"""Cross-entropy as a logical operator, computable from a rank's shard of the classes.

``log_softmax`` needs all classes of a row for any of its results, so a graph that contains
it can't split them. ``hap::cross_entropy`` returns the two terms of the loss, both of which
ranks can combine from their shards of the classes: the log-sum-exp of a row, and
its logit at the target. They are as small as the targets, so the only tensor as large as the logits
is their gradient. After Megatron-LM's vocabulary-parallel loss (Shoeybi et al.,
"Megatron-LM", 2019), with one figure in place of its maximum and sum of exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.wide_dtype import wide_dtype
from hap.ir.loss_chunks import CHUNK

aten = torch.ops.aten


def cross_entropy_terms(x: Tensor, target: Tensor, skip: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of ``x`` over its last dim, and ``x`` at ``target`` (0 at ``skip``).

    Shapes: ``x`` (N, ..., C), ``target`` (N, ...) of class numbers, results as ``target``, in
    float32 if ``x`` has half precision.
    """
    acc = wide_dtype(x)
    largest = torch.empty(target.shape, dtype=x.dtype, device=x.device)
    shifted = torch.empty(target.shape, dtype=acc, device=x.device)
    for rows in _chunks(x):
        # The fused kernel is twice as fast as an exponential and a sum; the log-sum-exp is the
        # largest logit less the kernel's largest result.
        torch.amax(x[rows], -1, out=largest[rows])
        torch.amax(torch.log_softmax(x[rows], -1, dtype=acc), -1, out=shifted[rows])
    lse = torch.where(largest == -math.inf, largest, largest.to(acc) - shifted)
    skipped = target == skip
    at = target.masked_fill(skipped, 0).unsqueeze(-1)
    picked = x.gather(-1, at).squeeze(-1).masked_fill(skipped, 0.0)
    return lse, picked.to(acc)


def cross_entropy_backward(
    grad_lse: Tensor, grad_picked: Tensor, x: Tensor, target: Tensor, lse: Tensor, skip: int
) -> Tensor:
    """Return the gradient of ``x``: ``grad_lse * softmax(x)``, plus ``grad_picked`` at targets."""
    out = _like(x)
    first = x[next(_chunks(x), slice(0))]
    y, seed = (torch.zeros_like(first, dtype=lse.dtype) for _ in range(2))
    negated = -grad_lse
    for rows in _chunks(x):
        # ``exp(y) * grad_lse`` by the fastest kernel: the gradient of a log-softmax y
        # is ``g - exp(y) * sum(g)``, here with all of g in the first column, corrected after.
        scale = negated[rows]
        y, seed = y[: len(scale)], seed[: len(scale)]  # the last chunk may be shorter
        torch.sub(x[rows], lse[rows].unsqueeze(-1), out=y)
        seed[..., 0] = scale
        if out.dtype == y.dtype and out.is_contiguous():  # the kernel ignores strides of its result
            aten._log_softmax_backward_data.out(seed, y, -1, y.dtype, out=out[rows])
        else:
            out[rows] = aten._log_softmax_backward_data(seed, y, -1, y.dtype)
    if out.numel():
        out[..., 0] = (x[..., 0] - lse).exp() * grad_lse
        skipped = target == skip
        # One entry per row, by index: scatter_add_ would copy a whole half-precision tensor.
        lines, at = out.view(-1, out.shape[-1]), target.masked_fill(skipped, 0).reshape(-1)
        given = grad_picked.masked_fill(skipped, 0.0).to(out.dtype).reshape(-1)
        lines[torch.arange(len(lines), device=out.device), at] += given
    return out


def _like(x: Tensor) -> Tensor:
    """Return a tensor of the shape of ``x``; aligned rows stay aligned (:mod:`hap.runtime.aligned_rows`)."""
    if x.dim() == 2 and x.stride(1) == 1 and 0 < (x.stride(0) - x.shape[1]) * x.itemsize < 16:
        rows = x.new_empty(x.shape[0], x.stride(0))
        rows[:, x.shape[1] :] = 0  # the gap after each row: some products read it, times zero
        return rows[:, : x.shape[1]]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _chunks(x: Tensor) -> Iterator[slice]:
    """Yield slices of the first dim, of about :data:`CHUNK` elements each."""
    size = x.shape[0]
    step = max(1, CHUNK.get(x.device.type, CHUNK["cuda"]) * size // max(x.numel(), 1))
    for start in range(0, size, step):
        yield slice(start, start + step)


_terms = torch.library.custom_op("hap::cross_entropy", mutates_args=())(cross_entropy_terms)
_gradient = torch.library.custom_op("hap::cross_entropy_backward", mutates_args=())(
    cross_entropy_backward
)


@_terms.register_fake
def _(x, target, skip):  # type: ignore[no-untyped-def]
    lse = target.new_empty(target.shape, dtype=wide_dtype(x))
    return lse, torch.empty_like(lse)


@_gradient.register_fake
def _(grad_lse, grad_picked, x, target, lse, skip):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, target, ctx.skip = inputs
    ctx.save_for_backward(x, target, output[0])


def _backward(ctx, grad_lse, grad_picked):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    return torch.ops.hap.cross_entropy_backward(grad_lse, grad_picked, *saved, ctx.skip), None, None


_terms.register_autograd(_backward, setup_context=_setup)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None,
    size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Replace the function of the same name in a captured graph.

    Targets that are probabilities, and smoothed labels with weights, keep torch's operators. The
    mean divides by the global count, or weight, of the targets that are not ignored.
    """
    old = size_average is not None or reduce is not None
    if old or (label_smoothing and weight is not None) or target.is_floating_point():
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    lone = input.dim() == 1
    scores, classes = (input[None], target[None]) if lone else (input, target)
    rows = scores.movedim(1, -1) if scores.dim() > 2 else scores
    ignored = classes == ignore_index
    lse: Tensor | float
    if rows.stride(-1) == 1 or rows.numel() == 0:
        lse, picked = torch.ops.hap.cross_entropy(rows, classes, ignore_index)
    else:  # of pixels: the operator would copy the logits, and their few classes are not split
        logs, lse = scores.log_softmax(1), 0.0
        at = classes.masked_fill(ignored, 0).unsqueeze(1)
        picked = logs.gather(1, at).squeeze(1).to(wide_dtype(logs))
        rows = logs.movedim(1, -1)
    if label_smoothing:
        others = rows.sum(-1) * (label_smoothing / rows.shape[-1])
        picked = picked * (1 - label_smoothing) + others
    losses = (lse - picked).masked_fill(ignored, 0.0)
    if weight is None:
        weights = (~ignored).to(losses.dtype)
    else:
        weights = weight[classes.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)
        losses = losses * weights
    loss: Tensor
    if reduction == "none":
        loss = losses[0] if lone else losses
    elif reduction == "sum":
        loss = losses.sum()
    else:
        loss = losses.sum() / weights.sum()
    if torch.is_autocast_enabled("cpu"):  # torch's own loss then has single precision
        return loss
    return loss.to(input.dtype)
