"""Lookups in a sharded dim: each rank looks up the indices of its shard.

A rank's shard holds the indices from ``start`` to ``stop`` of ``total``. The rank looks up these,
relative to ``start``; other ranks' indices must contribute nothing to its partial result.
:data:`hap.runtime.localize.LOOKUPS` has each operator's way to ignore an index.
"""

from __future__ import annotations

from torch import Tensor

from hap.capture import torch_private

Span = tuple[int, int, int]
"""The indices of one rank: (first, last + 1, total number of indices)."""

IGNORED_NUMBER = -1
"""Replaces other ranks' indices, if the operator can ignore an index."""


def own_or_ignored(index: Tensor, span: Span, skip: int) -> Tensor:
    """Return indices relative to the rank's start; -1 for other ranks' and for ``skip``."""
    _check(index, span, skip)
    others = _outside(index, span) | (index == skip)
    return (index - span[0]).masked_fill_(others, IGNORED_NUMBER)


def own_or_first(index: Tensor, span: Span) -> Tensor:
    """Return indices relative to the rank's start; 0 for other ranks'."""
    _check(index, span, None)
    return (index - span[0]).masked_fill_(_outside(index, span), 0)


def zero_for_others(x: Tensor, index: Tensor, span: Span, at: int) -> Tensor:
    """Zero ``x`` where ``index`` is another rank's; dims of ``index`` are x's from ``at`` on."""
    after = x.dim() - at - index.dim()
    return x.masked_fill(_outside(index, span).reshape(*index.shape, *(1,) * after), 0)


def _outside(index: Tensor, span: Span) -> Tensor:
    start, stop, _ = span
    return (index < start) | (index >= stop)


def _check(index: Tensor, span: Span, skip: int | None) -> None:
    """Check that indices are in range, since each rank would take a bad one for another rank's."""
    total = span[-1]
    known = (index >= 0) & (index < total)
    if skip is not None:
        known |= index == skip
    torch_private.assert_async(known.all(), f"a number to look up is not in 0..{total - 1}")
