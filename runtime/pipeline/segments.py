"""Segments of a stage's program: the instructions of each phase, and of each side of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, fx

from hap.ir.delayed_weights import delayable
from hap.ir.graph import Graph, Input
from hap.ir.last_turn import beside_last, end_conversions
from hap.ir.mesh import origin
from hap.ir.microbatch import BEFORE, EACH, SUMMED, Phase, is_of_each, is_sum, phases
from hap.ir.pipeline_order import PENDING
from hap.ir.placement import P
from hap.ir.program import Compute, Convert, Program, Value
from hap.ir.returned_sums import returned_conversions
from hap.ir.shared_pieces import in_pieces
from hap.ir.weight_gathers import forward_gathers
from hap.runtime.compiled import Library, executable
from hap.runtime.context import Context
from hap.runtime.emit import Emitter


class StageSegment(IntEnum):
    """The segments in the order of a step; :class:`hap.ir.microbatch.Phase` with two sides."""

    ONCE = 0
    SHARED = 1
    """Of weights of other stages, once per step."""
    COUNT = 2
    COUNTED = 3
    FORWARD = 4
    BACKWARD = 5
    WEIGHTS = 6
    """The part of a microbatch's backward that the stage delays."""
    END = 7
    """The loss, of the sums over the microbatches."""
    RETURNED = 8
    """Of sums that other stages get."""
    GRADIENTS = 9
    LAST = 10
    """Of sums whose terms other stages have summed."""
    LAST_TURN = 11
    """The last backward or weights of a step, with reductions of gradients beside it."""


PER_PART = (StageSegment.COUNT, StageSegment.FORWARD, StageSegment.BACKWARD, StageSegment.WEIGHTS)

AFTER = (StageSegment.END, StageSegment.RETURNED, StageSegment.GRADIENTS, StageSegment.LAST)
"""Run once per step, after the microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """A sum over the microbatches: ``term`` of each of them adds up to ``total``."""

    term: Value
    total: Value
    segment: StageSegment
    """The segment that makes the terms."""


@dataclass(frozen=True, kw_only=True)
class SegmentLayout:
    """A stage's program in segments; the same for all microbatches and ranks."""

    numbers: Mapping[StageSegment, tuple[int, ...]]
    sums: tuple[Sum, ...]
    given: Mapping[StageSegment, tuple[Value, ...]]
    results: Mapping[StageSegment, tuple[Value, ...]]
    added: Mapping[StageSegment, tuple[Value, ...]]
    """Per segment, the values that are added up over the microbatches."""
    complete: Mapping[str, Sum]
    """The sums that the last turn completes, by node; empty if nothing runs beside it."""
    pieces: Mapping[Value, tuple[Convert, int]]
    """Conversions in pieces, in no segment: by the weight that is gathered, or the sum that is made."""

    @property
    def last(self) -> StageSegment:
        """The segment in whose place the last turn runs :attr:`StageSegment.LAST_TURN`."""
        weights = StageSegment.WEIGHTS
        return weights if self.numbers[weights] else StageSegment.BACKWARD


