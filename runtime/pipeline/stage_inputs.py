"""The inputs of one rank's stage: those of the step, and each microbatch's rows of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hap.ir.graph import Graph
from hap.ir.microbatch import is_of_each
from hap.ir.plan import Plan
from hap.ir.program import Value
from hap.ir.stages import Stage
from hap.runtime.pipeline.sums import Env


def inputs_of(
    plan: Plan, microbatches: Sequence[tuple[Graph, Stage]], place: int, given: Mapping[str, Tensor],
    tangent: Tensor,
) -> tuple[Env, list[Env]]:  # fmt: skip
    """Return the inputs of the whole step, and those of each microbatch.

    Args:
        microbatches: the stage's graph and its program for each microbatch.
        place: of this rank in the stage.
        given: this rank's shards of the plan's inputs, by their tensors in the plan's graph.
        tangent: the gradient of the loss.
    """
    env: Env = {}
    parts: list[Env] = [{} for _ in microbatches]
    graph, stage = microbatches[0]
    for i in graph.inputs:
        value = Value(i.tensor, stage.program.inputs[i.tensor])
        if i.role == "tangent":
            env[value] = tangent
        elif is_of_each(i):
            entry = _whole_name(plan, i.target, "input")
            for number, rows in enumerate(
                _cut(plan, microbatches, place, given[entry], entry, value)
            ):
                parts[number][value] = rows
        elif i.role == "input":  # whole over time
            entry = _whole_name(plan, i.target, "input")
            (env[value],) = _cut(plan, microbatches[:1], place, given[entry], entry, value)
        elif i.role != "received":
            env[value] = given[_whole_name(plan, i.target, i.role)]
    return env, parts


def _cut(
    plan: Plan, microbatches: Sequence[tuple[Graph, Stage]], place: int, whole: Tensor, entry: str,
    value: Value,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield this rank's rows of each microbatch of an entry of the batch."""
    over_time = Value(entry, plan.program.inputs[entry])
    for number, (graph, stage) in enumerate(microbatches):
        rows = whole
        if over_time.placement.sharded:
            sizes = plan.program.sizes(plan.graph, over_time, plan.shares)
            start = sum(sizes[:number])
            rows = rows.narrow(over_time.placement.dim, start, sizes[number])
        if value.placement.sharded:
            sizes = stage.program.sizes(graph, value, stage.shares)
            start = sum(sizes[:place])
            rows = rows.narrow(value.placement.dim, start, sizes[place])
        yield rows


def dtype_of(graph: Graph, tensor: str) -> torch.dtype:
    """Return the dtype of a graph's tensor."""
    found: torch.dtype = getattr(torch, graph.tensors[tensor].dtype)
    return found


def _whole_name(plan: Plan, target: str, role: str) -> str:
    return next(i.tensor for i in plan.graph.inputs if (i.target, i.role) == (target, role))
