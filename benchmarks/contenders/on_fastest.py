"""What a person tries first on unlike devices: the fastest one alone, or those of the fastest kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.contenders.base import Contender, Setting, as_step, built, optimizer, train

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


class OnFastest(Contender):
    """A method on the devices of the fastest kind; the other ranks take no part.

    Raises:
        ValueError: these are all devices, or one.
    """

    def __init__(self, setting: Setting, method: Callable[[Setting], Contender]) -> None:
        fastest = max(setting.speeds)
        ranks = [r for r, speed in enumerate(setting.speeds) if speed >= ALIKE * fastest]
        if len(ranks) in (1, len(setting.speeds)):
            raise ValueError(f"{len(ranks)} of {len(setting.speeds)} devices are of that kind")
        group = dist.new_group(ranks)
        self._method = None
        if dist.get_rank() in ranks:
            speeds = tuple(setting.speeds[rank] for rank in ranks)
            self._method = method(replace(setting, speeds=speeds, group=group))

    def step(self, batch: Any) -> float | None:
        return self._method.step(batch) if self._method else None
