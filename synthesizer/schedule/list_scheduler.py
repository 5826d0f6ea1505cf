"""List scheduling: the order of instructions, and the buckets, that overlap communication.

The search puts each collective right before its first reader, gathers parameters together at the
start and reduces gradients together at the end. This module chooses the order in which all
ranks run the instructions:

* gathers of parameters and reductions of gradients are cut into *buckets* of about equal bytes, in
  the order of their need (Li et al., "PyTorch Distributed", VLDB 2020);
* list scheduling (Graham, 1966) by predicted times: while a collective runs, operators that do not
  need it go first, such as weights' gradients while activations' are reduced;
* collectives for which computing waits at once precede those that are needed later.

The predicted step decides the number of buckets, and whether collectives that are needed later wait
while the link is busy. The plan holds all decisions, so that all ranks run alike.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hap.ir.graph import Graph
from hap.ir.program import Compute, Convert, Instruction, Program
from hap.synthesizer.cost.contention import Streams
from hap.synthesizer.cost.cost_structure import structure_of
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.peak_memory import memory
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.cost.serial_cost import Timeline
from hap.synthesizer.schedule.event_simulator import group_seconds

BUCKETS = (1, 3, 8, 24)
"""Numbers of buckets to try for collectives that may be fused."""

_TYPICAL = 3


class Order(NamedTuple):
    """The time of a program in the order in which it runs.

    ``made`` makes the program. ``until``: see :class:`Timeline`.
    """

    made: Callable[[], Program]
    step_s: float
    communicate_s: float
    until: tuple[int, ...]


def orders(graph: Graph, serial: Timeline, cost: Prices) -> Iterator[Timeline]:
    """Yield the timelines of :meth:`Orders.all`. ``serial``: the search's program."""
    found = Orders(graph, serial, cost)
    return map(found.timeline, found.all())


class Orders:
    """Schedules of a program whose collectives overlap computing; each is made once."""

    def __init__(self, graph: Graph, serial: Timeline, cost: Prices) -> None:
        self._graph, self._serial, self._cost = graph, serial, cost
        self._flow = _Flow(graph, serial.program, cost)
        self._communicates = any(step.lane for step in self._flow.steps)
        self._listed: dict[int, tuple[Order, list[_Step], int]] = {}

    def timeline(self, order: Order) -> Timeline:
        """Return the timeline of a schedule, with its memory."""
        program = order.made()
        stored, peak = memory(self._graph, program, self._cost, until=order.until)
        return replace(
            self._serial, program=program, step_s=order.step_s, until=order.until,
            communicate_s=order.communicate_s, stored_bytes=stored, peak_bytes=peak,
        )  # fmt: skip

    @cached_property
    def first(self) -> Order:
        """The schedule that leaves every instruction in its place."""
        return _Run(self._flow, self._flow.steps).in_place(self._serial.program)

    def all(self) -> Iterator[Order]:
        """Yield :attr:`first`, then orders with increasing numbers of buckets.

        The last one delays collectives that are needed later.
        """
        yield self.first
        if not self._communicates:
            return
        found: list[tuple[float, list[_Step]]] = []
        for buckets in BUCKETS:
            order, steps, most = self._with_buckets(buckets)
            found.append((order.step_s, steps))
            yield order
            if most <= buckets:
                break  # each instruction has its own bucket
        _, steps = min(found, key=lambda entry: entry[0])
        if any(s.loose for s in steps) and any(s.lane and not s.loose for s in steps):
            yield self._flow.listed(self._serial.program, steps, hold=True)

    def _with_buckets(self, buckets: int) -> tuple[Order, list[_Step], int]:
        if buckets not in self._listed:
            steps, most = self._flow.cut(buckets)
            order = self._flow.listed(self._serial.program, steps, hold=False)
            self._listed[buckets] = order, steps, most
        return self._listed[buckets]

    def estimate_s(self) -> float:
        """Return an estimate of the fastest of :meth:`all`, by two of them."""
        if not self._communicates:
            return self.first.step_s
        return min(self.first.step_s, self._with_buckets(_TYPICAL)[0].step_s)


