"""Sums over microbatches: the terms of one after the other, until what follows reads them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from hap.ir.program import Value
from hap.runtime.apart import apart
from hap.runtime.pipeline.segments import SegmentLayout, StageSegment

Env = dict[Value, Tensor]


class Sums:
    """The sums of one step of a stage.

    Args:
        sent: terms that messages read, which must not change.
    """

    def __init__(self, layout: SegmentLayout, sent: Collection[Value]) -> None:
        self._layout, self._sent = layout, sent
        self._known: Env = {}

    def add(self, terms: Env) -> None:
        """Add a microbatch's terms; the first ones become the sums."""
        known = [term for term in terms if term in self._known]
        if known:
            torch._foreach_add_([self._known[t] for t in known], [terms[t] for t in known])
        first = [term for term in terms if term not in self._known]
        for term, own in zip(first, apart([terms[t] for t in first]), strict=True):
            changes = term in self._sent and own is terms[term]
            self._known[term] = own.clone() if changes else own

    def total(self, node: str, term: Tensor | None) -> Tensor:
        """Return a sum with its last term, unless it has that already."""
        before = self._known.pop(self._layout.complete[node].term, None)
        if before is None or term is None:
            total = term if before is None else before
            assert total is not None
            return total
        return before.add_(term)

    def finish(self, env: Env) -> None:
        """Make the sums available to what follows, and begin anew."""
        env |= self._known
        for each in self._layout.sums:
            if each.term in env and (
                each.term in self._known or each.segment >= StageSegment.GRADIENTS
            ):
                env[each.total] = env[each.term]
        self._known = {}
