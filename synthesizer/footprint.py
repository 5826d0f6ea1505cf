"""What lies in each device's memory during a step, and what it is at the fullest moment.

Counted from first definition to last use, what the backward reads of the forward until the
backward ends; views share the storage of what they look at. Fused collectives are one moment:
all that goes in and all that comes out exists at once, and the buffers between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hap.graph import Graph, Node
from hap.placement import Placement
from hap.program import Convert, Instruction, Program, Value
from hap.synthesizer.cost import CostModel, PerRank
from hap.synthesizer.work import FREE

KINDS = (
    "parameters", "optimizer states", "batch and buffers", "gathered parameters", "gradients",
    "saved activations", "temporary values", "communication buffers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes per rank: of stored parameters and states, and at each rank's peak by kind."""

    stored_bytes: PerRank
    peak: Mapping[str, PerRank]

    @property
    def peak_bytes(self) -> PerRank:
        total: PerRank = np.sum(list(self.peak.values()), axis=0)
        return total


def memory(graph: Graph, program: Program, cost: CostModel) -> tuple[PerRank, PerRank]:
    """(bytes of stored parameters and optimizer states, peak bytes of the step) per rank."""
    found = footprint(graph, program, cost)
    return found.stored_bytes, found.peak_bytes


def footprint(
    graph: Graph, program: Program, cost: CostModel, buffers: CostModel | None = None
) -> Footprint:
    """Follow a step from moment to moment, and keep each rank's fullest.

    Args:
        buffers: prices the communication's buffers, which depend on all ranks' parts at once,
            where the ranks of ``cost`` are none that work together.
    """
    lives = _Lives(graph, program)
    alive = np.zeros((len(KINDS), cost.machine.cluster.world_size))

    def add(kind: str, nbytes: PerRank) -> None:
        alive[KINDS.index(kind)] += nbytes

    for i in graph.inputs:
        local = cost.local_bytes(graph.tensors[i.tensor], program.inputs[i.tensor])
        parameter = i.role == "parameter"
        add("parameters" if parameter else "batch and buffers", local)
        if parameter and i.target in graph.gradients:
            add("optimizer states", cost.optimizer_states * local)
    stored = alive[KINDS.index("parameters")] + alive[KINDS.index("optimizer states")]
    peak, fullest = alive.copy(), alive.sum(0)
    for group, made, dying in zip(lives.groups, lives.made, lives.dying, strict=True):
        for value in made:
            add(lives.kind[value], _bytes(graph, cost, value))
        between = communication_buffers(group, buffers or cost)
        if buffers:
            between = np.full(alive.shape[1], between.max())
        add("communication buffers", between)
        total = alive.sum(0)
        peak = np.where(total > fullest, alive, peak)
        fullest = np.maximum(total, fullest)
        add("communication buffers", -between)
        for value in dying:
            add(lives.kind[value], -_bytes(graph, cost, value))
    return Footprint(stored_bytes=stored, peak=dict(zip(KINDS, peak, strict=True)))


def _bytes(graph: Graph, cost: CostModel, value: Value) -> PerRank:
    return cost.local_bytes(graph.tensors[value.tensor], value.placement)


class _Lives:
    """Which storages are made, and which are used last, at every moment of a program."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self.groups = tuple(program.groups(graph))
        self.made: list[list[Value]] = []
        self.kind: dict[Value, str] = {}
        parameters = {i.tensor for i in graph.role("parameter")}
        gradients = set(graph.gradients.values())
        root: dict[Value, Value] = {}  # value -> the value whose storage it looks at
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
            made: list[Value] = []
            for step in group:
                ins, outs, alias = _touched(graph, step)
                for value in ins:
                    use(value, at)
                for value in outs:
                    root[value] = root[ins[0]] if alias and ins else value
                    if root[value] == value:
                        made.append(value)
                        self.kind[value] = name(value)
                        if not step.backward:
                            forward.add(value)
                    use(value, at)
            self.made.append(made)
        for output, p in zip(graph.outputs, program.outputs, strict=True):
            use(Value(output.tensor, p), end)
        self.dying: list[list[Value]] = [[] for _ in self.groups]
        for value, at in last.items():
            if at < end and value not in inputs:
                self.dying[at].append(value)


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
    world = cost.machine.cluster.world_size
    nothing: PerRank = np.zeros(world)
    if not converts or len(converts) < len(group) or converts[0].local:
        return nothing
    tensors = [cost.graph.tensors[c.tensor] for c in converts]
    src = sum((cost.local_bytes(t, c.src) for t, c in zip(tensors, converts, strict=True)), nothing)
    dst = sum((cost.local_bytes(t, c.dst) for t, c in zip(tensors, converts, strict=True)), nothing)
    whole = float(sum(t.nbytes for t in tensors))
    joined = whole if len(converts) > 1 else 0.0
    kind, how = converts[0].kind, converts[0].implementation
    if kind == "all_to_all":
        return src + dst if how == "exact" else nothing + whole + world * src.max()
    if kind == "all_reduce":
        return nothing + joined + (whole if how == "two step" else 0.0)
    parts = src if kind == "all_gather" else dst
    if kind == "all_gather":  # what comes out of a fused one replaces what was padded
        return nothing + max(world * float(parts.max()) if how == "padded" else 0.0, joined)
    return nothing + joined + (world * float(parts.max()) if how == "padded" else whole)