@dataclass(slots=True, kw_only=True, eq=False)
class _Step:
    """Instructions that run as one. A collective's ``seconds`` are those of all ranks."""

    what: tuple[Instruction, ...]
    seconds: PerRank | float
    messages: int
    """Number of consecutive messages; 0 if it computes."""
    lane: bool
    """Whether it communicates."""
    backward: bool
    ins: list[int]
    outs: list[int]
    """Numbers of its values in the flow."""
    urgent: bool = True
    """Whether computing in the same half of the step waits for it."""
    source: bool = False
    """Whether it is a collective of inputs of the graph."""
    need: int = 0
    """Order among collectives: for a source, its first reader; for others, the last maker."""
    readers: list[_Step] = field(default_factory=list)
    missing: int = 0
    takes_time: bool = True
    """Whether it takes time on some rank."""

    @property
    def loose(self) -> bool:
        """Whether it may run much earlier or later."""
        return self.lane and (self.source or not self.urgent)


class _Flow:
    """The steps of a program in the order of the search."""

    def __init__(self, graph: Graph, program: Program, cost: Prices) -> None:
        self._graph, self._cost = graph, cost
        structure = structure_of(graph, program, cost)
        self._ends = ends = structure.ends(graph, program)
        work = structure.work(graph, program, cost)
        # Nodes of a class take equal times.
        each = [cost.compute(node, row) for node, row in work.computing.first]
        some = [bool(np.any(seconds)) for seconds in each]
        self.steps: list[_Step] = []
        for at, (first, end) in enumerate(structure.bounds):
            group, classes = program.instructions[first:end], work.of_group[at]
            if len(classes) == 1 and cost.cross(structure.nodes[at]) is None:
                (k,) = classes
                seconds, messages, takes_time = each[k], 0, some[k]
            else:
                seconds, messages = group_seconds(graph, group, cost)
                takes_time = bool(np.any(seconds))
            ins, outs = ends.ins[at], ends.outs[at]
            self.steps.append(_step(group, seconds, messages, takes_time, ins, outs))
        _connect(self.steps)
        for step in reversed(self.steps):
            # Views take no time: a view, and a collective for it, is as urgent as its readers.
            if step.lane or not step.takes_time:
                step.urgent = any(r.urgent and r.backward is step.backward for r in step.readers)
            self._place(step)
        self.hardware = cost.hardware
        self.updates_s = [
            cost.update(graph.tensors[i.tensor], program.inputs[i.tensor])
            for i in graph.role("parameter") if i.target in graph.gradients
        ]  # fmt: skip
        if not self.hardware.host_s.any():  # one by one they take as long as their sum
            self.updates_s = [sum(self.updates_s, np.zeros(self.hardware.cluster.world_size))]

    def _place(self, step: _Step) -> None:
        """Set whether a collective is one of inputs, and its order among collectives."""
        if step.lane:
            step.source = self._ends.given.issuperset(step.ins)
            step.need = self._need(step.source, step.ins, step.outs)

    def _need(self, source: bool, ins: Sequence[int], outs: Sequence[int]) -> int:
        ends = self._ends
        if source:
            return min((ends.read[v] for v in outs if v in ends.read), default=0)
        return max((ends.made.get(v, 0) for v in ins), default=0)

    def listed(self, program: Program, steps: Sequence[_Step], *, hold: bool) -> Order:
        """Return the program in an order found by list scheduling of its steps."""
        run = _Run(self, steps)
        order = run.listed(program, hold=hold)
        if not any(step.lane and isinstance(step.what[0], Compute) for step in self.steps):
            return order
        # Collectives between machines have no buckets: neighbours run as one.
        listed = order.made()
        return _Run(self, self._joined(listed, run.order)).in_place(listed)

    def _joined(self, program: Program, steps: Sequence[_Step]) -> list[_Step]:
        """Return a program's steps, those that run as one in it joined."""
        found, left = [], iter(steps)
        for first, end in program.bounds(self._graph):
            step = next(left)
            what = [*step.what]
            while len(what) < end - first:
                what += next(left).what
            found.append(step if len(step.what) == len(what) else self._bucket(step, what))
        return found

    def cut(self, buckets: int) -> tuple[list[_Step], int]:
        """Return the steps with loose ones in buckets, and the most instructions of one of them."""
        found: list[_Step] = []
        most = 1
        for step in self.steps:
            if not step.loose or len(step.what) == 1:
                found.append(step)
                continue
            most = max(most, len(step.what))
            found += [self._bucket(step, part) for part in self._parts(step, buckets)]
        return found, most

    def _parts(self, step: _Step, buckets: int) -> list[list[Instruction]]:
        """Return a loose step's members in the order of need, in parts of about equal bytes."""
        alone = []
        for k, what in enumerate(step.what):
            ins, outs = self._ends.of(self._graph, (what,))
            source = self._ends.given.issuperset(ins)
            alone.append((self._need(source, ins, outs), k, what))
        alone.sort(key=lambda entry: entry[:2])
        sizes = np.array([self._nbytes(what) for _, _, what in alone], dtype=np.float64)
        middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
        numbers = np.minimum(middle * buckets, buckets - 1).astype(int).tolist()
        parts: dict[int, list[Instruction]] = {}
        for number, (_, _, what) in zip(numbers, alone, strict=True):
            parts.setdefault(number, []).append(what)
        return list(parts.values())

    def _nbytes(self, what: Instruction) -> int:
        (value,) = what.reads(self._graph)
        return max(self._graph.tensors[value.tensor].nbytes, 1)

    def _bucket(self, whole: _Step, part: list[Instruction]) -> _Step:
        group = tuple(part)
        converts = [s for s in group if isinstance(s, Convert)]
        if converts:
            how = self._cost.convert_group(converts)[0].implementation
            group = tuple(replace(s, implementation=how) for s in converts)
        seconds, messages = group_seconds(self._graph, group, self._cost)
        ins, outs = self._ends.of(self._graph, group)
        made = _step(group, seconds, messages, bool(np.any(seconds)), ins, outs)
        made.urgent = whole.urgent
        self._place(made)
        return made


