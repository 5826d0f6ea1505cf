"""What a person tries first on unlike devices: the fastest one alone, or DDP on the fastest kind."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import (
    Contender,
    Setting,
    as_step,
    built,
    even,
    optimizer,
    rows_of,
    size_of,
    train,
)  # fmt: skip

ALIKE = 0.9
"""Measured speed over the fastest device's, above which a device counts as of its kind."""


class OneDevice(Contender):
    """Plain eager training on the fastest device; the other ranks take no part."""

    def __init__(self, setting: Setting) -> None:
        self._mine = dist.get_rank() == setting.speeds.index(max(setting.speeds))
        if self._mine:
            file = setting.file
            self._step = as_step(file, built(file), file.batch())
            self._optimizer = optimizer(file, list(self._step.parameters()))

    def step(self, batch: Any) -> float | None:
        return train(self._step, self._optimizer, batch).item() if self._mine else None


class FastestDDP(Contender):
    """``DistributedDataParallel``, equal rows, on the devices of the fastest kind.

    Raises:
        ValueError: these are all devices, or one.
    """

    def __init__(self, setting: Setting) -> None:
        fastest = max(setting.speeds)
        self._ranks = [r for r, speed in enumerate(setting.speeds) if speed >= ALIKE * fastest]
        if len(self._ranks) in (1, len(setting.speeds)):
            raise ValueError(
                f"{len(self._ranks)} of {len(setting.speeds)} devices are of that kind"
            )
        self._group = dist.new_group(self._ranks)
        self._mine = dist.get_rank() in self._ranks
        if self._mine:
            file = setting.file
            step = as_step(file, built(file), file.batch())
            self._step = DistributedDataParallel(step, process_group=self._group)
            self._optimizer = optimizer(file, list(self._step.parameters()))

    def step(self, batch: Any) -> float | None:
        if not self._mine:
            return None
        counts = even(size_of(batch), len(self._ranks))
        mine = rows_of(batch, counts, self._ranks.index(dist.get_rank()))
        loss: Tensor = train(self._step, self._optimizer, mine).clone()
        dist.all_reduce(loss, group=self._group)
        return loss.item() / len(self._ranks)
