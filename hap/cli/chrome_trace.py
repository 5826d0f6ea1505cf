"""The trace file of a simulated step, in the trace event format of Chrome and Perfetto.

One process per rank, with a thread per stream and a counter of memory. The format is
described in "Trace Event Format" (Google, 2016). Times are microseconds in multiples of
1/8, which add without rounding error, so that neighbours touch and never overlap.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from hap.cli.plan_screen import tensor_label
from hap.ir.graph import Input
from hap.ir.pipeline_order import StageWork
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert, Value, reads, writes
from hap.synthesizer.schedule.event_simulator import COMMUNICATION, COMPUTE, RETURNS, Schedule, Span
from hap.synthesizer.schedule.memory_timeline import Curve

THREADS = {COMPUTE: 0, COMMUNICATION: 1, RETURNS: 2}

COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "update": "thread_state_iowait",
}
"""Part of the step -> a reserved colour of the viewer: green, blue, orange."""

Event = dict[str, Any]


def trace_text(plan: Plan, run: Schedule, memory: Iterable[Curve]) -> Iterator[str]:
    """Yield the trace file in pieces, an event a line."""
    other = {"step_s": run.step_s, "overlap": run.overlap, "graph_digest": plan.graph.digest}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n'
    between = ""
    for event in trace_events(plan, run, memory):
        yield between + json.dumps(event, separators=(",", ":"))
        between = ",\n"
    yield "\n]}\n"


def trace_events(plan: Plan, run: Schedule, memory: Iterable[Curve]) -> Iterator[Event]:
    """Yield names, then the spans of all ranks in program order, then memory."""
    for rank, device in enumerate(plan.cluster.devices):
        yield _meta(rank, 0, "process_name", name=f"rank {rank}: {device.kind} {device.name}")
        yield _meta(rank, 0, "process_sort_index", sort_index=rank)
        for stream, thread in THREADS.items():
            if stream == RETURNS and not plan.stages:
                continue
            yield _meta(rank, thread, "thread_name", name=stream)
            yield _meta(rank, thread, "thread_sort_index", sort_index=thread)
    for span in run.spans:
        yield from _span_events(plan, span)
    for rank, curve in enumerate(memory):
        yield from _counter_events(rank, curve)


def _meta(rank: int, thread: int, key: str, **args: Any) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "ts": 0, "name": key, "args": args}


def _span_events(plan: Plan, span: Span) -> Iterator[Event]:
    starts, stops, ready = (microseconds(t) for t in (span.start_s, span.end_s, span.ready_s))
    if isinstance(span.what, StageWork):
        for rank in np.flatnonzero(span.end_s > span.start_s).tolist():
            yield {
                "ph": "X", "pid": rank, "tid": THREADS[span.stream], "name": str(span.what),
                "cat": span.part, "cname": COLOURS[span.part], "ts": float(starts[rank]),
                "dur": float(stops[rank] - starts[rank]), "args": asdict(span.what),
            }  # fmt: skip
        return
    values, common = _describe(plan, span)
    tensors = [plan.whole[0].tensors[v.tensor] for v in values]
    for rank in range(plan.world_size):
        if not span.end_s[rank] > span.start_s[rank]:
            continue
        shapes, nbytes = [], 0
        part = plan.part(rank)
        for value, tensor in zip(values, tensors, strict=True):
            local = part.program.local_shape(part.graph, value, part.shares, part.rank)
            shape = list(local)
            shapes.append(f"{value} {tensor.dtype}{shape}")
            nbytes += tensor.nbytes // max(tensor.numel, 1) * int(np.prod(shape, dtype=np.int64))
        args = {**common, "results": shapes, "result_bytes": nbytes}
        if span.stream == COMMUNICATION:
            args["waited_us"] = float(starts[rank] - ready[rank])
        yield {
            "ph": "X", "pid": rank, "tid": THREADS[span.stream], "name": common["op"],
            "cat": span.part, "cname": COLOURS[span.part], "ts": float(starts[rank]),
            "dur": float(stops[rank] - starts[rank]), "args": args,
        }  # fmt: skip


def _describe(plan: Plan, span: Span) -> tuple[list[Value], Event]:
    """Return a span's values and the part of its description that all ranks share."""
    assert not isinstance(span.what, StageWork)
    if isinstance(span.what, Input):
        value = Value(span.what.tensor, plan.whole[1].inputs[span.what.tensor])
        return [value], {"op": "update", "module": span.what.target}
    step = span.what[0]
    graph = plan.whole[0]
    ins, outs = reads(graph, span.what), writes(graph, span.what)
    read = list(map(str, ins))
    if isinstance(step, Compute):
        node = plan.whole[0].by_name[step.node]
        place = {"op": node.op, "module": node.module, "source": node.source}
        return outs, {**place, "instruction": span.at, "reads": read}
    assert isinstance(step, Convert)
    about: Event = {"op": step.kind, "module": tensor_label(plan, step.tensor), "fused": len(outs)}
    if step.implementation:
        about["implementation"] = step.implementation
    return outs, {**about, "instruction": span.at, "reads": read}


def _counter_events(rank: int, curve: Curve) -> Iterator[Event]:
    """Yield the largest and the last of all values at one instant."""
    times = microseconds(curve.times_s)
    edges = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
    for first, stop in itertools.pairwise(edges):
        now = curve.bytes[first:stop]
        for value in dict.fromkeys([float(now.max()), float(now[-1])]):
            yield {
                "ph": "C", "pid": rank, "tid": 0, "name": "memory", "ts": float(times[first]),
                "args": {"bytes": round(value)},
            }  # fmt: skip


def microseconds(seconds: Any) -> Any:
    """Return seconds as microseconds in multiples of 1/8."""
    return np.round(np.asarray(seconds) * 8e6) / 8
