"""A sampler of a rank's rows of each global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

from hap.errors import InputError
from hap.ir.plan import Plan


class RankBatchSampler(Sampler[list[int]]):
    """For ``DataLoader(dataset, batch_sampler=RankBatchSampler(plan, len(dataset), rank))``.

    All ranks draw the same order. This rank gets its own rows of every global batch, by its share
    of the batch. A rank without rows gets one, because loaders cannot stack none; its module
    ignores it. An incomplete last global batch is dropped: a dataset smaller than one has no batches.

    Args:
        plan: its batch, and each rank's rows of it.
        length: number of samples in the dataset.
        rank: this process's, from 0.
        shuffle: another order in each epoch; without it, that of the dataset.
        seed: seed of the order, together with the epoch; the same on every rank.
    """

    def __init__(
        self, plan: Plan, length: int, rank: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._rows = plan.batch_rows(rank)
        self._global = plan.batch_size
        self._length, self._shuffle, self._seed, self._epoch = length, shuffle, seed, 0
        self._offset = 0
        # A position: batches since the first epoch began, epoch, samples of it.
        self._loaded = 0, 0, 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of samples."""
        if epoch != self._epoch:
            self._epoch, self._offset = epoch, 0

    def state_dict(self, batches: int) -> dict[str, Any]:
        """Return the position after so many global batches since the first epoch began.

        It is the same for all ranks. A plan with another batch size goes on from the samples that were read. The number is an argument because a loader with
        workers reads batches before they are trained on.
        """
        before, epoch, offset = self._loaded
        batches_left, in_epoch = batches - before, (self._length - offset) // self._global
        if batches_left >= in_epoch:
            epochs, batches_left = divmod(batches_left - in_epoch, max(len(self), 1))
            epoch, offset = epoch + 1 + epochs, 0
        return {
            "seed": self._seed, "shuffle": self._shuffle, "length": self._length,
            "batches": batches, "epoch": epoch, "offset": offset + batches_left * self._global,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position; the next iteration has the rest of its epoch.

        Raises:
            InputError: the dataset has another number of samples.
        """
        if state["length"] != self._length:
            raise InputError(
                f"the saved position is in a dataset of {state['length']} samples, this dataset has "
                f"{self._length}",
                hint="continue with the dataset of the saved run, or start a new epoch",
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._epoch, self._offset = state["epoch"], state["offset"]
        at = self._epoch * len(self) + self._offset // self._global
        self._loaded = state.get("batches", at), self._epoch, self._offset

    def __len__(self) -> int:
        return self._length // self._global

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = list(range(self._length))
        if self._shuffle:
            order = torch.randperm(self._length, generator=generator).tolist()
        start, stop = self._rows
        begin, self._offset = self._offset, 0
        for first in range(begin, self._length - self._global + 1, self._global):
            rows = order[first : first + self._global]
            yield rows[start:stop] or rows[:1]
