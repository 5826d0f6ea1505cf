"""Plain DistributedDataParallel with equal shares."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import EqualRows, Setting, as_step, built, optimizer


class EvenDDP(EqualRows):
    """``DistributedDataParallel`` with default options."""

    def __init__(self, setting: Setting) -> None:
        file = setting.file
        self._step = DistributedDataParallel(as_step(file, built(file), file.batch()))
        self._optimizer = optimizer(file, list(self._step.parameters()))
