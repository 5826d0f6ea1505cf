"""Fourier transforms of complex numbers that are pairs of real ones, as of ``torch.view_as_real``.

A transform is linear, and transforms each row of the other dims by itself, so that ranks may split those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x).contiguous()


def _numbers(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.contiguous())


def c2c(x: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """Transform pairs to pairs. Shapes: (..., 2) to the same; ``dim`` counts without the last one."""
    return _pairs(aten._fft_c2c(_numbers(x), dim, normalization, forward))


def r2c(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """Transform real numbers to pairs. Shapes: (..., N) to (..., N // 2 + 1, 2) if one-sided, else (..., N, 2)."""
    return _pairs(aten._fft_r2c(x, dim, normalization, onesided))


def c2r(x: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """Transform one-sided pairs to real numbers: ``dim[-1]`` gets ``last_dim_size``."""
    return aten._fft_c2r(_numbers(x), dim, normalization, last_dim_size).contiguous()  # type: ignore[no-any-return]


_c2c = torch.library.custom_op("hap::fft_c2c", mutates_args=())(c2c)
_r2c = torch.library.custom_op("hap::fft_r2c", mutates_args=())(r2c)
_c2r = torch.library.custom_op("hap::fft_c2r", mutates_args=())(c2r)

C2C, R2C, C2R = (getattr(torch.ops.hap, f"fft_{kind}").default for kind in ("c2c", "r2c", "c2r"))


@_c2c.register_fake
def _(x, dim, normalization, forward):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@_r2c.register_fake
def _(x, dim, normalization, onesided):  # type: ignore[no-untyped-def]
    shape = list(x.shape)
    shape[dim[-1]] = shape[dim[-1]] // 2 + 1 if onesided else shape[dim[-1]]
    return x.new_empty([*shape, 2])


@_c2r.register_fake
def _(x, dim, normalization, last_dim_size):  # type: ignore[no-untyped-def]
    shape = list(x.shape[:-1])
    shape[dim[-1]] = last_dim_size
    return x.new_empty(shape)
