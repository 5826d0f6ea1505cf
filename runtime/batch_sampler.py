"""A sampler of a rank's rows of each global batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from hap.ir.plan import Plan


class RankBatchSampler(Sampler[list[int]]):
    """For ``DataLoader(dataset, batch_sampler=RankBatchSampler(plan, len(dataset), rank))``.

    All ranks draw the same order. This rank gets its own rows of every global batch, by its share
    of the batch. An incomplete last global batch is dropped.

    Args:
        length: number of samples in the dataset.
        seed: seed of the order, together with the epoch; the same on every rank.
    """

    def __init__(
        self, plan: Plan, length: int, rank: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._rows = plan.batch_rows(rank)
        self._global = plan.batch_size
        self._length, self._shuffle, self._seed, self._epoch = length, shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of samples."""
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
