"""Plain DistributedDataParallel with equal shares: what people would run without a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hap.batch import call, flatten
from hap.capture import Step
from hap.model_file import ModelFile
from hap.optimizer import default_optimizer


class EvenDDP:
    """One rank of DDP on rows ``rank/n .. (rank+1)/n`` of each global batch."""

    def __init__(self, file: ModelFile) -> None:
        torch.manual_seed(file.seed)
        self._step = DistributedDataParallel(
            Step(file.model(), self._local(file.batch()), file.loss)
        )
        self._optimizer = (file.optimizer or default_optimizer)(self._step.parameters())

    def step(self, batch: Any) -> float:
        """Train on this rank's equal part of a global batch; the loss is the mean over ranks."""
        self._optimizer.zero_grad()
        loss = call(self._step, tuple(flatten(self._local(batch)).values()))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    @staticmethod
    def _local(batch: Any) -> Any:
        rank, n = dist.get_rank(), dist.get_world_size()

        def cut(t: torch.Tensor) -> torch.Tensor:
            return t.tensor_split(n)[rank]

        if isinstance(batch, dict):
            return {k: cut(v) for k, v in batch.items()}
        return tuple(map(cut, batch)) if isinstance(batch, tuple | list) else cut(batch)
