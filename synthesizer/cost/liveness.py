"""What of a program's step does not depend on its shares: worked out once, priced many times.

The search for shares prices one program under many of them. Which instructions run as one,
which look alike to every price, from when to when a value lies in memory: that stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hap.ir.graph import FREE, Graph, Node, Tensor
from hap.ir.program import Bounds, Compute, Convert, Instruction, Program, Value
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.rules.rule_table import Row

Indices = npt.NDArray[np.int64]

Item = TypeVar("Item")


class Classes(Generic[Item]):
    """Things by what their price depends on; the first of each class stands for all."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.first: list[Item] = []

    def number(self, key: Hashable, item: Item) -> int:
        """The class of a key; its first item is kept."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.first)
            self.first.append(item)
        return found


class Script:
    """The groups of a program's instructions, their classes, and the lives of its values.

    Nothing here depends on which implementations the program names, but for what runs as one.

    Attributes:
        bounds: per group of instructions that run as one, its first and the one after its last.
        nodes: per group, the nodes that it runs, and by which rows; none if it moves.
        work: per group, the classes in ``computing`` of its nodes.
        moved: per group, its class in ``moving``; -1 if it computes.
        updated: classes in ``updating`` of the trained parameters.
    """

    def __init__(self, graph: Graph, program: Program, cost: CostModel, bounds: Bounds) -> None:
        self.bounds = bounds
        self.axes = cost.axes
        groups = [program.instructions[a:b] for a, b in bounds]
        self._groups, self._graph, self._program = groups, graph, program
        self.lives = self.lives_until(range(len(groups)))
        self.computing: Classes[tuple[Node, Row]] = Classes()
        self.nodes: list[list[tuple[Node, Row]]] = []
        self.moving: Classes[int] = Classes()
        self.updating: Classes[str] = Classes()
        self.work: list[tuple[int, ...]] = []
        self.moved: list[int] = []
        for at, (a, b) in enumerate(bounds):
            group = program.instructions[a:b]
            moves = tuple(_moving(graph, cost, s) for s in group if isinstance(s, Convert))
            self.moved.append(self.moving.number(moves, at) if moves else -1)
            nodes = computed(graph, group)
            self.nodes.append(nodes)
            numbers = (self.computing.number(cost.kind(*entry), entry) for entry in nodes)
            self.work.append(tuple(numbers))
        self.updated = [
            self.updating.number(
                (_looks(graph.tensors[i.tensor]), cost.where(i.tensor, program.inputs[i.tensor])),
                i.tensor,
            )
            for i in graph.role("parameter") if i.target in graph.gradients
        ]  # fmt: skip
        self.parts: Classes[Value] = Classes()
        values = list(self.lives.spans)
        self.inputs = [Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs]
        where = [self.parts.number(cost.where(*v), v) for v in [*self.inputs, *values]]
        self.part_of_input: Indices = np.array(where[: len(self.inputs)], dtype=np.int64)
        self.part_of_value: Indices = np.array(where[len(self.inputs) :], dtype=np.int64)

    def lives_until(self, until: Sequence[int]) -> Lives:
        """The lives if each group holds what it reads until another has run; see :class:`Lives`."""
        return Lives(self._graph, self._groups, self._program, until)


def computed(graph: Graph, group: Sequence[Instruction]) -> list[tuple[Node, Row]]:
    """The nodes that a group of instructions runs, and by which rows."""
    return [(graph.by_name[s.node], Row(s.outs, s.ins)) for s in group if isinstance(s, Compute)]


def script_of(graph: Graph, program: Program, cost: CostModel) -> Script:
    """The script of a program, from its memo where it is known."""
    return _known("script", graph, program, cost)


def plain_script_of(graph: Graph, program: Program, cost: CostModel) -> Script:
    """That of the program whose implementations are still to be chosen: none keeps groups apart."""
    return _known("plain script", graph, program, cost)


def _known(name: str, graph: Graph, program: Program, cost: CostModel) -> Script:
    found = program.memo.get(name)
    if found is not None and found[0] is graph and found[1].axes == cost.axes:
        script: Script = found[1]
        return script
    bounds = program.bounds(graph, named=name == "script")
    other = program.memo.get("plain script" if name == "script" else "script")
    if other and other[0] is graph and other[1].axes == cost.axes and other[1].bounds == bounds:
        script = other[1]
    else:
        script = Script(graph, program, cost, bounds)
    program.memo[name] = graph, script
    return script


def _looks(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype


def _moving(graph: Graph, cost: CostModel, step: Convert) -> Hashable:
    """What the price of a conversion and its buffers depend on, beside the implementation."""
    looks = _looks(graph.tensors[step.tensor])
    sides = [(p.kind, cost.where(step.tensor, p)) for p in (step.src, step.dst)]
    return looks, tuple(sides), cost.alike(step.tensor)


class Lives:
    """From which moment to which each storage exists that a program makes.

    Args:
        until: per group, the last one that begins before it has ended: itself, or a later one
            if it communicates meanwhile.
    """

    def __init__(
        self, graph: Graph, groups: Sequence[Sequence[Instruction]], program: Program,
        until: Sequence[int],
    ) -> None:  # fmt: skip
        self.until = until
        self.kind: dict[Value, str] = {}
        parameters = {i.tensor for i in graph.role("parameter")}
        gradients = set(graph.gradients.values())
        root: dict[Value, Value] = {}  # value -> the value whose storage it looks at
        first: dict[Value, int] = {}
        last: dict[Value, int] = {}
        inputs = {Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs}
        forward = set(inputs)
        end = len(groups)

        def use(value: Value, at: int, backward: bool) -> None:
            storage = root.setdefault(value, value)
            saved = backward and storage in forward
            if saved and self.kind.get(storage) == "temporary values":
                self.kind[storage] = "saved activations"
            last[storage] = max(at, last.get(storage, 0))

        def name(value: Value) -> str:
            if value.tensor in gradients:
                return "gradients"
            base = value.tensor
            while (node := graph.producer.get(base)) and node.op in FREE and node.inputs:
                base = node.inputs[0]
            return "gathered parameters" if base in parameters else "temporary values"

        for at, group in enumerate(groups):
            backward = group[0].backward
            for step in group:
                ins, outs, alias = _touched(graph, step)
                for value in ins:
                    use(value, until[at], backward)
                for value in outs:
                    root[value] = root[ins[0]] if alias and ins else value
                    if root[value] == value:
                        first[value] = at
                        self.kind[value] = name(value)
                        if not step.backward:
                            forward.add(value)
                    use(value, at, backward)
        for output, p in zip(graph.outputs, program.outputs, strict=True):
            use(Value(output.tensor, p), end, False)
        self.spans = {value: (at, last[value]) for value, at in first.items()}
        changes = [(at + 1, min(last[value] + 2, end + 1)) for value, at in first.items()]
        self.changes: Indices = np.array(changes, dtype=np.int64).reshape(-1)
        """Per value, the moments from which on it is there, and no longer there."""


def _touched(graph: Graph, step: Instruction) -> tuple[list[Value], list[Value], bool]:
    """What an instruction reads and makes, and whether the second looks at the first."""
    if isinstance(step, Convert):
        src, dst = Value(step.tensor, step.src), Value(step.tensor, step.dst)
        return [src], [dst], step.kind == "slice"
    node = graph.by_name[step.node]
    ins = [Value(n, p) for n, p in zip(node.inputs, step.ins, strict=True)]
    outs = [Value(o, p) for o, p in zip(node.outputs, step.outs, strict=True) if o and p]
    return ins, outs, node.op in FREE
