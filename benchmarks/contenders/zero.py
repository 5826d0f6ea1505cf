"""ZeRO, stage 1, from torch: DDP with optimizer states spread over the ranks."""

from __future__ import annotations

import inspect

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.base import EqualRows, Setting, as_step, built, optimizer


class Zero(EqualRows):
    """Equal rows; each rank updates its part of the parameters and broadcasts it."""

    def __init__(self, setting: Setting) -> None:
        file, self._setting = setting.file, setting
        step = as_step(file, built(file), file.batch())
        self._step = DistributedDataParallel(step, process_group=setting.group)
        parameters = [p for p in self._step.parameters() if p.requires_grad]
        like = optimizer(file, parameters)
        accepted = inspect.signature(type(like)).parameters
        options = {k: v for k, v in like.defaults.items() if k in accepted}
        self._optimizer = ZeroRedundancyOptimizer(
            parameters, type(like), process_group=setting.group, **options
        )
