"""What a person tries first on unlike devices: the fastest one alone, or those of the fastest kind."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.contenders.base import Contender, Setting, as_step, built, optimizer, train

ALIKE = 0.9
"""Measured speed over the fastest one's of a kind, above which a device counts as of that kind."""


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

    Args:
        without_slowest: on those of all kinds but the slowest one.

    Raises:
        ValueError: these are all devices, or one, or with ``without_slowest`` those of one kind.
    """

    def __init__(
        self,
        setting: Setting,
        method: Callable[[Setting], Contender],
        *,
        without_slowest: bool = False,
    ) -> None:
        kinds = by_kind(setting.speeds)
        if without_slowest and len(kinds) < 3:
            raise ValueError(f"there are {len(kinds)} kinds of devices")
        ranks = sorted(
            functools.reduce(operator.iadd, kinds[:-1] if without_slowest else kinds[:1], [])
        )
        if len(ranks) in (1, len(setting.speeds)):
            raise ValueError(f"{len(ranks)} of {len(setting.speeds)} devices are of that kind")
        group = dist.new_group(ranks)
        self._method = None
        if dist.get_rank() in ranks:
            speeds = tuple(setting.speeds[rank] for rank in ranks)
            self._method = method(replace(setting, speeds=speeds, group=group))

    def step(self, batch: Any) -> float | None:
        return self._method.step(batch) if self._method else None


def by_kind(speeds: Sequence[float]) -> list[list[int]]:
    """Return the ranks of each kind of device, the fastest kind first."""
    kinds: list[list[int]] = []
    for rank in sorted(range(len(speeds)), key=lambda r: -speeds[r]):
        if kinds and speeds[rank] >= ALIKE * speeds[kinds[-1][0]]:
            kinds[-1].append(rank)
        else:
            kinds.append([rank])
    return kinds
