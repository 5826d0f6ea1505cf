"""The simulated step of a plan with pipeline stages, in the form of any other simulated step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hap.ir.graph import Graph
from hap.ir.pipeline_order import StageWork
from hap.ir.plan import Plan
from hap.ir.stages import Stage
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.schedule.event_simulator import (
    COMMUNICATION,
    COMPUTE,
    RETURNS,
    Schedule,
    Span,
    Usage,
    usage,
)
from hap.synthesizer.schedule.memory_timeline import Curve
from hap.synthesizer.schedule.pipeline_simulator import StageSeconds, TurnTimes, simulate_pipeline
from hap.synthesizer.stages.stage_times import StageFigures, figures, stage_cost
from hap.synthesizer.stages.stage_transfers import StageTransfers


def pipeline_schedule(plan: Plan) -> tuple[Schedule, Usage, tuple[Curve, ...]]:
    """Return a plan's step, each rank's seconds by use, and each rank's memory over time.

    Spans are turns of stages, and transfers on the ranks that send. Collectives inside a stage are
    part of its turns; the seconds by use tell them apart.
    """
    found = stage_figures(plan)
    parts, transfers = plan.cut
    assert plan.stages is not None
    priced = StageTransfers(plan.cluster, parts, plan.stages.stages, transfers)
    seconds = priced.seconds(found)
    turns: list[TurnTimes] = []
    times = simulate_pipeline(seconds, plan.microbatches, record=turns)
    spans = tuple(_spans(plan, seconds, turns, times.end_s))
    ends = np.zeros(plan.world_size)
    for ranks, end_s, each in zip(plan.groups, times.end_s, seconds, strict=True):
        ends[list(ranks)] = end_s - each.rest_s
    run = Schedule(
        overlap=True, step_s=times.step_s, spans=spans, begin_s=(), done_s=(),
        backward_done_s=ends,
    )  # fmt: skip
    return run, _usage(plan, run, found, seconds), _memory(plan, run, found)


def stage_costs(plan: Plan) -> Iterator[tuple[Graph, Stage, CostModel]]:
    """Yield each stage's graph for one microbatch, the stage, and the cost model of its ranks."""
    assert plan.stages is not None
    for part, stage in zip(plan.cut[0], plan.stages.stages, strict=True):
        hardware = HardwareModel(plan.cluster.keep(stage.ranks))
        states = plan.optimizer.states
        yield part, stage, stage_cost(part, stage.program, stage.shares, hardware, states)


def stage_figures(plan: Plan) -> list[StageFigures]:
    """Return the figures of each stage."""
    return [
        figures(
            part, stage.program, stage.shares, cost.hardware, plan.optimizer.states,
            plan.microbatches, stage.in_flight, stage.delay, stage.recompute,
            stage.gather_each,
        )
        for part, stage, cost in stage_costs(plan)
    ]  # fmt: skip


def _spans(
    plan: Plan, seconds: list[StageSeconds], turns: list[TurnTimes], ends: tuple[float, ...]
) -> list[Span]:
    def span(stream: str, work: StageWork, start_s: float, end_s: float) -> Span:
        start, end = np.zeros(plan.world_size), np.zeros(plan.world_size)
        ranks = list(plan.groups[work.stage])
        start[ranks], end[ranks] = start_s, end_s
        return Span(stream, 0, work, start, start, end)

    found = []
    for stage, (each, end_s) in enumerate(zip(seconds, ends, strict=True)):
        found.append(span(COMPUTE, StageWork(stage, -1, "forward"), 0.0, each.before_s))
        found.append(span(COMPUTE, StageWork(stage, -1, "update"), end_s - each.rest_s, end_s))
    begun = set[int]()
    for stage, turn, transfer, start_s, end_s in turns:
        if not transfer and stage not in begun:  # weights of other stages, right before it
            begun.add(stage)
            work, took_s = StageWork(stage, -1, "forward"), seconds[stage].shared_s
            found.append(span(COMPUTE, work, start_s - took_s, start_s))
        side = "backward" if turn.backward else "forward"
        if not transfer:
            work = StageWork(stage, turn.microbatch, side, weights=turn.weights)
            found.append(span(COMPUTE, work, start_s, end_s))
        else:
            to = stage - 1 if turn.backward else stage + 1
            work = StageWork(stage, turn.microbatch, side, to)
            stream = RETURNS if turn.backward else COMMUNICATION
            found.append(span(stream, work, start_s, end_s))
    found = sorted(
        (s for s in found if (s.end_s > s.start_s).any()), key=lambda s: float(s.start_s.max())
    )
    return [replace(s, at=k) for k, s in enumerate(found)]


