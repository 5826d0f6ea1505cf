"""Plain DistributedDataParallel with equal shares: what people would run without a plan."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import (
    Contender,
    Setting,
    as_step,
    built,
    even,
    mean_over_ranks,
    optimizer,
    rows_of,
    size_of,
    train,
)  # fmt: skip


class EvenDDP(Contender):
    """Each rank takes equally many rows; the loss is the mean of the ranks' means."""

    def __init__(self, setting: Setting) -> None:
        file = setting.file
        self._step = DistributedDataParallel(as_step(file, built(file), file.batch()))
        self._optimizer = optimizer(file, list(self._step.parameters()))

    def step(self, batch: Any) -> float:
        counts = even(size_of(batch), dist.get_world_size())
        mine = rows_of(batch, counts, dist.get_rank())
        return mean_over_ranks(train(self._step, self._optimizer, mine))
