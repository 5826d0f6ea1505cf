"""Random numbers of other distributions, made from those that ranks draw as one device does.

A rank draws uniform and normal numbers of its shard so that all shards together are one device's. Other distributions
are functions of them here: in the captured graph, and on the one device that a program is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _uniform(x: Tensor, start: float = 0.0, end: float = 1.0, **_: Any) -> Tensor:
    return torch.rand_like(x) * (end - start) + start


def _normal_like(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return torch.randn_like(x) * std + mean


def _normal_of_size(mean: float, std: float, size: Sequence[int], **options: Any) -> Tensor:
    options.pop("generator", None)
    return torch.randn(size, **options) * std + mean


def _normal_of_mean(mean: Tensor, std: float = 1.0, **_: Any) -> Tensor:
    return torch.randn_like(mean) * std + mean


def _normal_of_deviation(mean: float, std: Tensor, **_: Any) -> Tensor:
    return torch.randn_like(std) * std + mean


def _normal_of_both(mean: Tensor, std: Tensor, **_: Any) -> Tensor:
    return torch.randn_like(mean + std) * std + mean


def _bernoulli(p: Tensor, **_: Any) -> Tensor:
    return (torch.rand_like(p) < p).to(p.dtype)


def _bernoulli_like(x: Tensor, p: Tensor, **_: Any) -> Tensor:
    return (torch.rand_like(x) < p).to(x.dtype)


def _exponential(x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    # Never 0: a Gumbel noise is the logarithm of it.
    least = torch.finfo(x.dtype).tiny
    return (-torch.log1p(-torch.rand_like(x))).clamp(min=least) / rate


def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return torch.exp(torch.randn_like(x) * std + mean)


def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    angle = math.pi * (torch.rand_like(x) - 0.5)
    return median + sigma * angle.sin() / angle.cos()


def _geometric(x: Tensor, p: float, **_: Any) -> Tensor:
    return torch.ceil(torch.log1p(-torch.rand_like(x)) / math.log1p(-p)).clamp(min=1.0)


def _whole_like(x: Tensor, high: int, **options: Any) -> Tensor:
    return _whole_between(x, 0, high, **options)


def _whole_between(x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    dtype = options.get("dtype") or x.dtype
    return torch.randint(low, high, x.shape, dtype=dtype, device=x.device)


def _permutation(count: int, **options: Any) -> Tensor:
    order = torch.rand(count, dtype=torch.float64, device=options.get("device")).argsort()
    return order.to(options.get("dtype") or torch.int64)


def _multinomial(p: Tensor, count: int, replacement: bool = False, **_: Any) -> Any:
    """Return the indices of the largest ``p / e``, ``e`` exponential (Efraimidis and Spirakis, 2006)."""
    if replacement and count > 1:
        return NotImplemented
    return (p / _exponential(p)).topk(count, -1).indices


def _without_generator(draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*args: Any, generator: Any = None, **options: Any) -> Any:
        return NotImplemented if generator else draw(*args, **options)

    return drawn


DRAWS: dict[Any, Callable[..., Any]] = {
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal_like,
    aten.normal.float_float: _normal_of_size,
    aten.normal.Tensor_float: _normal_of_mean,
    aten.normal.float_Tensor: _normal_of_deviation,
    aten.normal.Tensor_Tensor: _normal_of_both,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli_like,
    aten.exponential.default: _exponential,
    aten.log_normal.default: _log_normal,
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    aten.randint_like.default: _whole_like,
    aten.randint_like.low_dtype: _whole_between,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten.rand.generator: _without_generator(torch.rand),
    aten.randn.generator: _without_generator(torch.randn),
    aten.randint.generator: _without_generator(torch.randint),
    aten.randint.low_generator: _without_generator(torch.randint),
    aten.randperm.generator: _without_generator(_permutation),
}
"""Operator that draws -> its numbers from those of ``rand_like``, ``randn_like`` and ``randint``."""

IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal_like,
    aten.bernoulli_.Tensor: _bernoulli_like,
    aten.exponential_.default: _exponential,
    aten.log_normal_.default: _log_normal,
    aten.cauchy_.default: _cauchy,
    aten.geometric_.default: _geometric,
}
"""The same for operators that write into their first argument."""
