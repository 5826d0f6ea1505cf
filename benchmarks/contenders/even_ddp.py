"""Plain DistributedDataParallel with equal shares."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import EqualRows, Setting, as_step, built, optimizer


class EvenDDP(EqualRows):
    """``DistributedDataParallel`` with default options."""

    def __init__(self, setting: Setting) -> None:
        file, self._setting = setting.file, setting
        step = as_step(file, built(file), file.batch())
        self._step = DistributedDataParallel(step, process_group=setting.group)
        self._optimizer = optimizer(file, list(self._step.parameters()))