def _usage(
    plan: Plan, run: Schedule, found: list[StageFigures], seconds: list[StageSeconds]
) -> Usage:
    """Return the seconds by use, with the collectives and the waiting inside of the turns."""
    outer = usage(replace(run, spans=tuple(_merged(plan, run))))
    compute, inside, hidden = np.zeros((3, plan.world_size))
    for ranks, each, times in zip(plan.groups, found, seconds, strict=True):
        compute[list(ranks)] = each.compute_s
        inside[list(ranks)] = each.communicate_s
        hidden[list(ranks)] = times.beside_s + each.overlapped_s
    return Usage(
        compute_s=compute, waiting_s=np.maximum(outer.compute_s - compute - inside + hidden, 0.0),
        communicate_s=outer.communicate_s + inside, overlapped_s=outer.overlapped_s + hidden,
        idle_s=outer.idle_s,
    )  # fmt: skip


def _merged(plan: Plan, run: Schedule) -> Iterator[Span]:
    """Yield the turns, and the transfers of each stage with those that overlap as one."""
    yield from (s for s in run.spans if s.stream == COMPUTE)
    for ranks in plan.groups:
        last: Span | None = None
        for span in run.spans:
            if span.stream == COMPUTE or not span.end_s[ranks[0]]:
                continue
            if last is not None and span.start_s[ranks[0]] <= last.end_s[ranks[0]]:
                last = replace(last, end_s=np.maximum(last.end_s, span.end_s))
                continue
            if last is not None:
                yield last
            last = span
        if last is not None:
            yield last


def _memory(plan: Plan, run: Schedule, found: list[StageFigures]) -> tuple[Curve, ...]:
    """Return the memory of each rank: between turns what is stored and saved, in a turn its peak."""
    curves: list[Curve | None] = [None] * plan.world_size
    assert plan.stages is not None
    for number, (stage, each) in enumerate(zip(plan.stages.stages, found, strict=True)):
        work = [s for s in run.spans if isinstance(s.what, StageWork) and s.what.to < 0]
        own = [s for s in work if isinstance(s.what, StageWork) and s.what.stage == number]
        ahead = min(stage.in_flight, plan.microbatches) - 1
        for place, rank in enumerate(stage.ranks):
            turn = each.peak_bytes - ahead * each.saved_bytes - each.stored_bytes
            curves[rank] = _curve(own, rank, each.stored_bytes[place], each.saved_bytes[place],
                                  turn[place])  # fmt: skip
    return tuple(c for c in curves if c is not None)


def _curve(own: list[Span], rank: int, stored: float, saved: float, turn: float) -> Curve:
    """Return a rank's memory; ``turn`` are the bytes of a turn beside what is stored."""
    times, held, at, live = [0.0], [float(stored)], [-1], 0
    for span in own:
        assert isinstance(span.what, StageWork)
        in_turn = span.what.microbatch >= 0
        forward = in_turn and span.what.part == "forward"
        others = live if forward else max(live - 1, 0)
        if in_turn and not span.what.weights:
            live += 1 if forward else -1
        times += [float(span.start_s[rank]), float(span.end_s[rank])]
        held += [stored + others * saved + turn if in_turn else stored, stored + live * saved]
        at += [span.at, span.at]
    return Curve(times_s=np.array(times), bytes=np.array(held), at=np.array(at, dtype=np.int64))
