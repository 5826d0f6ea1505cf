"""The random numbers that the ranks drew, joined to whole tensors, for a run on one device.

A rank draws the numbers of its own shards. Joined by the shards' places, the masks of dropout and
the other draws of a step are given to the user's module, which then computes with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hap.capture import torch_private
from hap.ir.graph import Graph, Node
from hap.ir.graph_builder import RANDOM
from hap.ir.mesh import origin
from hap.ir.microbatch_sizes import size_of, sized_stages
from hap.ir.plan import Plan
from hap.ir.program import Compute, Program, Value
from hap.ir.stages import Stage
from hap.runtime.shards import recombined, recombined_values

DROPOUT = "aten.native_dropout.default"

Drawn = dict[str, Tensor]
"""``step/operator`` -> the numbers that a rank drew there."""


class UnlikeDrawsError(Exception):
    """The module does not draw what the program draws; the text says where."""


def draws(graph: Graph) -> list[Node]:
    """Return the operators that draw numbers, in the order of the forward."""
    return [n for n in graph.nodes if n.op in RANDOM and (n.op != DROPOUT or 0 < n.args[1] < 1)]


@dataclass(frozen=True, slots=True)
class Draw:
    """What one operator drew in one step: all replicas, which must be equal."""

    node: Node
    wholes: tuple[Tensor, ...]

    @property
    def agree(self) -> bool:
        return all(torch.equal(self.wholes[0], other) for other in self.wholes[1:])


def joined(plan: Plan, ranks: Sequence[Drawn], steps: int) -> list[list[Draw]]:
    """Return the whole random tensors of each step, in the order of the forward."""
    if plan.stages is not None:
        return _joined_stages(plan, ranks, steps)
    made = _drawn_values(*plan.whole)
    found = []
    for number in range(steps):
        drawn = []
        for node in draws(plan.graph):
            parts = [seen.get(f"{number}/{node.name}") for seen in ranks]
            if any(part is not None for part in parts):  # in evaluation, dropout draws nothing
                whole = recombined(plan, made[node.name], _filled(plan, made[node.name], parts))
                drawn.append(Draw(node, tuple(whole)))
        found.append(drawn)
    return found


def _drawn_values(graph: Graph, program: Program) -> dict[str, Value]:
    """Return the random value of each operator that draws one."""
    made: dict[str, Value] = {}
    for step in program.instructions:
        if isinstance(step, Compute) and graph.by_name[step.node].op in RANDOM:
            placed = zip(graph.by_name[step.node].outputs, step.outs, strict=True)
            made[step.node] = next(Value(t, p) for t, p in placed if t is not None and p)
    return made


def _joined_stages(plan: Plan, ranks: Sequence[Drawn], steps: int) -> list[list[Draw]]:
    """:func:`joined` for a pipeline: inside each stage first, then over the microbatches."""
    assert plan.stages is not None
    made = [
        _drawn_values(graph, stage.program)
        for graph, stage in zip(plan.cut[0], plan.stages.stages, strict=True)
    ]
    sized = sized_stages(plan.graph, plan.program, plan.shares, plan.stages)
    parts_of = [sized[size_of(plan.shares, part)] for part in range(plan.microbatches)]
    found = []
    for number in range(steps):
        drawn = []
        for node in draws(plan.graph):
            wholes: list[Tensor] = []
            for at, stage in enumerate(plan.stages.stages):
                value = made[at].get(node.name)
                if value is None:
                    continue
                parts = [
                    _in_stage(graphs[at], stages[at], value, [
                        ranks[r].get(f"{number}/{node.name}/{part}") for r in stage.ranks
                    ])
                    for part, (graphs, stages) in enumerate(parts_of)
                ]  # fmt: skip
                over_time = origin(value.tensor).placement
                if not over_time.sharded:  # drawn once, before the microbatches, or alike in each
                    wholes += next(filter(None, parts), [])
                elif all(parts):
                    wholes += [
                        torch.cat(column, over_time.dim) for column in zip(*parts, strict=True)
                    ]
            if wholes:
                drawn.append(Draw(node, tuple(wholes)))
        found.append(drawn)
    return found


def _in_stage(
    graph: Graph, stage: Stage, value: Value, parts: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the numbers of one microbatch, once per replica; empty if the stage draws none."""
    drawn = [part for part in parts if part is not None]
    if not drawn:
        return []
    filled = []
    for place, part in enumerate(parts):
        shape = stage.program.local_shape(graph, value, stage.shares, place)
        if part is None and 0 not in shape:
            raise UnlikeDrawsError(f"rank {stage.ranks[place]} does not draw its part of {value}")
        filled.append(torch.empty(shape, dtype=drawn[0].dtype) if part is None else part)
    return recombined_values(value, filled)


def _filled(plan: Plan, value: Value, parts: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the parts with empty ones of the ranks that have no share, which draw nothing."""
    dtype = next(part.dtype for part in parts if part is not None)
    found = []
    for rank, drawn in enumerate(parts):
        part = plan.part(rank)
        shape = part.program.local_shape(part.graph, value, part.shares, part.rank)
        if drawn is None and 0 not in shape:
            raise UnlikeDrawsError(f"rank {rank} does not draw its part of {value}")
        found.append(torch.empty(shape, dtype=dtype) if drawn is None else drawn)
    return found


@dataclass(slots=True)
class Replay:
    """Gives a module on one device the numbers of a program, step by step, draw by draw.

    A checkpoint draws again in the backward. It restores the generator's state first, by which the
    draw of the forward is found.
    """

    steps: Sequence[Sequence[Draw]]
    _step: int = -1
    _next: int = 0
    _by_state: dict[int, Draw] = field(default_factory=dict)

    def begin(self) -> None:
        """Start a step."""
        if self._step >= 0:
            self.end()
        self._step, self._next = self._step + 1, 0
        self._by_state.clear()

    def end(self) -> None:
        """Raise unless all draws of the step were taken."""
        left = self.steps[self._step][self._next :]
        if left:
            raise UnlikeDrawsError(f"the module does not draw the numbers of {left[0].node.name}")

    def take(self, kind: str, shape: Sequence[int], state: int) -> Tensor:
        """Return the numbers of the next draw.

        Args:
            kind: ``bernoulli``, ``rand``, ``randn`` or ``randint``.
            state: identifies the state of the generator before the draw.
        """
        if torch_private.in_backward():
            if state not in self._by_state:
                raise UnlikeDrawsError(
                    "activation checkpointing of the module draws new numbers in the backward"
                )
            return self._by_state[state].wholes[0]
        if self._next == len(self.steps[self._step]):
            raise UnlikeDrawsError(
                f"the module draws {kind} numbers that the program does not draw"
            )
        draw = self.steps[self._step][self._next]
        node, whole = draw.node, draw.wholes[0]
        if kind_of(node.op) != kind or tuple(whole.shape) != tuple(shape):
            raise UnlikeDrawsError(
                f"the module draws {kind} {tuple(shape)} where the program draws "
                f"{kind_of(node.op)} {tuple(whole.shape)} ({node.name})"
            )
        self._next += 1
        self._by_state[state] = draw
        return whole


def kind_of(op: str) -> str:
    """Return the distribution of an operator: ``bernoulli``, ``rand``, ``randn`` or ``randint``."""
    name = op.split(".")[1].removesuffix("_like").removesuffix("_")
    return "bernoulli" if name == "native_dropout" else name
