"""Plain DistributedDataParallel with equal shares."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import (
    EqualRows,
    Setting,
    as_step,
    built,
    even,
    mean_over_ranks,
    optimizer,
    rows_of,
    size_of,
)  # fmt: skip
from hap.ir.batch import call, flatten

MICROBATCHES = 4
"""Of :class:`AccumulatingDDP`."""


class EvenDDP(EqualRows):
    """``DistributedDataParallel`` with default options."""

    def __init__(self, setting: Setting) -> None:
        file, self._setting = setting.file, setting
        step = as_step(file, built(file), file.batch())
        self._step = DistributedDataParallel(step, process_group=setting.group)
        self._optimizer = optimizer(file, list(self._step.parameters()))


class AccumulatingDDP(EvenDDP):
    """In microbatches: gradients are accumulated without communication until the last one."""

    def step(self, batch: Any) -> float:
        world, rank = self._setting.world, self._setting.rank
        mine = rows_of(batch, even(size_of(batch), world), rank)
        counts = even(size_of(mine), MICROBATCHES)
        assert isinstance(self._step, DistributedDataParallel)
        total = torch.zeros(())
        self._optimizer.zero_grad()
        for number in range(MICROBATCHES):
            last = number == MICROBATCHES - 1
            with nullcontext() if last else self._step.no_sync():
                rows = rows_of(mine, counts, number)
                loss = call(self._step, tuple(flatten(rows).values())) / MICROBATCHES
                loss.backward()
            total += loss.detach()
        self._optimizer.step()
        return mean_over_ranks(total, self._setting)
