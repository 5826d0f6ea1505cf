"""Calls that measure the fixed costs of an operator: its launch, and its issuing by the host.

On a fast GPU in half precision kernels are shorter than their issuing, so that the step takes the time of
the host. The host issues a single operator in a loop three times as fast as the
operators of a step, which differ, convert their inputs, and take views. So :func:`layer` is a layer of
a transformer, of the size of BERT-base, so that libraries choose kernels as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.attention import attention, attention_backward

aten = torch.ops.aten
Call = Callable[[], object]
Cut = Callable[..., Tensor]
"""Sizes -> a tensor in single precision, most likely in no cache."""

LENGTH, HEADS, WIDTH = 128, 12, 768
KERNELS = 74
"""Operators of a call of :func:`layer` that are not views."""


def small(cut: Cut) -> Call:
    """Return a call that runs the next of several small operators, with two views each."""
    x, row = cut(4, 4).clone(), cut(4).clone()
    operators: Iterator[Call] = cycle([
        lambda: aten.add.Tensor(aten.t(aten.alias(x)), x),
        lambda: aten.addmm(row, aten.transpose.int(x, 0, 1), aten.view(x, [4, 4])),
        lambda: aten.sum.dim_IntList(aten.unsqueeze(aten.t(x), 0), [0], True),
        lambda: aten.gelu(aten.view(aten.slice.Tensor(x, 0, 0, 2), [8])),
        lambda: aten.native_layer_norm(aten.view(aten.alias(x), [1, 4, 4]), [4], row, row, 1e-5),
        lambda: aten.clone(aten.permute(aten.expand(x, [4, 4]), [1, 0])),
    ])  # fmt: skip
    return lambda: next(operators)()


def product(cut: Cut) -> Call:
    """Return a call that evicts all else from a CPU's caches."""
    return lambda: torch.mm(cut(512, 512), cut(512, 512))


def long(cut: Cut) -> Call:
    """Return a call that keeps a GPU busy for 10 ms or more."""
    return lambda: torch.mm(cut(8192, 8192), cut(8192, 8192))


def layer(cut: Cut, half: torch.dtype, *, batch: int = 32) -> Call:
    """Return a call that runs the forward and the backward of one layer as emitted code does.

    Args:
        half: the dtype of products, to which parameters are converted at each use.
        batch: number of sequences.
    """
    x, norm = cut(batch * LENGTH, WIDTH).clone(), cut(WIDTH).clone()
    weights = [(cut(WIDTH, WIDTH).clone(), cut(WIDTH).clone()) for _ in range(6)]
    heads = (batch, LENGTH, HEADS, WIDTH // HEADS)
    scale = (WIDTH // HEADS) ** -0.5

    def linear(x: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = (p.to(half, copy=True) for p in weights[number])
        x = x.to(half, copy=True).reshape(-1, WIDTH)
        return torch.addmm(bias, x, torch.t(weight)), x, weight

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        grad = grad.to(half, copy=True).reshape(-1, WIDTH)
        torch.mm(torch.t(grad), x).to(torch.float32, copy=True)
        torch.sum(grad, [0]).to(torch.float32, copy=True)
        return torch.mm(grad, weight)

    def normed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, [WIDTH], norm, norm, 1e-5)

    def normed_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        args: Any = grad, x, [WIDTH], mean, rstd, norm, norm, [True, True, True]
        return aten.native_layer_norm_backward(*args)[0]  # type: ignore[no-any-return]

    def call() -> object:
        projected = [linear(x, number) for number in range(3)]
        q, k, v = (torch.transpose(y.reshape(heads), 1, 2) for y, _, _ in projected)
        out, lse = attention(q, k, v, None, False, scale)
        mixed = linear(torch.transpose(out, 1, 2), 3)
        first = torch.add(x, mixed[0])
        middle, mean, rstd = normed(first)
        wide = linear(middle, 4)
        narrow = linear(F.gelu(wide[0]), 5)
        last = torch.add(middle, narrow[0])
        grad, last_mean, last_rstd = normed(last)

        grad = normed_backward(grad, last, last_mean, last_rstd)
        inner = aten.gelu_backward(backward(grad, *narrow[1:]), wide[0])
        grad = torch.add(grad, backward(inner, *wide[1:]))
        grad = normed_backward(grad, first, mean, rstd)
        upper = torch.transpose(backward(grad, *mixed[1:]).reshape(heads), 1, 2)
        for part, made in zip(
            attention_backward(upper, q, k, v, None, out, lse, False, scale), projected, strict=True
        ):
            grad = torch.add(grad, backward(torch.transpose(part, 1, 2), *made[1:]))
        return grad

    return call
