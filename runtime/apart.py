"""Tensors that share no memory, so that each may be changed in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, with copies of those that share memory with another one."""
    found = list(tensors)
    end = -1
    for begin, last, k in sorted((*_span(x), k) for k, x in enumerate(found)):
        if begin < end:
            found[k] = found[k].clone()
        end = max(end, last)
    return found


def _span(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the one after its last."""
    begin, width = x.data_ptr(), x.element_size()
    if x.is_contiguous():
        return begin, begin + x.numel() * width
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * width if x.numel() else begin
