"""Whole tensors <-> the shards that a plan stores."""

from __future__ import annotations

from torch import Tensor

from hap.plan import Plan
from hap.program import Value
from hap.runtime.collectives import Comm


def stored_value(plan: Plan, tensor: str) -> Value:
    """An input of the program in the placement in which it is stored."""
    return Value(tensor, plan.program.inputs[tensor])


def cut(plan: Plan, value: Value, whole: Tensor, rank: int) -> Tensor:
    """This rank's part of a whole tensor, as a tensor of its own."""
    if not value.placement.sharded:
        return whole.detach().clone()
    dim, start, stop = plan.bounds(value, rank)
    return whole.detach().narrow(dim, start, stop - start).clone()


def gather(plan: Plan, value: Value, shard: Tensor, comm: Comm) -> Tensor:
    """The whole tensor from all the ranks' parts; every rank must call it."""
    if not value.placement.sharded:
        return shard.detach().clone()
    sizes = plan.program.sizes(plan.graph, value, plan.shares)
    return comm.all_gather(shard.detach(), value.placement.dim, sizes, "padded")
