"""DistributedDataParallel with rows in proportion to measured speed.

DDP averages gradients over ranks as if all had the same number of rows. Each rank's mean loss is
therefore scaled by its part of all terms before the backward, so that the average is the gradient
of the mean over the global batch.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import (
    Contender,
    Setting,
    as_step,
    built,
    mean_over_ranks,
    optimizer,
    proportional,
    rows_of,
    size_of,
    terms,
    train,
)  # fmt: skip


class ProportionalDDP(Contender):
    """Rows in proportion to speed; the loss is weighted by each rank's number of terms."""

    def __init__(self, setting: Setting) -> None:
        file, self._setting = setting.file, setting
        step = as_step(file, built(file), file.batch())
        self._step = DistributedDataParallel(step, process_group=setting.group)
        self._optimizer = optimizer(file, list(self._step.parameters()))

    def step(self, batch: Any) -> float:
        counts = proportional(size_of(batch), self._setting.speeds)
        mine = rows_of(batch, counts, self._setting.rank)
        weight = terms(mine) * self._setting.world / terms(batch)
        loss = train(self._step, self._optimizer, mine, weight)
        return mean_over_ranks(loss, self._setting)
