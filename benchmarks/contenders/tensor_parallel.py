"""Megatron-LM's tensor parallelism through DTensor: columns, then rows; all ranks see all rows.

Each family has a plan: a module's name pattern -> how its weights are cut. Where the last layer
is wide, its classes are cut as well, and the loss is computed on the parts (``loss_parallel``).
Layers that no pattern names are computed by every rank, as convolutions are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, RowwiseParallel, loss_parallel, parallelize_module,
)  # fmt: skip

from benchmarks.contenders.base import Contender, Setting, as_step, built, optimizer, train


class TensorParallel(Contender):
    """Equal parts of the weights on every rank.

    Raises:
        ValueError: there is no plan for the model's class, or the ranks do not divide its heads.
    """

    def __init__(self, setting: Setting) -> None:
        file = setting.file
        model = built(file)
        kind = type(model).__name__
        if kind not in PLANS:
            raise ValueError(f"no tensor-parallel plan for {kind}")
        prepare, plan, wide = PLANS[kind]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        tied = _tied(model)
        prepare(model, mesh.size())
        parallelize_module(model, mesh, plan)
        _tie(model, tied)
        self._wide = wide
        self._step = as_step(file, model, file.batch())
        self._optimizer = optimizer(file, list(self._step.parameters()))

    def step(self, batch: Any) -> float:
        with loss_parallel() if self._wide else contextlib.nullcontext():
            loss = train(self._step, self._optimizer, batch)
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


class _Conv1D(ParallelStyle):
    """GPT-2's linear layer, whose weight is (in, out).

    ``columns``: the out dim is cut, in ``parts`` equal blocks each by itself (q, k and v); the
    result is local. Otherwise the in dim is cut, and the result is summed over the ranks.
    """

    def __init__(self, *, columns: bool, parts: int = 1) -> None:
        self.columns, self.parts = columns, parts

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        ranks, rank = mesh.size(), mesh.get_local_rank()
        with torch.no_grad():
            if self.columns:
                weight, bias = (
                    torch.cat([b.chunk(ranks, -1)[rank] for b in t.chunk(self.parts, -1)], -1)
                    for t in (module.weight, module.bias)
                )
                module.nf = weight.shape[1]
            else:
                weight = module.weight.chunk(ranks, 0)[rank]
                bias = module.bias / ranks  # added on each rank, then summed
            ...
        return module