def layout(
    graph: Graph, program: Program, *, delayed: bool = False, world_size: int = 2,
    gather_each: bool = False,
) -> SegmentLayout:  # fmt: skip
    """Return the segments of a stage's program.

    Args:
        delayed: gradients of weights have a segment of their own.
        world_size: ranks of the stage; one alone reduces nothing.
        gather_each: the forward of each microbatch gathers the weights that it alone reads.
    """
    of_node = phases(graph)
    segment_of = {Value(i.tensor, program.inputs[i.tensor]): _of_input(i) for i in graph.inputs}
    numbers: dict[StageSegment, list[int]] = {s: [] for s in StageSegment}
    sums: dict[str, Sum] = {}
    beside = frozenset[int]() if world_size == 1 else beside_last(graph, program)
    split = in_pieces(graph, program, world_size)
    late = delayable(graph, program) if delayed else frozenset[int]()
    returned = returned_conversions(graph, program)
    each = forward_gathers(graph, program) if gather_each else frozenset[int]()
    end_alone = end_conversions(graph, program)
    batch = {i.tensor for i in graph.role("input") if is_of_each(i)}
    counts = batch.intersection(
        name for node in graph.nodes if of_node[node.name] is Phase.COUNT for name in node.inputs
    )
    for k, step in enumerate(program.instructions):
        if isinstance(step, Compute) and is_sum(graph.by_name[step.node]):
            (term,), (total,) = step.reads(graph), step.writes(graph)
            if term.placement != total.placement:
                raise AssertionError(f"{step.node} changes the placement of its terms")
            sums[step.node] = Sum(term=term, total=total, segment=segment_of[term])
            segment_of[total] = _of_sum(of_node[step.node], segment_of[term], step.backward)
            continue
        if isinstance(step, Compute):
            segment = _segment(of_node[step.node], step.backward)
            if segment is StageSegment.ONCE or segment >= StageSegment.END:
                segment = max([segment, *(segment_of[v] for v in step.reads(graph))])
        elif k in each:
            segment = StageSegment.FORWARD
        elif k in end_alone:
            segment = StageSegment.GRADIENTS
        elif k in returned and segment_of[step.reads(graph)[0]] in (
            *PER_PART,
            StageSegment.RETURNED,
        ):
            segment = StageSegment.RETURNED
        else:
            segment = _of_conversion(step, counts, segment_of)
        if segment is StageSegment.BACKWARD and k in late:
            segment = StageSegment.WEIGHTS
        if k not in beside and k not in split:
            numbers[segment].append(k)
        segment_of.update(dict.fromkeys(step.writes(graph), segment))
    found = _connected(graph, program, numbers, [*sums.values()], segment_of, split, beside)
    return _with_last_turn(graph, program, found, beside, sums) if beside else found


def _of_input(i: Input) -> StageSegment:
    if i.role == "received":
        return {
            EACH: StageSegment.FORWARD,
            BEFORE: StageSegment.SHARED,
            SUMMED: StageSegment.GRADIENTS,
        }[i.target]
    return StageSegment.FORWARD if is_of_each(i) else StageSegment.ONCE


def _of_sum(phase: Phase, terms: StageSegment, backward: bool) -> StageSegment:
    """Return the segment that reads the total of a sum."""
    if phase is Phase.COUNTED:
        return StageSegment.COUNTED
    if terms >= StageSegment.GRADIENTS:
        return StageSegment.LAST
    return StageSegment.GRADIENTS if backward else StageSegment.END


def _segment(phase: Phase, backward: bool) -> StageSegment:
    if phase is Phase.PART:
        return StageSegment.BACKWARD if backward else StageSegment.FORWARD
    if phase is Phase.END:
        return StageSegment.GRADIENTS if backward else StageSegment.END
    return StageSegment[phase.name]


def _of_conversion(
    step: Convert, counts: set[str], segment_of: Mapping[Value, StageSegment]
) -> StageSegment:
    source = segment_of[Value(step.tensor, step.src)]
    if step.tensor in counts:
        return StageSegment.COUNT
    if source is StageSegment.WEIGHTS:
        return StageSegment.BACKWARD  # unless it is delayed
    if source >= StageSegment.END:
        return max(source, StageSegment.GRADIENTS) if step.backward else source
    if step.backward and source not in (StageSegment.COUNT, StageSegment.COUNTED):
        return StageSegment.BACKWARD
    return source


