"""Do all ranks hold the same weights, the same batch, and GPUs that draw the same random numbers?"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from hap.cluster.catalogue import find
from hap.cluster.device import Device
from hap.errors import InputError, PlanError
from hap.ir.batch import Batch, flatten
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm

SAMPLE = 16
"""Elements of each tensor that are compared."""

CLOSE = 1e-4
"""Difference of two elements that count as equal: random numbers of unlike processors may differ by rounding."""

BLOCK = 256
"""Threads in a block of torch's kernels of random numbers."""


def check_weights(model: nn.Module, comm: Comm) -> None:
    """Raise ``PlanError`` on all ranks unless all hold the same parameters and buffers."""
    if not _agree(dict(model.named_parameters()) | dict(model.named_buffers()), comm):
        raise PlanError(
            "the ranks hold models with different weights",
            hint="call torch.manual_seed with one seed on all ranks before the model is made, or "
            "load the same weights on all of them",
        )


def check_batch(batch: Batch, comm: Comm) -> None:
    """Raise ``InputError`` on all ranks unless all hold the same global batch."""
    if not _agree(flatten(batch), comm):
        raise InputError(
            "the ranks have made different global batches",
            hint="batch() or batches() must give the same batches in every process: seed each random "
            "generator that it uses",
        )


def check_whole_entries(plan: Plan, batch: Mapping[str, Tensor], comm: Comm) -> None:
    """Raise ``InputError`` on all ranks unless all hold the same entries, of those that no rank has a part of."""
    inputs = [i for i in plan.graph.role("input") if not any(plan.levels(i.tensor, comm.rank))]
    if (
        inputs
        and comm.world_size > 1
        and not _agree({i.target: batch[i.target] for i in inputs}, comm)
    ):
        raise InputError(
            "the ranks have made different global batches",
            hint="every rank must read the same global batch, and cut it by plan.local_batch: seed the sampler "
            "alike on all ranks. To read a rank's samples alone, use hap.RankBatchSampler",
        )


def warn_of_other_gpu(planned: Device, device: torch.device) -> None:
    """Warn if this rank's GPU is another one than the plan's device, as the catalogue names them."""
    name = torch.cuda.get_device_name(device)
    known, wanted = find(name), find(planned.kind)
    if known and wanted and known.device.kind != wanted.device.kind:
        warnings.warn(
            f"{planned.name} is a {planned.kind} in the plan, but {device} of this process is a {name}: if the "
            "order of the GPUs differs, set CUDA_DEVICE_ORDER or CUDA_VISIBLE_DEVICES",
            stacklevel=2,
        )


def elements_at_once(comm: Comm, device: torch.device) -> int | None:
    """Return the largest random tensor that the GPUs of all ranks draw alike; ``None``: they draw all alike.

    In torch's CUDA kernels (``ATen/native/cuda/DistributionTemplates.h``) the threads of a grid draw the elements
    in turn, and the number of multiprocessors limits the grid. A tensor with an element per thread at most has the
    same numbers on all GPUs.
    """
    gpu = torch.cuda.get_device_properties(device)
    threads = gpu.multi_processor_count * (gpu.max_threads_per_multi_processor // BLOCK) * BLOCK
    found = {int(text) for text in comm.texts(str(threads))}
    return min(found) if len(found) > 1 else None


def _agree(tensors: Mapping[str, Tensor], comm: Comm) -> bool:
    """Return whether all ranks hold the same tensors, but for the rounding of unlike processors."""
    strided = {n: t for n, t in tensors.items() if t.layout == torch.strided}
    names = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in strided.items()]
    samples = [_sample(tensor.detach()) for tensor in strided.values() if tensor.numel()]
    joined = torch.cat(samples).numpy().tobytes() if samples else b""
    said = comm.texts(json.dumps([names, base64.b64encode(joined).decode()]))
    found = [json.loads(text) for text in said]
    first, *others = [np.frombuffer(base64.b64decode(data)) for _, data in found]
    return all(other == found[0][0] for other, _ in found[1:]) and all(
        np.allclose(first, other, rtol=CLOSE, atol=CLOSE, equal_nan=True) for other in others
    )


def _sample(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements in float64, on the CPU."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].cpu().double()
