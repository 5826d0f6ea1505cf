"""Lookups in a sharded dim: each rank answers for the indices that it holds.

A rank's part of the dim holds the numbers from ``start`` to ``stop`` of ``total``. It looks up
its own ones, counted from its start; all others must leave no trace in its term of the result.
:data:`hap.runtime.localize.LOOKUPS` says how each operator passes over a number.
"""

from __future__ import annotations

from torch import Tensor

from hap.capture import torch_private

Span = tuple[int, int, int]
"""The numbers of one rank: (its first, the first after its last, how many there are in all)."""

IGNORED_NUMBER = -1
"""Placeholder of other ranks' numbers where an operator can ignore a number."""


def own_or_ignored(index: Tensor, span: Span, skip: int) -> Tensor:
    """Numbers counted from the rank's start; -1 for other ranks' and for ``skip``."""
    _check(index, span, skip)
    others = _outside(index, span) | (index == skip)
    return (index - span[0]).masked_fill_(others, IGNORED_NUMBER)


def own_or_first(index: Tensor, span: Span) -> Tensor:
    """Numbers counted from the rank's start; 0 for other ranks'."""
    _check(index, span, None)
    return (index - span[0]).masked_fill_(_outside(index, span), 0)


def zero_for_others(x: Tensor, index: Tensor, span: Span, at: int) -> Tensor:
    """``x`` with zeros where ``index`` is another rank's; its dims are those of x from ``at``."""
    after = x.dim() - at - index.dim()
    return x.masked_fill(_outside(index, span).reshape(*index.shape, *(1,) * after), 0)


def _outside(index: Tensor, span: Span) -> Tensor:
    start, stop, _ = span
    return (index < start) | (index >= stop)


def _check(index: Tensor, span: Span, skip: int | None) -> None:
    """A number that no rank has would go unnoticed: each would take it for another's."""
    total = span[-1]
    known = (index >= 0) & (index < total)
    if skip is not None:
        known |= index == skip
    torch_private.assert_async(known.all(), f"a number to look up is not in 0..{total - 1}")
