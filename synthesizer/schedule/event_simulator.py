"""Discrete-event simulation of a training step, with two streams per rank.

All ranks issue the instructions in program order, as :mod:`hap.runtime.lanes` runs them:

* an operator starts when its rank's compute stream is free and its inputs exist;
* a collective is issued when the compute stream reaches it. It starts when all ranks have issued
  it, its inputs exist and the communication streams are free, and ends on all ranks at once;
* the forward and the backward end when all their collectives have ended; the update is last;
* neither starts before the rank's host has issued it, one after the other;
* each rank's end is at least its computing plus its loss to all communication.

Without ``overlap`` the compute stream waits for each collective, and the step is the sum of
:func:`hap.synthesizer.cost.serial_cost.supersteps`. Times are vectors over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.ir.graph import Graph, Input
from hap.ir.pipeline_order import StageWork
from hap.ir.program import Convert, Instruction, Program, Value, reads, writes
from hap.synthesizer.cost.contention import Job, Streams
from hap.synthesizer.cost.cost_structure import nodes_and_rows
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.cost.serial_cost import Floats, convert_seconds

_ROUNDING = 1e-12
"""Fraction of a step below which seconds are rounding errors."""

COMPUTE, COMMUNICATION = "compute", "communication"
"""The streams of a rank."""

RETURNS = "communication to the stage before"
"""A third stream of ranks with pipeline stages: each direction of a boundary has its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One operator, fused collective, update of a parameter, or turn of a stage, on all ranks.

    ``ready_s``: the time at which a rank's inputs exist and its stream is free; a collective starts
    with the last rank. On ranks where nothing runs, the span is empty.
    """

    stream: str
    at: int
    """Index of the (first) instruction; for an update, the number of instructions."""
    what: tuple[Instruction, ...] | Input | StageWork
    ready_s: PerRank
    start_s: PerRank
    end_s: PerRank

    @property
    def part(self) -> str:
        """``forward``, ``backward`` or ``update``."""
        if isinstance(self.what, Input):
            return "update"
        if isinstance(self.what, StageWork):
            return self.what.part
        return "backward" if self.what[0].backward else "forward"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A step on the streams of all ranks.

    ``begin_s`` and ``done_s`` have one vector per instruction: the times at which a rank's compute
    stream reached it, and at which its results existed.
    """

    overlap: bool
    step_s: float
    spans: tuple[Span, ...]
    begin_s: tuple[PerRank, ...]
    done_s: tuple[PerRank, ...]
    backward_done_s: PerRank
    """The time at which a rank has all outputs of the graph, and its optimizer starts."""

    @property
    def world_size(self) -> int:
        return len(self.backward_done_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Each rank's seconds of a step, by use.

    ``compute_s + waiting_s + communicate_s - overlapped_s + idle_s`` is the step. Waiting is time
    inside a collective before the last rank has come; idle is all other time without work.
    """

    compute_s: PerRank
    waiting_s: PerRank
    communicate_s: PerRank
    overlapped_s: PerRank
    idle_s: PerRank


def schedule(graph: Graph, program: Program, cost: Prices, *, overlap: bool = True) -> Schedule:
    """Simulate a program on the streams of the cost model's cluster, under its shares."""
    streams = Streams(cost.hardware, overlap=overlap)
    numbers: dict[Value, int] = {}  # value -> the collective that makes it
    spans: list[Span | tuple[int, tuple[Instruction, ...], int]] = []  # or a collective
    begin: list[PerRank] = []
    done: list[PerRank | int] = []
    backward = False
    for group in program.groups(graph):
        outs = writes(graph, group)
        seconds, messages = group_seconds(graph, group, cost)
        if group[0].backward and not backward:
            backward = True
            streams.drain()
        if messages:  # results of collectives exist when the collectives have ended
            number = streams.issue(float(seconds.max()), messages)
            numbers.update(dict.fromkeys(outs, number))
            spans.append((len(begin), group, number))
            begin += [streams.jobs[number].issued_s] * len(group)
            done += [number] * len(group)
            continue
        ins = reads(graph, group)
        streams.wait(max((numbers[v] for v in ins if v in numbers), default=-1))
        start, made = streams.compute(seconds)
        if seconds.any():
            spans.append(Span(COMPUTE, len(begin), group, start, start, made))
        begin.append(start)
        done.append(made)
    streams.drain()
    finished = streams.clock_s
    for i in graph.role("parameter"):
        if i.target in graph.gradients:
            start, end = streams.compute(
                cost.update(graph.tensors[i.tensor], program.inputs[i.tensor])
            )
            spans.append(Span(COMPUTE, len(begin), i, start, start, end))
    jobs = streams.jobs

    def ended(number: int) -> PerRank:
        return np.full_like(finished, jobs[number].end_s)

    return Schedule(
        overlap=overlap, step_s=max(streams.now_s, float(streams.least_s.max())),
        spans=tuple(s if isinstance(s, Span) else _collective(*s, jobs[s[-1]]) for s in spans),
        begin_s=tuple(begin), done_s=tuple(ended(d) if isinstance(d, int) else d for d in done),
        backward_done_s=finished,
    )  # fmt: skip


def _collective(at: int, group: tuple[Instruction, ...], number: int, job: Job) -> Span:
    ready = np.maximum(job.issued_s, job.free_s)
    start, end = (np.full_like(ready, s) for s in (job.start_s, job.end_s))
    return Span(COMMUNICATION, at, group, ready, start, end)


def group_seconds(graph: Graph, group: Sequence[Instruction], cost: Prices) -> tuple[PerRank, int]:
    """Return (seconds per rank, messages) of instructions that run as one; 0 if they compute."""
    world = cost.hardware.cluster.world_size
    nodes = nodes_and_rows(graph, group)
    if not nodes:
        converts = [s for s in group if isinstance(s, Convert)]
        messages = 0 if converts[0].local else cost.messages(converts[0].kind)
        return np.full(world, convert_seconds(converts, cost)), messages
    if crossing := cost.cross(nodes):
        return np.full(world, crossing[0]), crossing[1]
    ((node, row),) = nodes
    return cost.compute(node, row), 0


def usage(run: Schedule) -> Usage:
    """Return each rank's seconds of the step, by use."""
    works = [s for s in run.spans if s.stream == COMPUTE]
    collectives = [s for s in run.spans if s.stream != COMPUTE]
    begun, done = _times(works, run, "start_s"), _times(works, run, "end_s")
    ready, start, end = (_times(collectives, run, at) for at in ("ready_s", "start_s", "end_s"))
    compute, waiting, overlapped = (np.zeros(run.world_size) for _ in range(3))
    for rank in range(run.world_size):
        runs = done[:, rank] > begun[:, rank]
        edges = np.append(0.0, np.stack([begun[runs, rank], done[runs, rank]], axis=1))
        computed = np.append(0.0, np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2)))
        compute[rank] = computed[-1]
        before, first, last = (np.interp(t[:, rank], edges, computed) for t in (ready, start, end))
        waiting[rank] = (start - ready)[:, rank].sum() - (first - before).sum()
        overlapped[rank] = (last - first).sum()
    waiting, overlapped = (
        np.where(t > _ROUNDING * run.step_s, t, 0.0) for t in (waiting, overlapped)
    )
    communicate = (end - start).sum(axis=0)
    idle = run.step_s - (compute + waiting + communicate - overlapped)
    return Usage(
        compute_s=compute, waiting_s=waiting, communicate_s=communicate, overlapped_s=overlapped,
        idle_s=np.where(idle > _ROUNDING * run.step_s, idle, 0.0),
    )  # fmt: skip


def _times(spans: Sequence[Span], run: Schedule, at: str) -> Floats:
    """Return a time of each span (rows) on each rank."""
    return np.array([getattr(s, at) for s in spans]).reshape(-1, run.world_size)
