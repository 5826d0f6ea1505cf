"""The cuts of a stored input, level by level: over machines or stages, then inside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.mesh import Inside, Part
from hap.ir.program import Program, Value
from hap.ir.stages import PipelineStages, Transfer


class Planned(Protocol):
    """What a plan knows of its storage: see :class:`hap.ir.plan.Plan`."""

    @property
    def graph(self) -> Graph: ...
    @property
    def program(self) -> Program: ...
    @property
    def shares(self) -> Shares: ...
    @property
    def inside(self) -> Inside | None: ...
    @property
    def stages(self) -> PipelineStages | None: ...
    @property
    def cut(self) -> tuple[tuple[Graph, ...], tuple[Transfer, ...]]: ...
    @property
    def owners(self) -> Mapping[str, int]: ...
    def place(self, rank: int) -> int: ...
    def part(self, rank: int) -> Part: ...


class TensorCut(NamedTuple):
    """One cut of a tensor along ``dim``: elements of every place; ``place`` is this rank's."""

    dim: int
    sizes: tuple[int, ...]
    place: int

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.place])


Levels = tuple[TensorCut | None, ...]


def storage_levels(plan: Planned, tensor: str, rank: int) -> Levels:
    """Return the cuts of an input in storage: see :meth:`hap.ir.plan.Plan.levels`."""
    if plan.stages is not None:
        return _in_stages(plan, tensor, rank)
    levels = [(Part(plan.graph, plan.program, plan.shares, plan.place(rank), {}), tensor)]
    if plan.inside is not None:
        part = plan.part(rank)
        at = [i.tensor for i in plan.graph.inputs].index(tensor)
        levels.append((part, part.graph.inputs[at].tensor))
    return tuple(_cut(part, name) for part, name in levels)


def _in_stages(plan: Planned, tensor: str, rank: int) -> Levels:
    """A stage stores all of a parameter, and divides it among its ranks; the batch is whole."""
    assert plan.stages is not None
    owner = plan.owners.get(tensor)
    if owner is None:
        return None, None
    number, place = plan.stages.place(rank)
    graphs, rows = plan.cut[0], plan.graph.tensors[tensor].shape[0]
    outer = TensorCut(0, tuple(rows * (k == owner) for k in range(len(graphs))), number)
    if number != owner:
        return outer, None
    stage = plan.stages.stages[number]
    return outer, _cut(Part(graphs[number], stage.program, stage.shares, place, {}), tensor)


def _cut(part: Part, name: str) -> TensorCut | None:
    value = Value(name, part.program.inputs[name])
    if not value.placement.sharded:
        return None
    sizes = part.program.sizes(part.graph, value, part.shares)
    return TensorCut(value.placement.dim, sizes, part.rank)
