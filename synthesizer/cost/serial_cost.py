"""Serial cost: step time and peak memory of a program without overlap.

Each rank has one stream, which waits at every collective for the last rank.
:mod:`hap.synthesizer.schedule.list_scheduler` starts from this timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hap.ir.graph import Graph
from hap.ir.program import Convert, Program
from hap.synthesizer.cost.cost_structure import structure_of, unimplemented_structure_of
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.peak_memory import memory
from hap.synthesizer.cost.prices import Prices

Floats = npt.NDArray[np.float64]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Superstep:
    """The computing between two collectives: seconds per rank, then the collective's."""

    compute_s: PerRank
    communicate_s: float


def supersteps(graph: Graph, program: Program, cost: Prices) -> list[Superstep]:
    """Return the supersteps of a step in order; the optimizer's step is the last one."""
    computing, communicating = _seconds(graph, program, cost)
    return [
        Superstep(compute_s=compute_s, communicate_s=communicate_s)
        for compute_s, communicate_s in zip(computing, communicating, strict=True)
    ]


def _seconds(graph: Graph, program: Program, cost: Prices) -> tuple[Floats, list[float]]:
    """Return computing of each superstep and rank, and communication of each superstep."""
    structure = structure_of(graph, program, cost)
    crossings = {
        at: found[0]
        for at, nodes in enumerate(structure.nodes) if nodes and (found := cost.cross(nodes))
    }  # fmt: skip
    laid = structure.superstep_rows(graph, program, cost, tuple(crossings))
    table = [np.zeros(cost.hardware.cluster.world_size)]
    table += [cost.compute(node, row) for node, row in laid.work.computing.first]
    table += [
        cost.update(graph.tensors[name], program.inputs[name]) for name in laid.work.updating.first
    ]
    moves: dict[object, float] = {}

    def convert_s(at: int) -> float:
        group = program.instructions[slice(*structure.bounds[at])]
        named = next(s.implementation for s in group if isinstance(s, Convert))
        key = structure.moved[at], named
        if key not in moves:
            moves[key] = convert_seconds([s for s in group if isinstance(s, Convert)], cost)
        return moves[key]

    table += [np.full_like(table[0], convert_s(at)) for at in laid.local]
    computing = np.add.reduceat(np.array(table)[laid.rows], laid.starts, axis=0)
    seconds = [crossings[at] if at in crossings else convert_s(at) for at in laid.collectives]
    return computing, [*seconds, 0.0]


def convert_seconds(group: Sequence[Convert], cost: Prices) -> float:
    """Return the predicted time of neighbouring conversions by the named implementation."""
    times = {c.implementation: c.seconds for c in cost.convert_group(group)}
    named = group[0].implementation
    if named not in times:
        raise ValueError(f"{group[0].kind} has no implementation {named!r}, but {sorted(times)}")
    return times[named]


def simulate(graph: Graph, program: Program, cost: Prices) -> Timeline:
    """Simulate a program without overlap."""
    computing, communicating = _seconds(graph, program, cost)
    slowest_s, communicate = float(computing.max(axis=1).sum()), sum(communicating)
    stored, peak = memory(graph, program, cost)
    return Timeline(
        program=program, step_s=slowest_s + communicate, compute_s=computing.sum(axis=0),
        communicate_s=communicate, stored_bytes=stored, peak_bytes=peak,
    )  # fmt: skip


def choose_implementations(graph: Graph, program: Program, cost: Prices) -> Program:
    """Return the program with the fastest implementation of each collective."""
    # Earlier implementations must not decide which instructions are fused.
    structure = unimplemented_structure_of(graph, program, cost)
    steps = list(program.instructions)
    fastest: dict[int, str] = {}
    for (first, end), moved in zip(structure.bounds, structure.moved, strict=True):
        if moved < 0:
            continue
        converts = [s for s in steps[first:end] if isinstance(s, Convert)]
        if moved not in fastest:
            fastest[moved] = cost.convert_group(converts)[0].implementation
        steps[first:end] = [replace(s, implementation=fastest[moved]) for s in converts]
    instructions = tuple(steps)
    if instructions == program.instructions:
        return program
    chosen = replace(program, instructions=instructions)
    chosen.memo.update(program.memo, structure=program.memo["unimplemented structure"])
    return chosen
