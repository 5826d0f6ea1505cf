"""Serial cost: step time and peak memory of a program without overlap.

Each rank has one stream, which waits at every collective for the last rank.
:mod:`hap.synthesizer.schedule.list_scheduler` starts from this timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.ir.graph import Graph
from hap.ir.program import Convert, Program
from hap.synthesizer.cost.cost_structure import structure_of
from hap.synthesizer.cost.machine import PerRank
from hap.synthesizer.cost.peak_memory import memory
from hap.synthesizer.cost.prices import Prices

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A program and the prediction of its training step; vectors have one entry per rank.

    Attributes:
        program: the instructions in the order in which they run.
        step_s: seconds until the slowest rank has ended its optimizer step.
        compute_s: seconds that each rank computes.
        communicate_s: seconds of all collectives, overlapped or not.
        stored_bytes: parameters and optimizer states.
        peak_bytes: the most bytes in use at once.
        until: per group of the program, the last group that begins before it has ended, on the
            last rank; ``None`` without overlap.
    """

    program: Program
    step_s: float
    compute_s: PerRank
    communicate_s: float
    stored_bytes: PerRank
    peak_bytes: PerRank
    until: tuple[int, ...] | None = None

    @property
    def hidden_s(self) -> float:
        """Seconds of communication during which the busiest rank computes."""
        return max(0.0, float(self.compute_s.max()) + self.communicate_s - self.step_s)

    @property
    def wait_s(self) -> PerRank:
        """Per rank: ``step_s`` is ``compute_s + wait_s + communicate_s - hidden_s``."""
        waiting: PerRank = self.step_s - self.compute_s - self.communicate_s + self.hidden_s
        waiting[waiting < _ROUNDING * self.step_s] = 0.0
        return waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Superstep:
    """The computing between two collectives: seconds per rank, then the collective's."""

    compute_s: PerRank
    communicate_s: float


def supersteps(graph: Graph, program: Program, cost: Prices) -> list[Superstep]:
    """Return the supersteps of a step in order; the optimizer's step is the last one."""
    structure = structure_of(graph, program, cost)
    nothing = np.zeros((1, cost.machine.cluster.world_size))
    # Rows of this table: kinds of nodes, then updates, then local conversions.
    work = structure.work(graph, program, cost)
    table = [cost.compute(node, row) for node, row in work.computing.first]
    updates = len(table)
    for name in work.updating.first:
        table.append(cost.update(graph.tensors[name], program.inputs[name]))
    moves: dict[object, float] = {}
    local: dict[object, int] = {}
    ends: list[tuple[list[int], float]] = []  # per stage: its work, the seconds of its collective
    busy: list[int] = []
    for (first, end), nodes, classes, moved in zip(
        structure.bounds, structure.nodes, work.of_group, structure.moved, strict=True
    ):
        crossing = cost.cross(nodes) if nodes else None
        if crossing is not None:
            ends.append((busy, crossing[0]))
            busy = []
            continue
        busy.extend(classes)
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
    ends.append((busy + [updates + k for k in work.updated], 0.0))
    rows = np.array(table) if table else nothing
    return [
        Superstep(
            compute_s=np.add.reduce(rows[which], axis=0) if which else nothing[0], communicate_s=s
        )
        for which, s in ends
    ]


def convert_seconds(group: Sequence[Convert], cost: Prices) -> float:
    """Return the predicted time of neighbouring conversions by the named implementation."""
    times = {c.implementation: c.seconds for c in cost.convert_group(group)}
    named = group[0].implementation
    if named not in times:
        raise ValueError(f"{group[0].kind} has no implementation {named!r}, but {sorted(times)}")
    return times[named]


def simulate(graph: Graph, program: Program, cost: Prices) -> Timeline:
    """Simulate a program without overlap."""
    compute, slowest_s, communicate = np.zeros(cost.machine.cluster.world_size), 0.0, 0.0
    for stage in supersteps(graph, program, cost):
        compute = compute + stage.compute_s
        slowest_s += float(stage.compute_s.max())
        communicate += stage.communicate_s
    stored, peak = memory(graph, program, cost)
    return Timeline(
        program=program, step_s=slowest_s + communicate, compute_s=compute,
        communicate_s=communicate, stored_bytes=stored, peak_bytes=peak,
    )  # fmt: skip
