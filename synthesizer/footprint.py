"""What lies in each device's memory during a step, and what it is at the fullest moment.

Counted from first definition to last use, what the backward reads of the forward until the
backward ends; views share the storage of what they look at. Fused collectives are one moment:
all that goes in and all that comes out exists at once, and the buffers between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hap.graph import Graph, Node
from hap.placement import Placement
from hap.program import Convert, Instruction, Program, Value
from hap.synthesizer.cost import CostModel, PerRank
from hap.synthesizer.work import FREE

KINDS = (
    "parameters", "optimizer states", "batch and buffers", "gathered parameters", "gradients",
    "saved activations", "temporary values", "communication buffers",
)  # fmt: skip


Floats = npt.NDArray[np.float64]


def memory(
    graph: Graph, program: Program, cost: CostModel, buffers: CostModel | None = None
) -> tuple[PerRank, PerRank]:
    """(bytes of stored parameters and optimizer states, peak bytes of the step) per rank.

    Args:
        buffers: prices the communication's buffers, which depend on all ranks' parts at once,
            where the ranks of ``cost`` are none that work together.
    """
    stored = sum(_given(graph, program, cost, ("parameters", "optimizer states")).values())
    peak: PerRank = _moments(graph, program, cost, buffers, _Lives(graph, program)).max(axis=0)
    return stored + np.zeros_like(peak), peak


def at_peak(graph: Graph, program: Program, cost: CostModel) -> dict[str, PerRank]:
    """By kind, the bytes that each rank holds at its fullest moment."""
    lives = _Lives(graph, program)
    fullest = _moments(graph, program, cost, None, lives).argmax(axis=0) - 1
    found = {kind: np.zeros(len(fullest)) for kind in KINDS}
    for kind, nbytes in _given(graph, program, cost, KINDS).items():
        found[kind] = found[kind] + nbytes
    for value, (first, last) in lives.spans.items():
        alive = (first <= fullest) & (fullest <= last)
        found[lives.kind[value]] += np.where(alive, _bytes(graph, cost, value), 0.0)
    for rank, at in enumerate(fullest.tolist()):
        if at >= 0:
            between = communication_buffers(lives.groups[at], cost)
            found["communication buffers"][rank] = between[rank]
    return found


def _given(
    graph: Graph, program: Program, cost: CostModel, kinds: Sequence[str]
) -> dict[str, PerRank]:
    """What lies there from the start to the end."""
    nothing = np.zeros(cost.machine.cluster.world_size)
    found = dict.fromkeys(("parameters", "optimizer states", "batch and buffers"), nothing)
    for i in graph.inputs:
        local = cost.local_bytes(graph.tensors[i.tensor], program.inputs[i.tensor])
        kind = "parameters" if i.role == "parameter" else "batch and buffers"
        found[kind] = found[kind] + local
        if i.role == "parameter" and i.target in graph.gradients:
            found["optimizer states"] = found["optimizer states"] + cost.optimizer_states * local
    return {kind: nbytes for kind, nbytes in found.items() if kind in kinds}


def _moments(
    graph: Graph, program: Program, cost: CostModel, buffers: CostModel | None, lives: _Lives
) -> Floats:
    """Bytes alive; dims moment, rank. The first moment is before the step."""
    end = len(lives.groups)
    change = np.zeros((end + 2, cost.machine.cluster.world_size))
    change[0] = sum(_given(graph, program, cost, KINDS).values())
    for value, (first, last) in lives.spans.items():
        nbytes = _bytes(graph, cost, value)
        change[first + 1] += nbytes
        change[last + 2 if last < end else end + 1] -= nbytes
    alive: Floats = np.cumsum(change, axis=0)[: end + 1]
    for at, group in enumerate(lives.groups):
        if isinstance(group[0], Convert):
            between = communication_buffers(group, buffers or cost)
            alive[at + 1] += between.max() if buffers else between
    return alive


def _bytes(graph: Graph, cost: CostModel, value: Value) -> PerRank:
    return cost.local_bytes(graph.tensors[value.tensor], value.placement)


class _Lives:
    """From which moment to which each storage exists that a program makes."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self.groups = tuple(program.groups(graph))
        self.kind: dict[Value, str] = {}
        parameters = {i.tensor for i in graph.role("parameter")}
        gradients = set(graph.gradients.values())
        root: dict[Value, Value] = {}  # value -> the value whose storage it looks at
        first: dict[Value, int] = {}
        last: dict[Value, int] = {}
        inputs = {Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs}
        forward = set(inputs)
        end = len(self.groups)

        def use(value: Value, at: int) -> None:
            storage = root.setdefault(value, value)
            backward = at < end and self.groups[at][0].backward
            # What the backward reads of the forward is kept until the whole backward has run.
            kept = backward and storage in forward
            if kept and self.kind.get(storage) == "temporary values":
                self.kind[storage] = "saved activations"
            last[storage] = end if kept else max(at, last.get(storage, 0))

        def name(value: Value) -> str:
            if value.tensor in gradients:
                return "gradients"
            base = value.tensor
            while (node := graph.producer.get(base)) and node.op in FREE and node.inputs:
                base = node.inputs[0]
            return "gathered parameters" if base in parameters else "temporary values"

        for at, group in enumerate(self.groups):
            for step in group:
                ins, outs, alias = _touched(graph, step)
                for value in ins:
                    use(value, at)
                for value in outs:
                    root[value] = root[ins[0]] if alias and ins else value
                    if root[value] == value:
                        first[value] = at
                        self.kind[value] = name(value)
                        if not step.backward:
                            forward.add(value)
                    use(value, at)
        for output, p in zip(graph.outputs, program.outputs, strict=True):
            use(Value(output.tensor, p), end)
        self.spans = {value: (at, last[value]) for value, at in first.items()}


