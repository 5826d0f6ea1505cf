"""FSDP2: parameters, gradients and optimizer states in equal shards, gathered block by block."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.contenders.base import EqualRows, Setting, as_step, built, mesh_of, optimizer


class FSDP(EqualRows):
    """``fully_shard`` on each block, then on the rest; equal rows."""

    def __init__(self, setting: Setting) -> None:
        file, self._setting = setting.file, setting
        mesh = mesh_of(setting)
        self._step = as_step(file, built(file), file.batch())
        for module in [*blocks(self._step), self._step]:
            sharded = fully_shard(module, mesh=mesh)
            if dist.get_backend() == "gloo":  # gloo has no average: divide before the sum
                sharded.set_force_sum_reduction_for_comms(True)
        self._optimizer = optimizer(file, list(self._step.parameters()))


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules to gather as one: the entries of lists of layers, or, in their absence,
    the layers of sequences that have parameters."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = [
            layer for stack in module.modules() if isinstance(stack, kind) for layer in stack
            if next(layer.parameters(), None) is not None
        ]  # fmt: skip
        if found:
            return found
    return []
