"""Bags of embeddings as lookups and sums, whose operators have rows.

ATen's operator counts its indices in bags that begin anywhere, so that no rank knows where its part of the
batch begins. Some of its results are memory that nothing was written to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Replace ``F.embedding_bag``.

    Shapes: ``input`` (bags, size of each), or (indices,) with ``offsets`` (bags,); ``weight`` (rows, D);
    ``per_sample_weights`` as ``input``. Returns (bags, D): zeros for a bag that is empty or all padding.
    """
    rows = F.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )  # fmt: skip
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counted = None
    if padding_idx is not None:
        counted = (input != padding_idx % len(weight)).unsqueeze(-1)
        rows = torch.where(counted, rows, -torch.inf if mode == "max" else 0)
    if offsets is None:
        return _of_equal_bags(rows, counted, mode)
    starts = offsets[:-1] if include_last_offset else offsets
    begun = input.new_zeros(len(input) + 1).index_add(
        0, starts, torch.ones_like(starts, dtype=input.dtype)
    )
    return _of_bags(rows, begun[:-1].cumsum(0) - 1, len(starts), counted, mode)


def _of_equal_bags(rows: Tensor, counted: Tensor | None, mode: str) -> Tensor:
    """Return sums, means or maxima of ``rows`` (bags, size, D); ``counted``: (bags, size, 1)."""
    if mode == "max":
        if not rows.shape[1]:
            return rows.sum(1)
        largest = rows.max(1).values
        return largest if counted is None else torch.where(counted.any(1), largest, 0)
    sums = rows.sum(1)
    if mode == "sum":
        return sums
    if counted is None:
        return sums / max(rows.shape[1], 1)
    return sums / counted.sum(1).clamp(min=1)


def _of_bags(rows: Tensor, bag: Tensor, bags: int, counted: Tensor | None, mode: str) -> Tensor:
    """Return sums, means or maxima of ``rows`` (indices, D) by the number of their bag (indices,)."""
    none = rows.new_zeros(bags, rows.shape[1])
    if mode == "max":
        # Empty bags are zeros; so are those of padding alone.
        place = bag.unsqueeze(1).expand_as(rows)
        largest = none.scatter_reduce(0, place, rows, "amax", include_self=False)
        return torch.where(largest == -torch.inf, 0, largest)
    sums = none.index_add(0, bag, rows)
    if mode == "sum":
        return sums
    each = rows.new_ones(len(rows), 1) if counted is None else counted.to(rows.dtype)
    return sums / rows.new_zeros(bags, 1).index_add(0, bag, each).clamp(min=1)
