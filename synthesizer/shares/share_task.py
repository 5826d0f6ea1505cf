"""The problem of choosing shares, and the simulated value of a solution.

A *split* gives the units of each rank per group of axes that a program uses alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph, Tensor
from hap.ir.placement import Placement
from hap.ir.program import Compute, Program
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.serial_cost import simulate


def proportional(units: int, weights: PerRank) -> tuple[int, ...]:
    """Whole units in proportion to the weights, by largest remainder; the first of equals wins.

    Raises ``ValueError`` if a weight is negative, or none is positive.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not (weights.min() >= 0 and 0 < weights.sum() < np.inf):
        raise ValueError(f"weights {weights.tolist()}: give none below 0, and one above")
    exact = np.round(units * weights / weights.sum(), 9)  # equal remainders compare equal
    whole = np.floor(exact).astype(int)
    order = np.argsort(np.round(whole - exact, 9), kind="stable")
    whole[order[: units - int(whole.sum())]] += 1
    return tuple(whole.tolist())


Split = tuple[tuple[int, ...], ...]
"""Per group of axes, the units of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """The simulated value of a split."""

    split: Split
    shares: Shares
    step_s: float
    lack_bytes: PerRank

    def rank(self) -> tuple[float, float]:
        return float(self.lack_bytes.sum()), self.step_s


@dataclass(frozen=True, kw_only=True)
class Task:
    """The arguments of :func:`solve_shares`, its groups of axes and types of devices."""

    graph: Graph
    axes: Axes
    program: Program
    hardware: HardwareModel
    optimizer_states: int
    start: Shares
    types: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[str, ...], ...]

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Per group."""
        used = self.program.used_axes()
        return tuple(used[group[0]] for group in self.groups)

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Axis -> index of its group."""
        return {axis: g for g, group in enumerate(self.groups) for axis in group}

    def group(self, tensor: str, placement: Placement) -> int:
        """Index of the group that a sharded value lies on."""
        return self.group_of[self.program.axis(tensor, placement.dim)[0]]

    def first_splits(self) -> list[Split]:
        """The start; even; and, as all-to-alls have several optima, each type alone or left out."""
        even = np.ones(self.hardware.cluster.world_size)
        weights = [even]
        if len(self.types) > 1 and any(c.kind == "all_to_all" for c in self.program.collectives):
            for ranks in self.types:
                alone = self.hardware.speed * np.isin(np.arange(len(even)), ranks)
                weights += [alone, self.hardware.speed - alone]
        start = tuple(self.start[group[0]] for group in self.groups)
        splits = [tuple(proportional(u, w) for u in self.units) for w in weights]
        return list(dict.fromkeys([start, *splits]))

    def shares(self, split: Split) -> Shares:
        """Shares of all axes; those of a group have one vector."""
        return {**self.start, **{axis: split[g] for axis, g in self.group_of.items()}}

    def cost(self, shares: Shares) -> CostModel:
        return CostModel(self.graph, self.axes, self.hardware, shares, self.optimizer_states)

    def simulated(self, shares: Shares) -> Simulated:
        cost = self.cost(shares)
        line = simulate(self.graph, self.program, cost)
        room = np.array([d.memory_bytes for d in self.hardware.cluster.devices])
        return Simulated(
            split=tuple(shares[group[0]] for group in self.groups), shares=shares,
            step_s=line.step_s, lack_bytes=np.maximum(line.peak_bytes - room, 0.0),
        )  # fmt: skip


def alike_axes(graph: Graph, program: Program) -> tuple[tuple[str, ...], ...]:
    """The program's axes, grouped by how the same operators use them: they differ in layer alone."""
    uses: dict[str, Counter[object]] = {name: Counter() for name in program.used_axes()}
    for what, placed in _uses(graph, program):
        names = [program.axis(t.name, p.dim)[0] if p.sharded else "" for t, p in placed]
        for axis in set(names) - {""}:
            mine = [name == axis for name in names]
            shapes = [(t.shape, t.dtype, p) for t, p in placed]
            uses[axis][what, tuple(zip(shapes, mine, strict=True))] += 1
    groups: dict[object, list[str]] = {}
    for name, units in program.used_axes().items():
        groups.setdefault((units, frozenset(uses[name].items())), []).append(name)
    return tuple(map(tuple, groups.values()))


def _uses(graph: Graph, program: Program) -> Iterator[tuple[str, list[tuple[Tensor, Placement]]]]:
    """All items with a price: (name, its tensors and their placements)."""
    tensors, gradients = graph.tensors, graph.gradients
    nodes = {n.name: n for n in graph.nodes}
    for i in graph.inputs:
        trained = "trained " if i.target in gradients else ""
        yield f"{trained}{i.role}", [(tensors[i.tensor], program.inputs[i.tensor])]
    for step in program.instructions:
        if isinstance(step, Compute):
            node = nodes[step.node]
            placed = zip((*node.inputs, *node.outputs), (*step.ins, *step.outs), strict=True)
            yield node.op, [(tensors[n], p) for n, p in placed if n and p]
        else:
            t = tensors[step.tensor]
            yield f"{step.kind} {step.implementation}", [(t, step.src), (t, step.dst)]
