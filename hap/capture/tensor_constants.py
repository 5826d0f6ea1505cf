"""Tensors that the forward creates from Python data, such as ``torch.tensor([0, 2])``.

``hap::constant`` keeps the numbers in the graph, where a trace would keep a separate tensor.
Numbers keep Python's precision: in double precision 0.1 is not float32's 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hap.errors import ModelError

LARGEST = 1 << 16
"""Largest number of elements of a constant in a graph."""


@torch.library.custom_op("hap::constant", mutates_args=())
def _constant(
    values: Sequence[float], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the numbers, in row-major order, as a tensor of ``shape``."""
    return torch.tensor(values, dtype=torch.float64).to(device, dtype).reshape(list(shape))


@_constant.register_fake
def _(values, shape, *, dtype, device):  # type: ignore[no-untyped-def]
    return torch.empty(list(shape), dtype=dtype, device=device)


def tensor(data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Replace ``torch.tensor`` in a captured graph."""
    shape = _shape(data)
    if shape is None:  # other objects than numbers
        return torch.tensor(data, dtype=dtype, **options)
    numbers = _flat(data)
    if dtype is not None and dtype.is_floating_point:
        most = torch.finfo(dtype).max
        numbers = [math.copysign(math.inf, n) if abs(n) > most else n for n in numbers]
    if dtype is None:
        kinds = {type(n) for n in numbers}
        whole = torch.bool if kinds == {bool} else torch.int64
        dtype = whole if kinds and float not in kinds else torch.get_default_dtype()
    if len(numbers) > LARGEST:
        raise too_large(len(numbers))
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    if numbers.count(numbers[0]) == len(numbers):
        return torch.full(shape, numbers[0], dtype=dtype)
    made: Tensor = torch.ops.hap.constant(
        [float(n) for n in numbers], shape, dtype=dtype, device=torch.device("cpu")
    )
    return made


def too_large(count: int, where: str = "") -> ModelError:
    return ModelError(
        f"the forward makes a tensor of {count} elements from Python data",
        where=where,
        hint="make it once in __init__ and keep it with register_buffer",
    )


def _shape(data: Any) -> tuple[int, ...] | None:
    """Return the shape of nested lists of numbers; None for other objects."""
    if isinstance(data, bool | int | float):
        return ()
    if not isinstance(data, list | tuple):
        return None
    inner = {_shape(part) for part in data} or {()}
    only = inner.pop()
    return None if inner or only is None else (len(data), *only)


def _flat(data: Any) -> list[Any]:
    return [n for part in data for n in _flat(part)] if isinstance(data, list | tuple) else [data]
