"""DistributedDataParallel that sums gradients in bfloat16, by torch's own hook."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from benchmarks.contenders.base import Setting
from benchmarks.contenders.even_ddp import EvenDDP
from benchmarks.contenders.proportional_ddp import ProportionalDDP


class EvenHalfDDP(EvenDDP):
    """Equal rows."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._step.register_comm_hook(setting.group, compressed)


class ProportionalHalfDDP(ProportionalDDP):
    """Rows in proportion to speed."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._step.register_comm_hook(setting.group, compressed)


def compressed(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Run the hook, which DDP refuses by its name without NCCL, although gloo sums bfloat16."""
    return bf16_compress_hook(group, bucket)
