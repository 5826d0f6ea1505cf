"""Cut whole tensors into stored shards, and join them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hap.complex_tensors import as_real
from hap.ir.mesh import origin
from hap.ir.placement import L, P
from hap.ir.plan import Plan
from hap.ir.program import Value
from hap.runtime.collectives import Comm


def cut(plan: Plan, tensor: str, whole: Tensor, rank: int) -> Tensor:
    """Return a copy of this rank's shard of a whole input; of a complex one as a pair of real ones."""
    part = as_real(whole.detach())
    for level in plan.levels(tensor, rank):
        if level:
            part = part.narrow(level.dim, level.start, level.sizes[level.place])
    return part.clone()


def gather(plan: Plan, tensor: str, shard: Tensor, comms: Sequence[Comm], rank: int) -> Tensor:
    """Return the whole input from all ranks' shards; every rank must call it.

    Args:
        comms: a communicator per mesh axis, in the order of :meth:`hap.ir.plan.Plan.levels`.
    """
    part = shard.detach()
    if plan.stages:
        return _gather_from_stage(plan, tensor, part, comms, rank)
    for level, comm in reversed(list(zip(plan.levels(tensor, rank), comms, strict=True))):
        if level:
            part = comm.all_gather(part, level.dim, level.sizes, "padded")
    return part.clone()


def _gather_from_stage(
    plan: Plan, tensor: str, shard: Tensor, comms: Sequence[Comm], rank: int
) -> Tensor:
    """Join the shards of the stage that holds a tensor; its first rank sends the whole to all."""
    owners, (every, beside) = _owners(plan, tensor), comms
    _, inner = plan.levels(tensor, rank)
    if any(plan.levels(tensor, r)[1] for r in owners) and inner:
        shard = beside.all_gather(shard, inner.dim, inner.sizes, "padded")
    if len(owners) == plan.world_size:
        return shard.clone()
    shape = plan.graph.tensors[tensor].shape
    rows, *others = shape or (1,)
    sizes = [rows if r == owners[0] else 0 for r in range(plan.world_size)]
    part = shard.reshape(rows, *others) if rank == owners[0] else shard.new_empty((0, *others))
    # "padded" would take as much memory as all ranks' parts of equal size.
    return every.all_gather(part, 0, sizes, "grouped").reshape(shape).clone()


def _owners(plan: Plan, tensor: str) -> list[int]:
    """Return the ranks of the stage that holds an input; all ranks, if every stage does."""
    every = range(plan.world_size)
    outer = [plan.levels(tensor, r)[0] for r in every]
    return [r for r in every if (cut := outer[r]) is None or cut.sizes[cut.place]]


def join(plan: Plan, tensor: str, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole inputs that all ranks' shards represent: one per replica."""
    if plan.stages:
        owners = _owners(plan, tensor)
        inner = plan.levels(tensor, owners[0])[1]
        return _join([parts[r] for r in owners], inner.dim if inner else None)
    dims = [level.dim if level else None for level in plan.levels(tensor, 0)]
    if plan.mesh is None:
        return _join(parts, dims[0])
    between, inside = dims
    machines = [_join([parts[r] for r in ranks], inside) for ranks in plan.mesh.machines]
    return [whole for column in zip(*machines, strict=True) for whole in _join(column, between)]


def _join(parts: Sequence[Tensor], dim: int | None) -> list[Tensor]:
    return list(parts) if dim is None else [torch.cat(list(parts), dim)]


def recombined(plan: Plan, value: Value, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole tensors that all ranks' parts of a value represent: one, or one per replica.

    ``value`` is of the program that the ranks run; on two mesh axes, of that inside the machines.
    """
    if plan.mesh is None:
        return recombined_values(value, parts)
    machines = [
        recombined_values(value, [parts[r] for r in beside]) for beside in plan.mesh.machines
    ]
    columns = zip(*machines, strict=True)
    return [
        whole for column in columns for whole in recombined_values(origin(value.tensor), column)
    ]


def recombined_values(value: Value, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole tensors that the parts of one group of ranks represent."""
    if value.placement.sharded:
        return [torch.cat(list(parts), value.placement.dim)]
    if value.placement == L:
        return [torch.stack(list(parts)).logsumexp(0)]
    return [torch.stack(list(parts)).sum(0)] if value.placement == P else list(parts)