def _touched(graph: Graph, step: Instruction) -> tuple[list[Value], list[Value], bool]:
    """What an instruction reads and makes, and whether the second looks at the first."""
    if isinstance(step, Convert):
        src, dst = Value(step.tensor, step.src), Value(step.tensor, step.dst)
        return [src], [dst], step.kind == "slice"
    node = graph.by_name[step.node]
    ins = [Value(n, p) for n, p in zip(node.inputs, step.ins, strict=True)]
    return ins, _outs(node, step.outs), node.op in FREE


def _outs(node: Node, placements: tuple[Placement | None, ...]) -> list[Value]:
    return [Value(o, p) for o, p in zip(node.outputs, placements, strict=True) if o and p]


def communication_buffers(group: Sequence[Instruction], cost: CostModel) -> PerRank:
    """Bytes that the runtime holds during a collective beside what it reads and what it makes.

    Padded collectives pass through a tensor of ``world size`` largest parts; fused ones lay
    their tensors end to end before or after (``hap.runtime.collectives``).
    """
    converts = [s for s in group if isinstance(s, Convert)]
    nothing: PerRank = np.zeros(cost.machine.cluster.world_size)
    if not converts or len(converts) < len(group) or converts[0].local:
        return nothing
    tensors = [cost.graph.tensors[c.tensor] for c in converts]
    src = sum((cost.local_bytes(t, c.src) for t, c in zip(tensors, converts, strict=True)), nothing)
    dst = sum((cost.local_bytes(t, c.dst) for t, c in zip(tensors, converts, strict=True)), nothing)
    whole = sum((cost.whole_bytes(t) for t in tensors), nothing)
    joined = whole if len(converts) > 1 else nothing
    kind, how = converts[0].kind, converts[0].implementation
    if kind == "all_to_all":
        return src + dst if how == "exact" else whole + _padded(src, cost)
    if kind == "all_reduce":
        return joined + (whole if how == "two step" else 0.0)
    parts = src if kind == "all_gather" else dst
    if kind == "all_gather":  # what comes out of a fused one replaces what was padded
        return np.maximum(_padded(parts, cost) if how == "padded" else nothing, joined)
    return joined + (_padded(parts, cost) if how == "padded" else whole)


def _padded(parts: PerRank, cost: CostModel) -> PerRank:
    """As many of the largest part as there are ranks in a ring."""
    rings = parts.reshape(-1, cost.ring_size)
    return np.repeat(rings.max(axis=1) * cost.ring_size, cost.ring_size)
