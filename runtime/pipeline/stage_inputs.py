"""The inputs of one rank's stage: those of the step, and each microbatch's rows of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hap.ir.graph import Graph
from hap.ir.plan import Plan
from hap.ir.program import Value
from hap.runtime.pipeline.sums import Env

if TYPE_CHECKING:
    from hap.runtime.pipeline.runner import PipelineStage


def inputs_of(s: PipelineStage, given: Mapping[str, Tensor]) -> tuple[Env, list[Env]]:
    """Return the inputs of the whole step, and those of each microbatch.

    Args:
        given: this rank's shards of the plan's inputs, by their tensors in the plan's graph.
    """
    env: Env = {}
    parts: list[Env] = [{} for _ in s._microbatches]
    program = s._stage.program
    for i in s._graph.inputs:
        value = Value(i.tensor, program.inputs[i.tensor])
        if i.role == "tangent":
            shape = s._graph.tensors[i.tensor].shape
            dtype = torch.float64 if s._widen else dtype_of(s._graph, i.tensor)
            env[value] = torch.full(shape, s.loss_scale, dtype=dtype, device=s._device)
        elif i.role == "input":
            _cut(s, given, i.tensor, value, parts)
        elif i.role != "received":
            env[value] = given[_whole_name(s._plan, i.target, i.role)]
    return env, parts


def _cut(
    s: PipelineStage, given: Mapping[str, Tensor], tensor: str, value: Value, parts: list[Env]
) -> None:
    plan, place = s._plan, s.place
    target = next(i.target for i in s._graph.inputs if i.tensor == tensor)
    entry = _whole_name(plan, target, "input")
    over_time = Value(entry, plan.program.inputs[entry])
    for number, part in enumerate(parts):
        rows = given[entry]
        if over_time.placement.sharded:
            sizes = plan.program.sizes(plan.graph, over_time, plan.shares)
            start = sum(sizes[:number])
            rows = rows.narrow(over_time.placement.dim, start, sizes[number])
        if value.placement.sharded:
            each = s._microbatches[number]
            sizes = each.stage.program.sizes(each.graph, value, each.stage.shares)
            start = sum(sizes[:place])
            rows = rows.narrow(value.placement.dim, start, sizes[place])
        part[value] = rows


def dtype_of(graph: Graph, tensor: str) -> torch.dtype:
    """Return the dtype of a graph's tensor."""
    found: torch.dtype = getattr(torch, graph.tensors[tensor].dtype)
    return found


def _whole_name(plan: Plan, target: str, role: str) -> str:
    return next(i.tensor for i in plan.graph.inputs if (i.target, i.role) == (target, role))
