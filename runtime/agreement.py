"""Do all ranks hold the same weights, the same batch, and GPUs that draw the same random numbers?"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hap.cluster.catalogue import find
from hap.cluster.device import Device
from hap.errors import InputError, PlanError
from hap.ir.batch import Batch, flatten
from hap.runtime.collectives import Comm

SAMPLE = 64
"""Elements of each tensor that are compared."""

BLOCK = 256
"""Threads in a block of torch's kernels of random numbers."""


def check_weights(model: nn.Module, comm: Comm) -> None:
    """Raise ``PlanError`` on all ranks unless all hold the same parameters and buffers."""
    if not comm.agree(_digest(dict(model.named_parameters()) | dict(model.named_buffers()))):
        raise PlanError(
            "the ranks hold models with different weights",
            hint="call torch.manual_seed with one seed on all ranks before the model is made, or "
            "load the same weights on all of them",
        )


def check_batch(batch: Batch, comm: Comm) -> None:
    """Raise ``InputError`` on all ranks unless all hold the same global batch."""
    if not comm.agree(_digest(flatten(batch))):
        raise InputError(
            "the ranks have made different global batches",
            hint="batch() or batches() must give the same batches in every process: seed each random "
            "generator that it uses",
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


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided and tensor.numel():
            found.update(_sample(tensor.detach()).cpu().numpy().tobytes())
    return found.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Return the bytes of evenly spaced elements."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].contiguous().view(torch.uint8)
