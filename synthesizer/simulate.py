"""A program on a timeline: predicted step time and peak memory of every rank.

Each rank has one stream; it computes while it can and waits at every collective until the
last rank arrives (communication does not yet overlap with computing). Memory is that of
:mod:`hap.synthesizer.footprint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.graph import Graph, Node
from hap.program import Compute, Convert, Instruction, Program
from hap.synthesizer.cost import CostModel, PerRank
from hap.synthesizer.footprint import memory
from hap.synthesizer.rules.base import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one training step does to each rank; vectors have one entry per rank.

    ``step_s`` ends with the slowest rank's optimizer step. ``compute_s`` + ``wait_s`` +
    ``communicate_s`` is the same sum for every rank.
    """

    step_s: float
    compute_s: PerRank
    wait_s: PerRank
    communicate_s: float
    stored_bytes: PerRank
    peak_bytes: PerRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The computing between two collectives: seconds per rank, then the collective's."""

    compute_s: PerRank
    communicate_s: float


def stages(graph: Graph, program: Program, cost: CostModel) -> list[Stage]:
    """The stages of a step in order; the optimizer's step is the last one."""
    world = cost.machine.cluster.world_size
    found: list[Stage] = []
    busy = np.zeros(world)
    for group in program.groups(graph):
        nodes = computed(graph, group)
        crossing = cost.cross(nodes) if nodes else None
        if crossing is not None:
            found.append(Stage(compute_s=busy, communicate_s=crossing))
            busy = np.zeros(world)
            continue
        for node, row in nodes:
            busy = busy + cost.compute(node, row)
        converts = [s for s in group if isinstance(s, Convert)]
        if not converts:
            continue
        seconds = convert_seconds(converts, cost)
        if converts[0].local:
            busy = busy + seconds
        else:
            found.append(Stage(compute_s=busy, communicate_s=seconds))
            busy = np.zeros(world)
    for i in graph.role("parameter"):
        if i.target in graph.gradients:
            busy = busy + cost.update(graph.tensors[i.tensor], program.inputs[i.tensor])
    return [*found, Stage(compute_s=busy, communicate_s=0.0)]


def computed(graph: Graph, group: Sequence[Instruction]) -> list[tuple[Node, Row]]:
    """The nodes that a group of instructions runs, and by which rows."""
    return [(graph.by_name[s.node], Row(s.outs, s.ins)) for s in group if isinstance(s, Compute)]


def convert_seconds(group: Sequence[Convert], cost: CostModel) -> float:
    """Predicted time of neighbouring conversions by the implementation that the program names."""
    times = {c.implementation: c.seconds for c in cost.convert_group(group)}
    named = group[0].implementation
    if named not in times:
        raise ValueError(f"{group[0].kind} has no implementation {named!r}, but {sorted(times)}")
    return times[named]


def simulate(graph: Graph, program: Program, cost: CostModel) -> Timeline:
    """Run a program on the cost model's cluster and shares."""
    world = cost.machine.cluster.world_size
    compute, wait, communicate = np.zeros(world), np.zeros(world), 0.0
    for stage in stages(graph, program, cost):
        compute = compute + stage.compute_s
        wait = wait + (stage.compute_s.max() - stage.compute_s)
        communicate += stage.communicate_s
    stored, peak = memory(graph, program, cost)
    return Timeline(
        step_s=float((compute + wait).max()) + communicate,
        compute_s=compute, wait_s=wait, communicate_s=communicate,
        stored_bytes=stored, peak_bytes=peak,
    )  # fmt: skip