def _step(
    group: tuple[Instruction, ...], seconds: PerRank, messages: int, takes_time: bool,
    ins: list[int], outs: list[int],
) -> _Step:  # fmt: skip
    return _Step(
        what=group, seconds=float(seconds.max()) if messages else seconds, messages=messages,
        lane=messages > 0, backward=group[0].backward, ins=ins, outs=outs, takes_time=takes_time,
    )  # fmt: skip


def _connect(steps: Sequence[_Step]) -> None:
    """Connect each step with the steps that read its values."""
    maker: dict[int, _Step] = {}
    for step in steps:
        step.readers, step.missing = [], 0
        for other in {id(m): m for v in step.ins if (m := maker.get(v))}.values():
            other.readers.append(step)
            step.missing += 1
        maker.update(dict.fromkeys(step.outs, step))


class _Run:
    """Issues steps to the streams one by one, which determines their order."""

    def __init__(self, flow: _Flow, steps: Sequence[_Step]) -> None:
        self._steps = steps
        self._updates_s = flow.updates_s
        self._streams = Streams(flow.hardware)
        self._numbers: dict[int, int] = {}  # value -> the collective that makes it
        self.order: list[_Step] = []
        self._begin: list[float] = []  # start of each step on the last rank
        self._issued: list[int] = []  # the communicating steps
        self._middle = 0  # the first step of the backward

    def in_place(self, program: Program) -> Order:
        """Return the program in its given order."""
        for backward in (False, True):
            for step in self._steps:
                if step.backward is backward:
                    self._issue(step) if step.lane else self._compute(step)
            self._end_half(backward)
        return self._made(lambda: program)

    def listed(self, program: Program, *, hold: bool) -> Order:
        """Return the program in an order found by list scheduling.

        ``hold``: loose collectives are issued when the link is idle, or if nothing else can run.
        """
        _connect(self._steps)
        place = {id(step): k for k, step in enumerate(self._steps)}
        missing = {id(step): step.missing for step in self._steps}
        for backward in (False, True):
            half = [step for step in self._steps if step.backward is backward]
            waiting = _Waiting()
            new = [step for step in half if not missing[id(step)]]
            for _ in half:
                for step in new:
                    waiting.add(step, place[id(step)], self._after(step))
                step = waiting.next(self._streams, self._streams.idle or not hold)
                self._issue(step) if step.lane else self._compute(step)
                new = []
                for reader in step.readers:
                    missing[id(reader)] -= 1
                    if not missing[id(reader)] and reader.backward is backward:
                        new.append(reader)
            self._end_half(backward)
        return self._made(lambda: replace(program, instructions=_in_buckets(self.order)))

    def _after(self, step: _Step) -> int:
        """Return the last collective whose result a step reads."""
        last = -1
        for value in step.ins:
            if (number := self._numbers.get(value, -1)) > last:
                last = number
        return last

    def _compute(self, step: _Step) -> None:
        self.order.append(step)
        self._streams.wait(self._after(step))
        self._begin.append(self._streams.now_s)
        if step.takes_time or not self._streams.idle:
            self._streams.compute(np.asarray(step.seconds))

    def _issue(self, step: _Step) -> None:
        self.order.append(step)
        self._issued.append(len(self._begin))
        self._begin.append(self._streams.now_s)
        number = self._streams.issue(float(np.max(step.seconds)), step.messages)
        self._numbers.update(dict.fromkeys(step.outs, number))

    def _end_half(self, backward: bool) -> None:
        self._streams.drain()
        if not backward:
            self._middle = len(self._begin)

    def _made(self, program: Callable[[], Program]) -> Order:
        until = list(range(len(self._begin)))
        for at, job in zip(self._issued, self._streams.jobs, strict=True):
            last = bisect.bisect_left(self._begin, job.end_s) - 1
            until[at] = max(at, min(last, self._middle - 1) if at < self._middle else last)
        for seconds in self._updates_s:
            self._streams.compute(seconds)
        return Order(
            made=program, step_s=max(self._streams.now_s, float(self._streams.least_s.max())),
            communicate_s=sum(float(np.max(s.seconds)) for s in self._steps if s.lane),
            until=tuple(until),
        )  # fmt: skip


