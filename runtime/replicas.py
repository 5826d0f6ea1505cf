"""Replicas of weights, made equal again.

A program may compute a gradient on several ranks instead of sending it. Unlike GPUs round differently, so that the
replicas of its parameter drift apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hap.runtime.collectives import Comm
from hap.runtime.hap_module import HapModule

EVERY = 100
"""Steps of :class:`hap.training.Trainer` from one call of :func:`equalize` to the next, on unlike GPUs."""


def on_unlike_gpus(module: HapModule) -> bool:
    """Return whether the ranks compute on GPUs of several kinds; a collective call on CUDA."""
    if module._device.type != "cuda":
        return False
    return not module._comm.agree(torch.cuda.get_device_name(module._device))


def equalize(module: HapModule) -> None:
    """Replace each replica of a floating-point parameter or buffer by that of the first rank that holds it; a collective call.

    Call it between steps. The optimizer's states stay: they follow the gradients.
    """
    plan, rank = module._plan, module._comm.rank
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    alike: dict[tuple[Comm, torch.dtype], list[Tensor]] = {}
    for name, tensor in module._inputs.items():
        if name not in own:
            continue  # a tied tensor's other name, or a tensor of another stage
        levels = list(zip(plan.levels(tensor, rank), module._comms, strict=True))
        for level, comm in levels[1:] if plan.stages else levels:  # stages share no shards
            if level is None and comm.world_size > 1 and own[name].is_floating_point():
                alike.setdefault((comm, own[name].dtype), []).append(own[name])
    with torch.no_grad():
        for (comm, _), replicas in alike.items():
            for x in replicas:  # one by one: little memory beside them
                x.copy_(comm.all_reduce(x if comm.rank == 0 else torch.zeros_like(x), "one shot"))
