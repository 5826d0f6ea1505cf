"""Linear approximations of costs near given shares.

The time of an operator is convex in its part where a device takes part: tangents are lower bounds.
The peak of memory is the maximum of linear functions, one per moment of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hap.cluster.link import IMPLEMENTATIONS
from hap.ir.placement import Placement
from hap.ir.program import Convert, Instruction, Program
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.parts import AxisParts
from hap.synthesizer.cost.peak_memory import Buffers, communication_buffers, memory
from hap.synthesizer.cost.serial_cost import supersteps
from hap.synthesizer.shares.share_task import Split, Task

Floats = npt.NDArray[np.float64]

_STEP = 1e-6
"""The difference of parts over which slopes are taken."""


class _FreeNetwork:
    """Collectives that cost nothing."""

    def choices(
        self, kind: str, nbytes: int, src: PerRank, dst: PerRank, *, start: bool = True
    ) -> list[Quote]:
        return [Quote(how, 0.0) for how in IMPLEMENTATIONS[kind]]


def _probe(
    task: Task, hardware: HardwareModel, parts: Floats, ring_size: int | None = None
) -> CostModel:
    """A cost model of given parts, dims group, rank; communication is free.

    Its ranks are separate questions; with ``ring_size`` each ring of so many ranks is one.
    """
    vectors = list(parts)  # the cost model tells parts apart by identity
    of_axis = {axis: vectors[g] for axis, g in task.group_of.items()}
    probed = AxisParts(task.axes, parts.shape[1], of_axis, ring_size=ring_size)
    graph, states = task.graph, task.optimizer_states
    return CostModel(graph, task.axes, hardware, probed, states, _FreeNetwork())


@dataclass(frozen=True, slots=True)
class Tangents:
    """Coefficients of the rows, per unit part; dims (stage,) split, type, coefficient.

    Of a stage: the constant, a start-up per group and a slope per group. Of memory: the constant, a
    slope per group in the type's part, and one in the largest part of all ranks (padding).
    """

    seconds: Floats
    bytes: Floats

    def joined(self, other: Tangents) -> Tangents:
        return Tangents(
            np.concatenate([self.seconds, other.seconds], axis=1),
            np.concatenate([self.bytes, other.bytes], axis=0),
        )


def tangents_of(task: Task, splits: Sequence[Split]) -> Tangents:
    """Tangents of stage times and peak memory at the most loaded device of each type.

    One run of the cost model evaluates, for each split and type, the device with its parts, with a
    little more of each group, with nothing of each group, and beside ranks with more of each group.
    """
    groups, types = len(task.groups), len(task.types)
    loads = [
        [[max(u[r] for r in ranks) for u in split] for ranks in task.types] for split in splits
    ]
    at = np.maximum(np.array(loads, dtype=np.float64), 1.0) / np.array(task.units)
    asked = np.repeat(at[..., None], 1 + 3 * groups, axis=-1)  # split, type, group, question
    for g in range(groups):
        asked[:, :, g, 1 + g] += _STEP
        asked[:, :, g, 1 + groups + g] = 0.0
    parts = asked.transpose(2, 0, 1, 3)
    cluster = task.hardware.cluster
    clones = tuple(
        replace(cluster.devices[task.types[k][0]], name=f"{split} {k} {question}")
        for split, k, question in np.ndindex(*parts.shape[1:])
    )
    probe = _probe(task, HardwareModel(replace(cluster, devices=clones)), parts.reshape(groups, -1))
    shape = (len(splits), types, 1 + 3 * groups)
    buffers = _padded_buffers(task, splits)
    peak = memory(task.graph, task.program, probe, buffers)[1].reshape(shape)
    times = [stage.compute_s for stage in supersteps(task.graph, task.program, probe)]
    seconds = np.array(times).reshape(-1, *shape)
    largest = np.array([[max(u) for u in split] for split in splits]) / np.array(task.units)
    return Tangents(_time_rows(seconds, at), _memory_rows(peak, at, largest[:, None]))


def _padded_buffers(task: Task, splits: Sequence[Split]) -> Buffers:
    """Per collective and question, the largest buffer of any rank of the split."""
    groups, world = len(task.groups), task.hardware.cluster.world_size
    parts = np.array([[np.array(u) / sum(u) for u in split] for split in splits])
    asked = np.repeat(parts[:, None], 1 + groups, axis=1)  # split, question, group, rank
    for g in range(groups):
        asked[:, 1 + g, g] += _STEP
    vectors = asked.transpose(2, 0, 1, 3).reshape(groups, -1)
    probe = _probe(task, task.hardware, vectors, ring_size=world)

    def buffers(group: Sequence[Instruction]) -> PerRank:
        most = communication_buffers(group, probe).reshape(len(splits), -1, world).max(-1)
        alike = np.repeat(most[:, :1], 1 + 2 * groups, axis=1)
        of_split = np.concatenate([alike, most[:, 1:]], axis=1)  # split, question
        return np.repeat(of_split[:, None], len(task.types), axis=1).reshape(-1)

    return buffers


def _time_rows(answers: Floats, at: Floats) -> Floats:
    """Coefficients from the values of :func:`tangents_of`; ``answers`` ends with the questions."""
    groups = at.shape[-1]
    here = answers[..., :1]
    slope = (answers[..., 1 : 1 + groups] - here) / _STEP
    own = here - answers[..., 1 + groups : 1 + 2 * groups]  # what each group adds to the time
    constant = here - own.sum(-1, keepdims=True)
    return np.concatenate([constant, own - slope * at, slope], axis=-1)


def _memory_rows(answers: Floats, at: Floats, largest: Floats) -> Floats:
    """Likewise of memory; ``largest`` is the largest part of any rank."""
    groups = at.shape[-1]
    here = answers[..., :1]
    slope = (answers[..., 1 : 1 + groups] - here) / _STEP
    padded = (answers[..., 1 + 2 * groups :] - here) / _STEP
    constant = here - (slope * at + padded * largest).sum(-1, keepdims=True)
    return np.concatenate([constant, slope, padded], axis=-1)


def padded_slopes(task: Task) -> Floats:
    """Per group, the seconds of its padded collectives per unit part of the largest share."""
    slopes = np.zeros(len(task.groups))
    whole = np.ones(task.hardware.cluster.world_size)
    for c in task.program.collectives:
        if c.implementation == "padded":
            nbytes = task.graph.tensors[c.tensor].nbytes
            side = c.dst if c.kind == "reduce_scatter" else c.src
            most, least = (
                _seconds(task, c.kind, "padded", nbytes, p, p) for p in (whole, 0 * whole)
            )
            slopes[task.group(c.tensor, side)] += most - least
    return slopes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Seconds of :func:`exchanges` near a split; totals are units, by group and type."""

    value: float
    slopes: Floats
    totals: Floats

    def at(self, totals: Floats) -> float:
        return self.value + float((self.slopes * (totals - self.totals)).sum())


