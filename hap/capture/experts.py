"""Mixtures of experts: each row is multiplied by the matrix of its expert.

Kernels for experts read rows that are sorted by expert, and a sorted batch can't be split by its rows. In the
graph, ``hap::expert_mm`` takes the rows in the order of the tokens, so that ranks may split the rows, the
experts, or the columns of their matrices; the kernel sorts. After MegaBlocks (Gale et al., 2023), no
token is dropped and nothing is padded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.attention import lowered

NONE = -2
"""Value of ``skip`` if every row has an expert. A rank that holds some of the experts skips the rows of the
others by another value."""


def expert_mm(x: Tensor, weight: Tensor, expert: Tensor, skip: int) -> Tensor:
    """Return ``x[s] @ weight[expert[s]]`` for each row ``s``, and zeros where ``expert`` is ``skip``.

    Shapes: ``x`` (S, K), ``weight`` (E, K, N), ``expert`` (S,) of whole numbers; the result is (S, N).
    """
    order, ends = _sorted(expert, len(weight), skip)
    if _has_kernel(x, weight):
        rows = F.grouped_mm(x[order], weight, offs=ends)
        out = torch.empty_like(rows).index_copy_(0, order, rows)
        # The kernel leaves skipped rows, the last ones, as they were in memory.
        return out if skip == NONE else out.masked_fill_((expert == skip).unsqueeze(1), 0.0)
    out = x.new_zeros(len(x), weight.shape[2])
    for number, rows in _groups(order, ends):
        out[rows] = x[rows] @ weight[number]
    return out


def expert_mm_backward(x: Tensor, grad: Tensor, expert: Tensor, experts: int, skip: int) -> Tensor:
    """Return the gradient of the weights of :func:`expert_mm`.

    Shapes: ``x`` (S, K), ``grad`` of its result (S, N), ``expert`` (S,); the result is (``experts``, K, N).
    """
    order, ends = _sorted(expert, experts, skip)
    if _has_kernel(x, grad):
        return F.grouped_mm(x[order].t(), grad[order], offs=ends)
    out = x.new_zeros(experts, x.shape[1], grad.shape[1])
    for number, rows in _groups(order, ends):
        torch.mm(x[rows].t(), grad[rows], out=out[number])
    return out


def _sorted(expert: Tensor, experts: int, skip: int) -> tuple[Tensor, Tensor]:
    """Return the rows in the order of their experts, skipped ones last, and the end of each expert's rows."""
    given = expert if skip == NONE else expert.masked_fill(expert == skip, experts)
    numbers, order = torch.sort(given, stable=True)
    every = torch.arange(experts, device=expert.device, dtype=numbers.dtype)
    return order, torch.searchsorted(numbers, every, right=True, out_int32=True)


def _has_kernel(x: Tensor, other: Tensor) -> bool:
    """Return whether torch's kernel takes these matrices; elsewhere torch runs a loop, too."""
    aligned = all(t.shape[-1] * t.itemsize % 16 == 0 and t.numel() for t in (x, other))
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


def _groups(order: Tensor, ends: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that has rows, and its rows."""
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            yield number, order[start:end]
        start = end


_product = torch.library.custom_op("hap::expert_mm", mutates_args=())(expert_mm)
_weights = torch.library.custom_op("hap::expert_mm_backward", mutates_args=())(expert_mm_backward)


@_product.register_fake
def _(x, weight, expert, skip):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[2])


@_weights.register_fake
def _(x, grad, expert, experts, skip):  # type: ignore[no-untyped-def]
    return x.new_empty(experts, x.shape[1], grad.shape[1])


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, expert, ctx.skip = inputs
    ctx.save_for_backward(x, weight, expert)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight, expert = ctx.saved_tensors
    of_x = torch.ops.hap.expert_mm(grad, weight.transpose(1, 2), expert, ctx.skip)
    of_weight = torch.ops.hap.expert_mm_backward(x, grad, expert, len(weight), ctx.skip)
    return of_x, of_weight, None, None


_product.register_autograd(_backward, setup_context=_setup)


def _by_row(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Replace the forward of a module of experts of transformers.

    Shapes: ``hidden_states`` (T, D), ``top_k_index`` and ``top_k_weights`` (T, number of experts per token).
    """
    module: Any = self
    tokens, chosen = top_k_index.shape
    expert = top_k_index.reshape(-1)

    def linear(x: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        weight = weight if module.is_transposed else weight.transpose(1, 2)
        if module.config._experts_implementation == "eager" and torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            x, weight = lowered(x, half), lowered(weight, half)
        out: Tensor = torch.ops.hap.expert_mm(x.to(weight.dtype), weight, expert, NONE)
        if module.has_bias:
            out = out + getattr(module, f"{name}_bias")[expert]
        return out

    out = hidden_states.repeat_interleave(chosen, dim=0)
    if module.has_gate:
        out = module._apply_gate(linear(out, "gate_up_proj"))
    else:
        out = module.act_fn(linear(out, "up_proj"))
    out = linear(out, "down_proj")
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    out = out * top_k_weights.reshape(-1, 1)
    summed: Tensor = out.view(tokens, chosen, -1).sum(dim=1)
    return summed.to(hidden_states.dtype)


@contextlib.contextmanager
def experts_by_row() -> Iterator[None]:
    """Let modules of experts of transformers, which read sorted rows by default, call ``hap::expert_mm``."""
    moe: Any = sys.modules.get("transformers.integrations.moe")
    if moe is None or not hasattr(moe, "ExpertsInterface"):
        yield
        return
    original = moe.ExpertsInterface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _by_row if name in ("eager", "grouped_mm") else original(self, name, default)

    with mock.patch.object(moe.ExpertsInterface, "get_interface", get_interface):
        yield
