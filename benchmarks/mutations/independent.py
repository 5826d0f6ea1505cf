"""An independent comparison of a plan with one device: plain PyTorch, and shards by the plan file.

It shares no code with :mod:`hap.runtime.verify` and reads the positions of a rank's shards from the
plan file's own data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hap.ir.batch import call, each
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from tests.random_plans import Case

TOLERANCE = 1e-7
"""Tolerance relative to a tensor's largest entry, or to a thousandth of its kind's largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One step of a model on one device, with weights and data unlike verification's."""

    model: torch.nn.Module
    batch: Any
    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def expect(case: Case, seed: int) -> Expected:
    """Return loss, gradients and buffers of one step in float64, in plain PyTorch."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(case.model).double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter * 0.7 + 0.05 * noise)

    def drawn(name: str, entry: Tensor) -> Tensor:
        picked = torch.randint(entry.numel(), entry.shape, generator=generator)
        other = entry.flatten()[picked]
        if not entry.is_floating_point():
            return other
        return other.double() + 0.1 * torch.randn(entry.shape, generator=generator).double()

    batch = each(case.batch, drawn)
    twin = copy.deepcopy(model)
    loss = case.loss_of(twin, batch)
    loss.backward()
    gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    return Expected(model=model, batch=batch, loss=loss.detach(), gradients=gradients,
                    buffers=dict(twin.named_buffers()))  # fmt: skip


def first_unequal(plan: Plan, data: Mapping[str, Any], expected: Expected) -> str:
    """Return the first of loss, gradients and buffers that differs on some rank, or nothing."""

    def step(comm: Comm) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        module = HapModule(plan, expected.model, comm, torch.device("cpu"), widen=True)
        loss = call(module, plan.local_batch(expected.batch, comm.rank))
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        return loss.detach(), gradients, dict(module.named_buffers())

    tensors = {target: tensor for tensor, _, target in data["graph"]["inputs"]}
    largest = max((float(g.abs().max()) for g in expected.gradients.values()), default=0.0)
    for rank, (loss, gradients, buffers) in enumerate(run_ranks(plan.world_size, step)):
        if _differs(loss, expected.loss, 0.0):
            return f"loss of rank {rank}"
        for name, whole in expected.gradients.items():
            if not _stored(data, tensors[name], rank):
                if name in gradients and gradients[name].numel():
                    return f"gradient of {name} on rank {rank}, which does not store it"
                continue
            part = _part(data, tensors[name], whole, rank)
            if name not in gradients or _differs(gradients[name], part, 1e-3 * largest):
                return f"gradient of {name} on rank {rank}"
        for name, whole in expected.buffers.items():
            part = _part(data, tensors[name], whole, rank) if name in tensors else whole
            if _differs(buffers[name], part, 0.0):
                return f"buffer {name} on rank {rank}"
    return ""


def _differs(found: Tensor, expected: Tensor, floor: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return True
    if not expected.is_floating_point():
        return not torch.equal(found, expected)
    if not expected.numel():
        return False
    scale = max(float(expected.abs().max()), floor, 1e-300)
    return not float((found - expected).abs().max()) <= TOLERANCE * scale  # true for NaN, too


def _stored(data: Mapping[str, Any], tensor: str, rank: int) -> bool:
    """Return whether a rank stores a parameter, which the first stage that reads it does."""
    if "stages" not in data:
        return True
    stages = data["stages"]["stages"]
    owner = next(stage for stage in stages if tensor in stage["program"]["inputs"])
    return rank in owner["ranks"]


def _part(data: Mapping[str, Any], tensor: str, whole: Tensor, rank: int) -> Tensor:
    """Return a rank's shard of an input, by the plan file."""
    if "stages" in data:
        stage = next(s for s in data["stages"]["stages"] if rank in s["ranks"])
        program, place = stage["program"], stage["ranks"].index(rank)
        placement = program["inputs"].get(tensor, "R")
        return _cut(whole, program, tensor, placement, stage["shares"], place)
    program, inside = data["program"], data.get("inside")
    placement = program["inputs"][tensor]
    if inside is None:
        return _cut(whole, program, tensor, placement, data["shares"], rank)
    machines = list(dict.fromkeys(d["node"] for d in data["cluster"]["devices"]))
    width = len(data["cluster"]["devices"]) // len(machines)
    machine, column = divmod(rank, width)
    part = _cut(whole, program, tensor, placement, data["shares"], machine)
    inner = tensor if placement == "R" else f"{tensor}~{placement}"
    own = {
        axis: units[machine * width : (machine + 1) * width]
        for axis, units in inside["shares"].items()
    }
    placed = inside["program"]["inputs"][inner]
    return _cut(part, inside["program"], inner, placed, own, column)


def _cut(
    whole: Tensor, program: Mapping[str, Any], tensor: str, placement: str,
    shares: Mapping[str, Any], place: int,
) -> Tensor:  # fmt: skip
    if not placement.startswith("S"):
        return whole
    dim = int(placement[1:])
    units = shares[program["axes"][f"{tensor}:{dim}"][0]]
    granule = whole.shape[dim] // sum(units)
    return whole.narrow(dim, granule * sum(units[:place]), granule * units[place])
