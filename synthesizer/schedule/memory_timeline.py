"""Bytes in use on each rank over the time of a simulated step.

A storage exists from the start of the instruction that allocates it to the end of the last that reads
it or a view of it. Without overlap the maximum is that of :mod:`hap.synthesizer.cost.peak_memory`; with
overlap it may be larger, since inputs of a collective stay until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hap.ir.graph import Graph
from hap.ir.program import Program
from hap.synthesizer.cost.cost_structure import nodes_and_rows
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.liveness import Storage, storages
from hap.synthesizer.cost.peak_memory import communication_buffers, update_bytes, workspace
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.schedule.event_simulator import Schedule

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Live bytes of one rank: ``bytes[k]`` from ``times_s[k]`` until ``times_s[k + 1]``.

    ``at[k]`` is the index of the instruction that allocated or freed them, -1 before the first.
    """

    times_s: Floats
    bytes: Floats
    at: npt.NDArray[np.int64]

    @property
    def peak(self) -> int:
        """Index of the largest value; the first of equal ones."""
        return int(self.bytes.argmax())


def memory_over_time(
    graph: Graph, program: Program, cost: Prices, run: Schedule
) -> tuple[Curve, ...]:
    """Return one curve per rank; it begins with the inputs, parameters and optimizer states."""
    changes = list(_changes(graph, program, cost, run))
    world = cost.hardware.cluster.world_size
    at = np.array([-1, *(index for index, _, _ in changes)])
    times = np.stack([np.zeros(world), *(time for _, time, _ in changes)])
    sizes = np.stack([_held_bytes(graph, program, cost), *(nbytes for _, _, nbytes in changes)])
    curves = []
    for rank in range(world):
        order = np.argsort(times[:, rank], kind="stable")  # equal times in program order
        order = order[(sizes[order, rank] != 0) | (order == 0)]
        curves.append(
            Curve(times_s=times[order, rank], bytes=np.cumsum(sizes[order, rank]), at=at[order])
        )
    return tuple(curves)


def _held_bytes(graph: Graph, program: Program, cost: Prices) -> PerRank:
    """Return the bytes of the inputs and optimizer states, which live for the whole step."""
    held = np.zeros(cost.hardware.cluster.world_size)
    for i in graph.inputs:
        trained = i.role == "parameter" and i.target in graph.gradients
        copies = 1 + (cost.optimizer_states if trained else 0)
        held = held + copies * cost.local_bytes(graph.tensors[i.tensor], program.inputs[i.tensor])
    return held


def _changes(
    graph: Graph, program: Program, cost: Prices, run: Schedule
) -> Iterator[tuple[int, PerRank, PerRank]]:
    """Return (instruction, time, change of bytes) per rank, in program order.

    A fused collective holds its inputs, outputs and buffers until it has ended.
    """
    born: dict[int, list[Storage]] = {}
    dying: dict[int, list[Storage]] = {}
    for storage in storages(graph, program):
        born.setdefault(storage.born, []).append(storage)
        if not storage.kept:
            dying.setdefault(storage.last, []).append(storage)

    def size(storage: Storage) -> PerRank:
        value = storage.value
        return cost.local_bytes(graph.tensors[value.tensor], value.placement)

    def freed_s(storage: Storage) -> PerRank:
        freed: PerRank = np.maximum.reduce(
            [run.done_s[at] for at in (storage.born, *storage.reads)]
        )
        return freed

    first = 0
    for group in program.groups(graph):
        members = range(first, first + len(group))
        for at in members:
            yield from ((at, run.begin_s[at], size(s)) for s in born.get(at, ()))
        beside = communication_buffers(group, cost) + sum(
            workspace(node, row, cost) for node, row in nodes_and_rows(graph, group)
        )
        if beside.any():
            yield first, run.begin_s[first], beside
            yield first, run.done_s[first], -beside
        for at in members:
            yield from ((at, freed_s(s), -size(s)) for s in dying.get(at, ()))
        first += len(group)
    if (update := update_bytes(graph, program, cost)).any():
        end_s: PerRank = np.max(run.done_s, axis=0)
        yield first - 1, end_s, update
        yield first - 1, end_s, -update