def exchanges(program: Program) -> list[Convert]:
    """All-to-alls and hierarchical gathers: they depend on all the shares, not the largest."""
    return [
        c for c in program.collectives
        if c.kind == "all_to_all" or (c.implementation == "hierarchical" and c.kind != "all_reduce")
    ]  # fmt: skip


def exchange_plane(task: Task, split: Split) -> Plane:
    """The plane of the exchanges through a split, its slopes those of one unit more per type."""

    def side(c: Convert, p: Placement) -> int:
        return task.group(c.tensor, p) if p.sharded else -1

    steps = Counter(
        (c.kind, c.implementation, task.graph.tensors[c.tensor].nbytes, side(c, c.src),
         side(c, c.dst))
        for c in exchanges(task.program)
    )  # fmt: skip
    sides = [np.array(vector) / sum(vector) for vector in split]
    sides.append(np.ones(task.hardware.cluster.world_size))  # of -1: not sharded

    def seconds(step: tuple[str, str, int, int, int], sides: Sequence[PerRank]) -> float:
        kind, how, nbytes, src, dst = step
        return _seconds(task, kind, how, nbytes, sides[src], sides[dst])

    here = {step: seconds(step, sides) for step in steps}
    slopes = np.zeros((len(split), len(task.types)))
    for g, k in np.ndindex(*slopes.shape if steps else (0, 0)):
        more, ranks = sides[g].copy(), list(task.types[k])
        more[ranks] += 1 / (task.units[g] * len(ranks))
        changed = [*sides[:g], more, *sides[g + 1 :]]
        slopes[g, k] = sum(
            times * (seconds(step, changed) - here[step])
            for step, times in steps.items() if g in step[3:]
        )  # fmt: skip
    value = sum(times * here[step] for step, times in steps.items())
    totals = [[sum(vector[r] for r in ranks) for ranks in task.types] for vector in split]
    return Plane(value=value, slopes=slopes, totals=np.array(totals, dtype=np.float64))


def _seconds(
    task: Task, kind: str, implementation: str, nbytes: int, src: PerRank, dst: PerRank
) -> float:
    choices = task.hardware.network.choices(kind, nbytes, src, dst)
    return next(c.seconds for c in choices if c.implementation == implementation)
