"""Where the proof runs: the device, the ranks, and how ranks share one GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.launch import Where, spawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The choices of one run.

    Attributes:
        ranks: ranks of the parts that use several.
        device: ``cuda`` or ``cpu``; on a CPU, gloo takes NCCL's place and models are tiny.
        folder: the prepared plans.
        timeout_s: seconds for one group of ranks.
    """

    ranks: int
    device: torch.device
    folder: Path
    timeout_s: float = 240.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        return "nccl" if self.on_gpu else "gloo"

    def on_ranks(self, target: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run ``target(comm, device, *args)`` on every rank; results in rank order."""
        return spawn(
            _as_rank, world_size, args=(target, args), backend=self.backend,
            timeout_s=self.timeout_s, where=SharedGpu() if self.on_gpu else None,
        )  # fmt: skip


class SharedGpu(Where):
    """Ranks that share GPUs where there are fewer GPUs than ranks.

    NCCL refuses two ranks on one GPU of one host. Each rank has a host identifier of its own
    here, and they communicate over the loopback interface: this shows what is computed, not how
    fast. Up to NCCL 2.29 the identifier suffices; 2.30 asks for a variable of its own.
    """

    def variables(self, rank: int) -> Mapping[str, str]:
        count = torch.cuda.device_count()
        return {
            "LOCAL_RANK": str(rank % count),
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        }


def _as_rank(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return target(ProcessGroupComm(), rank_device(), *args)


def rank_device() -> torch.device:
    """This rank's device: the current CUDA device under NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def alone() -> Comm:
    """The communicator of a world of one rank without a process group."""
    return LocalComm()
