"""A plan file as a contender: ours, the original HAP, or a baseline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from benchmarks.contenders.base import Contender, Setting, built, optimizer
from hap import api
from hap.ir.batch import call
from hap.ir.plan import Plan
from hap.runtime.collectives import ProcessGroupComm


class Planned(Contender):
    """Trains on the ranks whose devices the plan keeps; the other ranks take no part."""

    def __init__(self, setting: Setting) -> None:
        assert setting.plan is not None
        file = setting.file
        self._plan = Plan.load(setting.plan)
        ranks = [setting.devices.index(device.name) for device in self._plan.cluster.devices]
        group = dist.new_group(ranks)
        self._rank = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
        if self._rank is None:
            return
        self._module = api.compile(
            built(file), self._plan, loss=file.loss, seed=file.seed,
            comm=ProcessGroupComm(group), check=False,
        )  # fmt: skip
        self._optimizer = optimizer(file, list(self._module.parameters()))

    def in_one_thread(self) -> AbstractContextManager[None]:
        return nullcontext() if self._rank is None else self._module.in_turn()

    def step(self, batch: Any) -> float | None:
        if self._rank is None:
            return None
        self._optimizer.zero_grad()
        loss = call(self._module, self._plan.local_batch(batch, self._rank))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


class InTurn(Planned):
    """The plan without overlap: computing waits for each collective where it is issued."""

    def step(self, batch: Any) -> float | None:
        with self.in_one_thread():
            return super().step(batch)