def _in_buckets(steps: Sequence[_Step]) -> tuple[Instruction, ...]:
    """Return the instructions of steps; a separate bucket prevents fusion with the next."""
    found: list[Instruction] = []
    bucket = 0
    for step in steps:
        bucket += step.lane
        found += [
            replace(s, bucket=bucket) if step.lane and isinstance(s, Convert) else s
            for s in step.what
        ]
    return tuple(found)


class _Waiting:
    """Steps that are ready to be issued, by the collectives that they wait for."""

    def __init__(self) -> None:
        self._free: list[tuple[int, _Step]] = []
        """Computing whose inputs exist, in program order."""
        self._later: list[tuple[int, int, _Step]] = []
        """Computing whose inputs are being communicated, by the last of these collectives."""
        self._urgent: list[tuple[int, int, _Step]] = []
        self._loose: list[tuple[int, int, _Step]] = []

    def add(self, step: _Step, place: int, after: int) -> None:
        if step.lane:
            heapq.heappush(self._loose if step.loose else self._urgent, (step.need, place, step))
        else:
            heapq.heappush(self._later, (after, place, step))

    def next(self, streams: Streams, loose: bool) -> _Step:
        """Return the next step: collectives first; loose ones if allowed, or if nothing else can run."""
        while self._later and streams.ended(self._later[0][0]):
            _, place, step = heapq.heappop(self._later)
            heapq.heappush(self._free, (place, step))
        if self._urgent:
            return heapq.heappop(self._urgent)[-1]
        if self._loose and (loose or not (self._free or self._later)):
            return heapq.heappop(self._loose)[-1]
        return heapq.heappop(self._free)[-1] if self._free else heapq.heappop(self._later)[-1]
