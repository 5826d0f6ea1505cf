"""Lower a labelling to a program: insert the conversions and order them.

Instructions are in graph order, each conversion right before its first use. Two kinds are moved
together to be fused: all-gathers of parameters, to the start, and reductions of gradients, to the
end. Exceptions are parameters that the backward gathers again, and
gradients whose memory is too expensive to wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hap.ir.graph import LATE, Graph, Node
from hap.ir.mesh import is_mesh_op
from hap.ir.placement import Placement, R
from hap.ir.program import Compute, Convert, Instruction, Program
from hap.ir.regather import backward_alias_of
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.program_space import Holding, Space, final_placements

Conversions = Callable[[str, Placement, Holding], tuple[float, tuple[Convert, ...]]]
"""(tensor, placement as made, holding) -> seconds and conversions that produce the holding."""

AtOnce = Callable[[str, Placement, Holding], bool]
"""(gradient, placement as made, holding) -> whether to convert it at once, not at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A row per node, a holding per tensor, and the placement in which each input is given."""

    rows: Mapping[str, Row]
    held: Mapping[str, Holding]
    stored: Mapping[str, Placement]


def write_program(
    space: Space, choices: Choices, conversions: Conversions, at_once: AtOnce
) -> Program:
    """Return the program of the choices; this module decides the order of its instructions."""
    writer = _Writer(space, choices, conversions)
    graph, stored = space.graph, choices.stored
    parameters = {i.target: i.tensor for i in graph.role("parameter")}
    finals = [
        stored[parameters[o.target]] if o.role == "gradient"
        else next((p for p in final_placements(space, o) if p in choices.held[o.tensor]), R)
        for o in graph.outputs
    ]  # fmt: skip
    final = {o.tensor: p for o, p in zip(graph.outputs, finals, strict=True)}
    for term in space.terms:
        (reader,) = graph.consumers[term]
        final[term] = choices.rows[reader.name].ins[0]
    again = {  # parameters whose stored placement the backward reads
        name for name, twin in backward_alias_of(graph).items()
        if choices.rows[graph.producer[twin].name].ins[0] == stored[name]
    }  # fmt: skip
    first, middle, last = _ends_apart(graph.nodes)

    for i in graph.role("parameter"):
        if i.tensor not in again:
            writer.need(i.tensor, choices.held[i.tensor][0], False)
    for node in first:
        writer.compute(node)
        made = str(node.outputs[0])
        writer.need(made, choices.held[made][0], False)
    start = writer.taken()
    ends = [
        (o.tensor, p) for o, p in zip(graph.outputs, finals, strict=True)
        if o.role == "sent"
        or (o.role not in LATE and any(n.name in graph.backward for n in graph.consumers[o.tensor]))
    ]  # fmt: skip
    # A value that both need is converted for the forward, also if the backward's node stands before.
    for node in sorted(middle, key=lambda n: n.name in graph.backward):
        if node.name in graph.backward:
            while ends:  # by the forward, before the backward makes the same value
                writer.need(*ends.pop(), False)
        for out, p in writer.compute(node):
            if at_once(out, p, choices.held[out]):
                writer.need(out, final[out], True)
    body = writer.taken()
    for node in last:
        writer.compute(node)
    for o, p in zip(graph.outputs, finals, strict=True):
        writer.need(o.tensor, p, o.role in LATE)
    steps = [*_neighbours(start, graph), *body, *_neighbours(writer.taken(), graph)]
    return Program(
        inputs=stored, instructions=tuple(sorted(steps, key=lambda s: s.backward)),
        outputs=tuple(finals), axes=writer.axes,
    )  # fmt: skip


class _Writer:
    """The instructions so far, and the values that they have made."""

    def __init__(self, space: Space, choices: Choices, conversions: Conversions) -> None:
        self.axes: dict[str, tuple[str, int]] = {}
        self._space, self._choices, self._conversions = space, choices, conversions
        self._made = dict(choices.stored)
        self._exists: set[tuple[str, Placement]] = set()
        self._steps: list[Instruction] = []
        for tensor, p in choices.stored.items():
            self._place(tensor, p)

    def taken(self) -> list[Instruction]:
        """Return the instructions since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def compute(self, node: Node) -> list[tuple[str, Placement]]:
        """Run a node after its inputs; return its results."""
        row, backward = self._choices.rows[node.name], node.name in self._space.graph.backward
        for name, p in zip(node.inputs, row.ins, strict=True):
            self.need(name, p, backward)
        self._steps.append(Compute(node=node.name, ins=row.ins, outs=row.outs, backward=backward))
        made = [(o, p) for o, p in zip(node.outputs, row.outs, strict=True) if o and p]
        for out, p in made:
            self._made[out] = p
            self._place(out, p)
        return made

    def need(self, tensor: str, p: Placement, backward: bool) -> None:
        """Convert a tensor to a placement, unless that value exists."""
        if (tensor, p) in self._exists:
            return
        holding = self._choices.held[tensor]
        if p not in holding:  # a local part of the replica
            self.need(tensor, R, backward)
            self._convert(tensor, R, p, "", backward)
            return
        for step in self._conversions(tensor, self._made[tensor], holding)[1]:
            if (tensor, step.dst) not in self._exists:
                self.need(tensor, step.src, backward)
                self._convert(tensor, step.src, step.dst, step.implementation, backward)
            if step.dst == p:
                return

    def _convert(
        self, tensor: str, src: Placement, dst: Placement, how: str, backward: bool
    ) -> None:
        step = Convert(tensor=tensor, src=src, dst=dst, implementation=how, backward=backward)
        self._steps.append(step)
        self._place(tensor, dst)

    def _place(self, tensor: str, p: Placement) -> None:
        self._exists.add((tensor, p))
        if p.sharded:
            axis = self._space.axes.axis(tensor, p.dim)
            assert axis is not None
            self.axes[f"{tensor}:{p.dim}"] = (axis.name, axis.units)


def _ends_apart(nodes: Sequence[Node]) -> tuple[list[Node], list[Node], list[Node]]:
    """Return the collectives between machines that begin a step, that end it, and all others."""
    first = list(itertools.takewhile(lambda n: is_mesh_op(n.op), nodes))
    rest = list(nodes[len(first) :])
    last = list(itertools.takewhile(lambda n: is_mesh_op(n.op), reversed(rest)))[::-1]
    return first, rest[: len(rest) - len(last)], last


def _neighbours(steps: list[Instruction], graph: Graph) -> list[Instruction]:
    """Reorder conversions so that those of one kind are neighbours, and can be fused."""
    depth: dict[str, int] = {}
    keyed: list[tuple[tuple[bool, int, str], Instruction]] = []
    for step in steps:
        if isinstance(step, Convert):
            depth[step.tensor] = depth.get(step.tensor, -1) + 1
            keyed.append(((step.backward, depth[step.tensor], step.kind), step))
            continue
        node = graph.by_name[step.node]
        at = max(depth.get(name, -1) for name in node.inputs) + 1
        depth.update((out, at) for out in node.outputs if out)
        keyed.append(((step.backward, at, node.op), step))
    return [step for _, step in sorted(keyed, key=lambda entry: entry[0])]
