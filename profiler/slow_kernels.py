"""Operators that may take longer than their memory traffic, on tables of (rows, width), for probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

_CHANNELS, _SIZE = 32, 16
"""Of the images that pooling reads."""


class SlowKernel(NamedTuple):
    """An operator: its kind of work, the tables that it reads, and what else it moves.

    ``more``: elements per element of a table, as if all had its dtype.
    ``operations``: per element.
    """

    name: str
    kind: str
    run: Callable[..., object]
    reads: int
    more: float
    quick: bool = False
    operations: int = 1


def _norm(x: Tensor) -> object:
    weight = x[0]
    return aten.native_layer_norm(x, [x.shape[1]], weight, weight, 1e-5)


def _norm_backward(grad: Tensor, x: Tensor) -> object:
    weight, row = x[0], x[:, :1].contiguous()  # in place of mean and scale, which cost the same
    given = (grad, x, [x.shape[1]], row, row, weight, weight, [True, True, True])
    return aten.native_layer_norm_backward(*given)


def _dropout(x: Tensor) -> Tensor:  # as in the runtime's context
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(0.9)
    return (x * mask).mul_(1 / 0.9)


def _pool(x: Tensor) -> object:
    return aten.max_pool2d_with_indices(x.view(-1, _CHANNELS, _SIZE, _SIZE), [2, 2], [2, 2])


def _pool_backward(x: Tensor) -> object:
    images = x.view(-1, _CHANNELS, _SIZE, _SIZE)
    grad = images.view(-1)[: x.numel() // 4].view(-1, _CHANNELS, _SIZE // 2, _SIZE // 2)
    largest = _indices(len(images), x.device)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    return aten.max_pool2d_with_indices_backward(grad, images, *window, largest)


@cache
def _indices(images: int, device: torch.device) -> Tensor:
    """Return the place of the first pixel of each window, as pooling returns it."""
    at = torch.arange(0, _SIZE, 2, device=device)
    places = at[:, None] * _SIZE + at
    return places.expand(images, _CHANNELS, *places.shape).contiguous()


SLOW_KERNELS: Final = (
    SlowKernel("gelu", "math", aten.gelu, 1, 1, quick=True),
    SlowKernel("gelu_backward", "math", aten.gelu_backward, 2, 1, quick=True, operations=2),
    SlowKernel("softmax", "math", lambda x: torch.softmax(x, -1), 1, 1),
    SlowKernel("exp", "math", torch.exp, 1, 1),
    SlowKernel("tanh", "tanh", torch.tanh, 1, 1, quick=True),
    SlowKernel("sum of rows", "reduce", lambda x: x.sum(0, keepdim=True), 1, 0, quick=True),
    SlowKernel("layer_norm", "norm", _norm, 1, 1, quick=True),
    SlowKernel("layer_norm_backward", "norm_backward", _norm_backward, 2, 1, quick=True),
    SlowKernel("dropout", "random", _dropout, 1, 1.25, quick=True),
    SlowKernel("max_pool", "pool", _pool, 1, 0.75, quick=True),
    SlowKernel("max_pool_backward", "pool_backward", _pool_backward, 1, 1.75, quick=True),
)
