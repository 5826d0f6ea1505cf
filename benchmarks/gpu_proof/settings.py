"""Settings of the proof: the device, the ranks, the prepared plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hap.runtime.collectives import ProcessGroupComm
from hap.runtime.launch import rank_device, spawn
from hap.runtime.shared_gpu import SharedGpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run.

    Attributes:
        ranks: number of ranks of the parts that use several.
        device: ``cuda`` or ``cpu``; on a CPU, gloo replaces NCCL and models are tiny.
        folder: the prepared plans.
        timeout_s: seconds for one group of ranks.
        models: names of the models for one rank; none: all.
    """

    ranks: int
    device: torch.device
    folder: Path
    timeout_s: float = 240.0
    models: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"

    def on_ranks(
        self, target: Callable[..., Any], world_size: int, *args: Any,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run ``target(comm, device, *args)`` on every rank; results in rank order.

        ``on_report``: called with (rank, object) for each :func:`hap.runtime.launch.report`.
        """
        return spawn(
            _as_rank, world_size, args=(target, args), backend=self.backend, on_report=on_report,
            timeout_s=self.timeout_s, where=SharedGpus() if self.on_gpu else None,
        )  # fmt: skip


def _as_rank(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return target(ProcessGroupComm(), rank_device(), *args)
