"""Collectives in pieces: one runs while the next one's rows arrive, or while the last one's are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from hap.ir.program import Convert, Value
from hap.ir.shared_pieces import piece
from hap.runtime.context import Context
from hap.runtime.lanes import Pending
from hap.runtime.pipeline.boundary import Arrival


@dataclass(frozen=True, slots=True)
class Pieces:
    """An all-gather or a reduce-scatter along dim 0, in pieces of each rank's rows.

    ``count`` is the number of pieces, ``sizes`` are the rows of each rank.
    """

    step: Convert
    count: int
    sizes: tuple[int, ...]

    @property
    def source(self) -> Value:
        """The value that is converted."""
        return Value(self.step.tensor, self.step.src)

    @property
    def result(self) -> Value:
        """The value that is made."""
        return Value(self.step.tensor, self.step.dst)

    def gathered(self, ctx: Context, arrival: Arrival) -> Tensor:
        """Return the whole tensor of this rank's shard, which arrives, and those of others."""
        whole: Tensor | None = None
        running: Pending | None = None
        for number in range(self.count):
            rows = ctx.idle(partial(arrival.wait_piece, number))
            sizes = [end - first for first, end in self._ends(number)]
            following = ctx.issue("all_gather", rows, 0, sizes, self.step.implementation)
            if running is not None:
                whole = self._placed(number - 1, ctx.wait(running), whole)
            running = following
        assert running is not None
        return self._placed(self.count - 1, ctx.wait(running), whole)

    def _placed(self, number: int, rows: Tensor, whole: Tensor | None) -> Tensor:
        """Copy the rows of a piece to their places in the whole tensor, and return that."""
        if whole is None:
            whole = rows.new_empty((sum(self.sizes), *rows.shape[1:]))
        at = 0
        for first, end in self._ends(number):
            whole[first:end] = rows[at : at + end - first]
            at += end - first
        return whole

    def reduced(self, ctx: Context, term: Tensor) -> Iterator[Tensor]:
        """Yield this rank's rows of the sum of all ranks' terms, one piece after the other.

        The next piece is reduced meanwhile.
        """
        running = self._reduce(ctx, term, 0)
        for number in range(1, self.count):
            following = self._reduce(ctx, term, number)
            yield ctx.wait(running)
            running = following
        yield ctx.wait(running)

    def _reduce(self, ctx: Context, term: Tensor, number: int) -> Pending:
        parts = [term[first:end] for first, end in self._ends(number)]
        sizes = [len(part) for part in parts]
        how = self.step.implementation
        return ctx.issue("reduce_scatter", torch.cat(parts), 0, sizes, how)

    def _ends(self, number: int) -> list[tuple[int, int]]:
        """Return the rows of a piece in the whole tensor, rank by rank."""
        starts = accumulate(self.sizes, initial=0)
        return [
            piece(s, s + n, number, self.count) for s, n in zip(starts, self.sizes, strict=False)
        ]
