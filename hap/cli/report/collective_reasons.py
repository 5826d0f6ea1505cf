"""The reason of every collective: how its tensor is made, and who reads it in which placement."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hap.cli.plan_screen import tensor_label
from hap.ir.graph import FREE, Graph
from hap.ir.mesh import is_mesh_op
from hap.ir.placement import Placement
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert, Instruction, Value
from hap.ir.regather import ALIAS

_HAS = {
    "R": "is whole on every rank",
    "P": "is a sum of terms, one per rank",
    "L": "is a log of summed exponentials, a term per rank",
}
_NEEDS = {"R": "whole", "P": "as terms of a sum", "L": "as terms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One collective of the prediction; ``fused`` are the labels of the tensors beside the first."""

    label: str
    fused: tuple[str, ...]
    reason: str


def collective_rows(plan: Plan) -> list[CollectiveRow]:
    """A row for each collective of the prediction, in its order; of stages, for each transfer."""
    if plan.stages:
        return _transfer_rows(plan)
    graph, program = plan.whole
    readers = _readers(graph, program.instructions)
    groups: dict[tuple[str, int], deque[tuple[Instruction, ...]]] = defaultdict(deque)
    for group in program.groups(graph):
        if tensor := _crossing(graph, group[0]):
            groups[tensor, len(group)].append(group)
    rows = []
    for c in plan.prediction.collectives:
        waiting = groups[c.tensor, c.fused]
        alike = [group for group in waiting if _kind(graph, group[0]) == c.kind]
        fused: tuple[str, ...] = ()
        reason = "the plan's program lacks it: it was changed after the prediction"
        if alike:
            group = alike[0]
            waiting.remove(group)
            fused = tuple(tensor_label(plan, _crossing(graph, s) or "") for s in group[1:])
            reason = _reason(plan, group[0], readers)
        rows.append(CollectiveRow(label=tensor_label(plan, c.tensor), fused=fused, reason=reason))
    return rows


def _transfer_rows(plan: Plan) -> list[CollectiveRow]:
    transfers = {(t.tensor, f"stage {t.src} to stage {t.dst}"): t for t in plan.cut[1]}
    rows = []
    for c in plan.prediction.collectives:
        transfer = transfers.get((c.tensor, c.kind))
        reason = "the plan's program lacks it: it was changed after the prediction"
        if transfer:
            often = "once per step" if transfer.once else "for each microbatch"
            reason = f"stage {transfer.src} makes it and stage {transfer.dst} reads it, {often}"
        rows.append(CollectiveRow(label=tensor_label(plan, c.tensor), fused=(), reason=reason))
    return rows


def _crossing(graph: Graph, step: Instruction) -> str | None:
    """The tensor that an instruction communicates, if it does."""
    if isinstance(step, Convert):
        return None if step.local else step.tensor
    node = graph.by_name[step.node]
    return node.inputs[0] if is_mesh_op(node.op) else None


def _kind(graph: Graph, step: Instruction) -> str:
    if isinstance(step, Convert):
        return step.kind
    return f"{graph.by_name[step.node].op.partition('.')[2]} between machines"


def _readers(graph: Graph, steps: Sequence[Instruction]) -> dict[Value, Instruction]:
    """The first instruction that reads each value."""
    found: dict[Value, Instruction] = {}
    for step in steps:
        for value in step.reads(graph):
            found.setdefault(value, step)
    return found


def _reason(plan: Plan, step: Instruction, readers: dict[Value, Instruction]) -> str:
    graph = plan.whole[0]
    if isinstance(step, Compute):
        what = tensor_label(plan, graph.by_name[step.node].inputs[0])
        return f"{what}: the program between machines combines the machines' shares"
    return (
        f"{_source(plan, step.tensor)} {placed(step.src)}; "
        f"{_reader(plan, Value(step.tensor, step.dst), readers)} {_needs(step.dst)}"
    )


def placed(placement: Placement) -> str:
    """What ranks hold of a tensor, as the predicate of a sentence."""
    return _HAS.get(placement.kind, f"is split along dim {placement.dim}")


def _needs(placement: Placement) -> str:
    return "reads it " + _NEEDS.get(placement.kind, f"split along dim {placement.dim}")


def _source(plan: Plan, tensor: str) -> str:
    node = plan.whole[0].producer.get(tensor)
    role = next((i.role for i in plan.whole[0].inputs if i.tensor == tensor), "")
    if role:
        return f"the {role}"
    if tensor in plan.whole[0].gradients.values():
        return "the gradient"
    if node and node.op == ALIAS:
        return "the parameter"
    return f"the result of {_operator(node.op)}" if node else "it"


def _reader(plan: Plan, value: Value, readers: dict[Value, Instruction]) -> str:
    """The instruction that reads a value, past views of it, in words."""
    graph = plan.whole[0]
    step = readers.get(value)
    while isinstance(step, Compute) and graph.by_name[step.node].op in FREE:
        made = step.writes(graph)
        further = readers.get(made[0]) if made else None
        if further is None:
            break
        step = further
    if step is None:
        is_gradient = value.tensor in graph.gradients.values()
        return "the optimizer" if is_gradient else "the end of the step"
    if isinstance(step, Convert):
        return f"a later {step.kind}"
    node = graph.by_name[step.node]
    where = f" of {node.module}" if node.module else ""
    return f"{_operator(node.op)}{where}, {'backward' if step.backward else 'forward'},"


def _operator(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")
