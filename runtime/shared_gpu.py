"""Share one GPU among several NCCL ranks, to check results where there are fewer GPUs than ranks.

NCCL refuses two ranks on one GPU of one host. Here each rank sets a host name of its own, and
ranks communicate over the loopback interface: this shows correctness, not speed. The host name suffices up to NCCL 2.29 (torch 2.13); NCCL 2.30
also reads ``NCCL_MULTI_RANK_GPU_ENABLE``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hap.runtime.launch import Where


class SharedGpus(Where):
    """Assigns this machine's GPUs to ranks round-robin."""

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return environment variables of a rank, for :func:`hap.runtime.launch.spawn`."""
        count = torch.cuda.device_count()
        return {
            "LOCAL_RANK": str(rank % count),
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        }
