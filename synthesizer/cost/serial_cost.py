"""Serial cost: step time and peak memory of a program without overlap.

Each rank has one stream; it computes while it can and waits at every collective until the
last rank arrives. That is quick to work out, and what overlapping starts from
(:mod:`hap.synthesizer.schedule.list_scheduler`). Memory is that of :mod:`hap.synthesizer.cost.peak_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.ir.graph import Graph
from hap.ir.program import Convert, Program
from hap.synthesizer.cost.cost_model import CostModel, PerRank
from hap.synthesizer.cost.cost_structure import structure_of
from hap.synthesizer.cost.peak_memory import memory

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one training step does to each rank; vectors have one entry per rank.

    ``step_s`` ends with the slowest rank's optimizer step. It is ``compute_s`` + ``wait_s`` +
    ``communicate_s`` - ``hidden_s`` for every rank. Hidden is the part of communicating beside
    which the busiest rank computes.
    """

    step_s: float
    compute_s: PerRank
    wait_s: PerRank
    communicate_s: float
    hidden_s: float
    stored_bytes: PerRank
    peak_bytes: PerRank


def timeline(
    step_s: float, compute_s: PerRank, communicate_s: float, stored: PerRank, peak: PerRank
) -> Timeline:
    """From the sums to what each rank does otherwise."""
    hidden_s = max(0.0, float(compute_s.max()) + communicate_s - step_s)
    waiting = step_s - compute_s - communicate_s + hidden_s
    waiting[waiting < _ROUNDING * step_s] = 0.0
    return Timeline(
        step_s=step_s, compute_s=compute_s, communicate_s=communicate_s, hidden_s=hidden_s,
        wait_s=waiting,
        stored_bytes=stored, peak_bytes=peak,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Superstep:
    """The computing between two collectives: seconds per rank, then the collective's."""

    compute_s: PerRank
    communicate_s: float


def supersteps(graph: Graph, program: Program, cost: CostModel) -> list[Superstep]:
    """The supersteps of a step in order; the optimizer's step is the last one."""
    structure = structure_of(graph, program, cost)
    nothing = np.zeros((1, cost.machine.cluster.world_size))
    # Work is a row of this table: of the kinds of nodes, then of updates, then of local moves.
    table = [cost.compute(node, row) for node, row in structure.computing.first]
    updates = len(table)
    for name in structure.updating.first:
        table.append(cost.update(graph.tensors[name], program.inputs[name]))
    moves: dict[object, float] = {}
    local: dict[object, int] = {}
    ends: list[tuple[list[int], float]] = []  # of each stage: its work, and what it ends with
    busy: list[int] = []
    for (first, end), nodes, work, moved in zip(
        structure.bounds, structure.nodes, structure.work, structure.moved, strict=True
    ):
        crossing = cost.cross(nodes) if nodes else None
        if crossing is not None:
            ends.append((busy, crossing))
            busy = []
            continue
        busy.extend(work)
        if moved < 0:
            continue
        converts = [s for s in program.instructions[first:end] if isinstance(s, Convert)]
        key = moved, *(s.implementation for s in converts)
        if key not in moves:
            moves[key] = convert_seconds(converts, cost)
        if not converts[0].local:
            ends.append((busy, moves[key]))
            busy = []
            continue
        if key not in local:
            local[key] = len(table)
            table.append(np.full_like(nothing[0], moves[key]))
        busy.append(local[key])
    ends.append((busy + [updates + k for k in structure.updated], 0.0))
    rows = np.array(table) if table else nothing
    return [
        Superstep(
            compute_s=np.add.reduce(rows[work], axis=0) if work else nothing[0], communicate_s=s
        )
        for work, s in ends
    ]


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
    compute, slowest_s, communicate = np.zeros(world), 0.0, 0.0
    for stage in supersteps(graph, program, cost):
        compute = compute + stage.compute_s
        slowest_s += float(stage.compute_s.max())
        communicate += stage.communicate_s
    return timeline(slowest_s + communicate, compute, communicate, *memory(graph, program, cost))
