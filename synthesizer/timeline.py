"""A discrete-event simulation of one training step: two streams per rank, compute and communication.

The instructions are given to the streams in program order, which is the order in which every
rank issues them:

* an operator starts when its rank's compute stream is free and its inputs are there. What
  runs no kernel on a rank (a view, an empty shard) takes none of the stream's time and waits
  for nothing;
* a collective (neighbours that are fused run as one) starts when all ranks have its inputs
  and their communication streams are free, and ends on all ranks at once;
* the optimizer's step is last: it starts on a rank when all that leaves the graph is there.

Without ``overlap``, as the runtime executes a program, the compute stream waits for each
collective, and the step is the sum of :func:`hap.synthesizer.simulate.stages`. With it, the
compute stream goes on until it needs the result. Starts are maxima and ends are sums of what
came before, so overlapping can delay nothing. Streams do not slow each other down: no
contention for memory or for links is modelled.

Times are vectors over ranks, so that the number of ranks hardly counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hap.graph import Graph, Input
from hap.program import Convert, Instruction, Program, Value
from hap.synthesizer.cost import CostModel, PerRank
from hap.synthesizer.script import computed
from hap.synthesizer.simulate import convert_seconds

COMPUTE, COMMUNICATION = "compute", "communication"
"""The streams of a rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One operator, fused collective, or update of a parameter, on all ranks.

    ``ready_s`` is when a rank's inputs were there and its stream free; a collective starts
    with the last rank. On ranks where nothing runs, the span is empty.
    """

    stream: str
    at: int
    """Index of the (first) instruction; for an update, the number of instructions."""
    what: tuple[Instruction, ...] | Input
    ready_s: PerRank
    start_s: PerRank
    end_s: PerRank

    @property
    def part(self) -> str:
        """``forward``, ``backward`` or ``update``."""
        if isinstance(self.what, Input):
            return "update"
        return "backward" if self.what[0].backward else "forward"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A step on the streams of all ranks.

    ``begin_s`` and ``done_s`` have one vector per instruction, those without a kernel
    included: when a rank's compute stream came to it, and when its results were there.
    """

    overlap: bool
    step_s: float
    spans: tuple[Span, ...]
    begin_s: tuple[PerRank, ...]
    done_s: tuple[PerRank, ...]
    backward_done_s: PerRank
    """When a rank has all that leaves the graph, and its optimizer starts."""

    @property
    def world_size(self) -> int:
        return len(self.backward_done_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """How each rank spends the step.

    ``compute_s + waiting_s + communicate_s - overlapped_s + idle_s`` is the step. Waiting is
    time with nothing to run, inside a collective that other ranks have not come to; idle is
    all other time with nothing to run, such as after a rank's last update.
    """

    compute_s: PerRank
    waiting_s: PerRank
    communicate_s: PerRank
    overlapped_s: PerRank
    idle_s: PerRank


class _Streams:
    """When each rank's streams are free; advances as work is given to them."""

    def __init__(self, world: int, overlap: bool) -> None:
        self.overlap = overlap
        self.compute_s: PerRank = np.zeros(world)
        self.communication_s = 0.0

    def run(self, ready_s: PerRank, seconds: PerRank) -> tuple[PerRank, PerRank, PerRank]:
        """(start, end, results there) of an operator whose inputs are there at ``ready_s``."""
        busy = seconds > 0
        if busy.all():
            start = np.maximum(self.compute_s, ready_s)
            self.compute_s = end = start + seconds
            return start, end, end
        start = np.where(busy, np.maximum(self.compute_s, ready_s), self.compute_s)
        self.compute_s = end = start + seconds
        return start, end, np.where(busy, end, ready_s)

    def collect(self, ready_s: PerRank, seconds: float) -> tuple[PerRank, float, float]:
        """(ready per rank, start, end) of a collective whose inputs are there at ``ready_s``."""
        if not self.overlap:  # a rank comes to it when it has done all that stands before
            ready_s = self.compute_s
        ready_s = np.maximum(ready_s, self.communication_s)
        start = float(ready_s.max())
        self.communication_s = end = start + seconds
        if not self.overlap:
            self.compute_s = np.full_like(self.compute_s, end)
        return ready_s, start, end


def schedule(graph: Graph, program: Program, cost: CostModel, *, overlap: bool = False) -> Schedule:
    """Run a program on the streams of the cost model's cluster, under its shares."""
    world = cost.machine.cluster.world_size
    streams, none = _Streams(world, overlap), np.zeros(world)
    there: dict[Value, PerRank] = {Value(t, p): none for t, p in program.inputs.items()}
    spans: list[Span] = []
    begin: list[PerRank] = []
    done: list[PerRank] = []
    for group in program.groups(graph):
        ins, outs = ends(graph, group)
        ready = none
        for value in ins:
            ready = np.maximum(ready, there[value])
        seconds, collective = _price(graph, group, cost)
        if collective:
            issued = streams.compute_s
            ready, first, last = streams.collect(ready, float(seconds.max()))
            start, made = np.full(world, first), np.full(world, last)
            spans.append(Span(COMMUNICATION, len(begin), group, ready, start, made))
            begin += [np.minimum(issued, start)] * len(group)
            done += [made] * len(group)
        else:
            start, end, made = streams.run(ready, seconds)
            if seconds.any():
                spans.append(Span(COMPUTE, len(begin), group, start, start, end))
            begin.append(start)
            done.append(end)
        for value in outs:
            there[value] = made
    finished = streams.compute_s
    for output, p in zip(graph.outputs, program.outputs, strict=True):
        finished = np.maximum(finished, there[Value(output.tensor, p)])
    streams.compute_s = finished
    for i in graph.role("parameter"):
        if i.target in graph.gradients:
            seconds = cost.update(graph.tensors[i.tensor], program.inputs[i.tensor])
            start, end, _ = streams.run(finished, seconds)
            spans.append(Span(COMPUTE, len(begin), i, start, start, end))
    return Schedule(
        overlap=overlap, step_s=max(float(streams.compute_s.max()), streams.communication_s),
        spans=tuple(spans), begin_s=tuple(begin), done_s=tuple(done), backward_done_s=finished,
    )  # fmt: skip


def ends(graph: Graph, group: Sequence[Instruction]) -> tuple[list[Value], list[Value]]:
    """The values that an instruction, or a fused group of them, reads and makes."""
    ins: list[Value] = []
    outs: list[Value] = []
    for step in group:
        if isinstance(step, Convert):
            ins.append(Value(step.tensor, step.src))
            outs.append(Value(step.tensor, step.dst))
            continue
        node = graph.by_name[step.node]
        ins += [Value(n, p) for n, p in zip(node.inputs, step.ins, strict=True)]
        outs += [Value(o, p) for o, p in zip(node.outputs, step.outs, strict=True) if o and p]
    return ins, outs


def _price(graph: Graph, group: Sequence[Instruction], cost: CostModel) -> tuple[PerRank, bool]:
    """(seconds per rank, does it run on all ranks at once)."""
    world = cost.machine.cluster.world_size
    nodes = computed(graph, group)
    if not nodes:
        converts = [s for s in group if isinstance(s, Convert)]
        return np.full(world, convert_seconds(converts, cost)), not converts[0].local
    crossing_s = cost.cross(nodes)
    if crossing_s is not None:
        return np.full(world, crossing_s), True
    ((node, row),) = nodes
    return cost.compute(node, row), False


def usage(run: Schedule) -> Usage:
    """How each rank spends the step."""
    collectives = [s for s in run.spans if s.stream == COMMUNICATION]
    ready, start, end = (
        np.array([getattr(s, at) for s in collectives]).reshape(-1, run.world_size)
        for at in ("ready_s", "start_s", "end_s")
    )
    compute, waiting, overlapped = (np.zeros(run.world_size) for _ in range(3))
    for rank in range(run.world_size):
        edges, computed = _computed(run, rank)
        compute[rank] = computed[-1]
        before, first, last = (np.interp(t[:, rank], edges, computed) for t in (ready, start, end))
        waiting[rank] = (start - ready)[:, rank].sum() - (first - before).sum()
        overlapped[rank] = (last - first).sum()
    communicate = (end - start).sum(axis=0)
    waiting = np.maximum(waiting, 0.0)  # rounding
    idle = np.maximum(run.step_s - (compute + waiting + communicate - overlapped), 0.0)
    return Usage(
        compute_s=compute, waiting_s=waiting, communicate_s=communicate,
        overlapped_s=overlapped, idle_s=idle,
    )  # fmt: skip


def _computed(run: Schedule, rank: int) -> tuple[list[float], list[float]]:
    """(times, seconds that a rank has computed until then); linear in between."""
    times, total = [0.0], [0.0]
    for s in run.spans:
        first, last = float(s.start_s[rank]), float(s.end_s[rank])
        if s.stream == COMPUTE and last > first:
            times += [first, last]
            total += [total[-1], total[-1] + last - first]
    return times, total
