"""A sampler of a rank's rows of each global batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from hap.ir.plan import Plan


class RankBatchSampler(Sampler[list[int]]):
    """For ``DataLoader(dataset, batch_sampler=RankBatchSampler(plan, len(dataset), rank))``.

    All ranks draw the same order; of every global batch this rank gets its own rows, as many
    as its share of the batch. A last, incomplete global batch is dropped.

    Args:
        length: samples in the dataset.
        seed: of the order, together with :meth:`set_epoch`; the same on every rank.
    """

    def __init__(
        self, plan: Plan, length: int, rank: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._rows = plan.batch_rows(rank)
        self._global = plan.batch_size
        self._length, self._shuffle, self._seed, self._epoch = length, shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Another order for another pass over the data."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length // self._global

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = list(range(self._length))
        if self._shuffle:
            order = torch.randperm(self._length, generator=generator).tolist()
        start, stop = self._rows
        for batch in range(len(self)):
            first = batch * self._global
            yield order[first + start : first + stop]