def _connected(
    graph: Graph, program: Program, numbers: Mapping[StageSegment, list[int]], sums: Sequence[Sum],
    segment_of: Mapping[Value, StageSegment], split: Mapping[int, int], beside: Collection[int],
) -> SegmentLayout:  # fmt: skip
    """Return the layout with what every segment reads and makes for others."""
    pieces = dict[Value, tuple[Convert, int]]()
    for k, count in split.items():
        if isinstance(step := program.instructions[k], Convert):
            (source,), (result,) = step.reads(graph), step.writes(graph)
            pieces[result if step.backward else source] = step, count
    made: dict[StageSegment, set[Value]] = {}
    read: dict[StageSegment, list[Value]] = {}
    for segment, steps in numbers.items():
        chosen = [program.instructions[k] for k in steps]
        made[segment] = {v for s in chosen for v in s.writes(graph)}
        wanted = dict.fromkeys(v for s in chosen for v in s.reads(graph))
        read[segment] = [v for v in wanted if v not in made[segment]]
    ends = [Value(o.tensor, p) for o, p in zip(graph.outputs, program.outputs, strict=True)]
    later = {*ends, *(s.term for s in sums)}
    later.update(v for wanted in read.values() for v in wanted)
    later.update(v for k in beside for v in program.instructions[k].reads(graph))
    returned = {v for step, _ in pieces.values() if step.backward for v in step.reads(graph)}
    later |= returned
    # Terms that an operator after the microbatches reads, or that another stage gets, are summed too.
    after = {*ends, *returned, *(v for s in AFTER for v in read[s])}
    terms = {s.term for s in sums} | {v for v in after if origin(v.tensor).placement == P}
    return SegmentLayout(
        added={s: tuple(v for v in sorted(terms) if segment_of[v] is s) for s in StageSegment},
        numbers={s: tuple(steps) for s, steps in numbers.items()}, sums=tuple(sums),
        given={s: tuple(read[s]) for s in StageSegment},
        results={s: tuple(v for v in sorted(made[s]) if v in later) for s in StageSegment},
        complete={}, pieces=pieces,
    )  # fmt: skip


def _with_last_turn(
    graph: Graph, program: Program, found: SegmentLayout, beside: frozenset[int],
    sums: Mapping[str, Sum],
) -> SegmentLayout:  # fmt: skip
    """Return the layout with the last turn: its segment, the sums, and instructions ``beside`` it."""
    turn, last = StageSegment.LAST_TURN, found.last
    numbers = tuple(sorted({*found.numbers[last], *beside}))
    steps = [program.instructions[k] for k in numbers]
    complete = {s.node: sums[s.node] for s in steps if isinstance(s, Compute) and s.node in sums}
    made = dict.fromkeys(v for s in steps for v in s.writes(graph))
    read = dict.fromkeys(
        v for s in steps if not (isinstance(s, Compute) and s.node in complete)
        for v in s.reads(graph)
    )  # fmt: skip
    terms = {each.term for each in complete.values()}
    ends = (Value(o.tensor, p) for o, p in zip(graph.outputs, program.outputs, strict=True))
    later = {*found.results[last]} - terms
    later.update(ends, *(found.given[s] for s in AFTER))
    return replace(
        found, complete=complete,
        numbers={**found.numbers, turn: numbers},
        given={**found.given, turn: tuple(v for v in read if v not in made)},
        results={**found.results, turn: tuple(v for v in made if v in later)},
        added={**found.added, turn: tuple(v for v in found.added[last] if v not in terms)},
    )  # fmt: skip


Run = Callable[[Context, list[Any]], Sequence[Tensor]]


def emitted(emitter: Emitter, layout: SegmentLayout, *, last: bool) -> dict[StageSegment, fx.Graph]:
    """Return the graph of each segment that has instructions; ``last``: the last turn's too."""
    return {
        segment: emitter.segment(
            layout.numbers[segment], layout.given[segment], layout.results[segment],
            pending=segment is StageSegment.LAST_TURN, most_pending=PENDING,
        )
        for segment in StageSegment
        if layout.numbers[segment] and (last or segment is not StageSegment.LAST_TURN)
    }  # fmt: skip


def executables(
    graphs: Mapping[StageSegment, fx.Graph], backend: str, device: torch.device, library: Library
) -> dict[StageSegment, Run]:
    """Return the function of each segment; the graphs are modified."""
    return {s: executable(graph, backend, device, library) for s, graph in graphs.items()}
