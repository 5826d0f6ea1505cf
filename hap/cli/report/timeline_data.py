"""The step's timeline and memory curves, small enough for a page.

Ranks with equal timelines share a row. Neighbouring spans of one part of the step that are shorter
than the resolution are drawn as one block, which says how many there are. Times are integers, in
:data:`TICKS` per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hap.cli.plan_screen import tensor_label
from hap.cli.terminal import spans
from hap.ir.graph import Input
from hap.ir.pipeline_order import StageWork
from hap.ir.plan import Plan
from hap.ir.program import Convert
from hap.plan_simulation import Simulation
from hap.synthesizer.schedule.event_simulator import COMMUNICATION, COMPUTE, Span
from hap.synthesizer.schedule.memory_timeline import Curve

TICKS = 1_000_000
"""Of one step."""

EVENTS = 120_000
"""Blocks on the page, at most about."""

POINTS = 50_000
"""Points of all memory curves, at most about."""

COARSEST = 100
"""Blocks per step and stream in a row, however many rows there are."""

PARTS = ("forward", "backward", "update")

_FINEST, _MOST_POINTS = 20_000, 1_500


@dataclass(slots=True)
class _Block:
    """Consecutive spans of one lane; ``name`` is that of the longest."""

    ready: float
    start: float
    end: float
    part: int
    name: str
    longest: float
    count: int = 1


def timeline_data(made: Simulation) -> dict[str, Any]:
    """Rows of equal ranks, each with the blocks of its streams and its memory curve.

    A block is ``[waited since, start, length, part, name, spans]`` with its times in ticks, the
    first relative to the start and the start relative to the end before.
    """
    step_s = made.run.step_s or 1.0
    names: dict[str, int] = {}
    groups = _equal_ranks(made)
    most_bytes = max(float(curve.bytes.max()) for curve in made.memory) or 1.0
    resolution = min(_FINEST, max(COARSEST, EVENTS // (2 * len(groups))))
    labels = {id(span): _label(made.plan, span) for span in made.run.spans}
    rows = []
    for ranks in groups:
        first, device = ranks[0], made.plan.cluster.devices[ranks[0]]
        lanes = {}
        for stream in (COMPUTE, COMMUNICATION):
            of_rank = [s for s in made.run.spans if (s.stream == COMPUTE) == (stream == COMPUTE)]
            blocks = list(_blocks(of_rank, first, labels, step_s / resolution))
            lanes[stream] = list(_packed_blocks(blocks, step_s, names))
        rows.append(
            {
                "ranks": spans(ranks),
                "device": device.kind if len(ranks) > 1 else f"{device.kind} {device.name}",
                **lanes,
                "memory": _curve(
                    made.memory[first], step_s, min(_MOST_POINTS, POINTS // len(groups))
                ),
            }
        )
    return {
        "step_s": made.run.step_s, "ticks": TICKS, "parts": PARTS, "most_bytes": round(most_bytes),
        "names": list(names), "rows": rows,
    }  # fmt: skip


def _equal_ranks(made: Simulation) -> list[list[int]]:
    """Ranks of one kind of device whose spans and memory are equal to a nanosecond and a byte."""
    times = np.array([[s.ready_s, s.start_s, s.end_s] for s in made.run.spans])
    world = made.plan.world_size
    nanoseconds = np.round(times * 1e9).astype(np.int64).reshape(-1, world)
    groups: dict[object, list[int]] = {}
    for rank, (device, curve) in enumerate(
        zip(made.plan.cluster.devices, made.memory, strict=True)
    ):
        key = device.kind, nanoseconds[:, rank].tobytes(), np.round(curve.bytes).tobytes()
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _label(plan: Plan, span: Span) -> str:
    if isinstance(span.what, Input):
        return f"update {span.what.target}"
    if isinstance(span.what, StageWork):
        return str(span.what)
    step = span.what[0]
    if isinstance(step, Convert):
        more = f" and {len(span.what) - 1} more" if len(span.what) > 1 else ""
        return f"{step.kind} {tensor_label(plan, step.tensor)}{more}"
    node = plan.whole[0].by_name[step.node]
    return f"{node.op.removeprefix('aten.').removesuffix('.default')} {node.module}".rstrip()


def _blocks(
    found: list[Span], rank: int, labels: dict[int, str], least_s: float
) -> Iterator[_Block]:
    """A rank's spans of one stream in order; several that are shorter than ``least_s`` are one."""
    block: _Block | None = None
    for span in found:
        start, end = float(span.start_s[rank]), float(span.end_s[rank])
        if not end > start:
            continue
        new = _Block(
            min(float(span.ready_s[rank]), start), start, end, PARTS.index(span.part),
            labels[id(span)], end - start,
        )  # fmt: skip
        if block is not None and _joins(block, new, least_s):
            if new.longest > block.longest:
                block.name, block.longest = new.name, new.longest
            block.end, block.count = end, block.count + 1
            continue
        if block is not None:
            yield block
        block = new
    if block is not None:
        yield block


def _joins(block: _Block, new: _Block, least_s: float) -> bool:
    return (
        new.part == block.part
        and block.end - block.start < least_s
        and new.end - new.start < least_s
        and new.start - block.end < least_s
        and new.start - new.ready < least_s
    )


def _packed_blocks(blocks: list[_Block], step_s: float, names: dict[str, int]) -> Iterator[int]:
    before = 0
    for block in blocks:
        start, end = (round(t / step_s * TICKS) for t in (block.start, block.end))
        waited = start - min(start, round(block.ready / step_s * TICKS))
        yield from (waited, start - before, max(end - start, 1), block.part)
        yield names.setdefault(block.name, len(names))
        yield block.count
        before = start


def _curve(curve: Curve, step_s: float, points: int) -> list[int]:
    """``[tick, bytes, ...]``; a point is the largest of what its interval has, so the peak stays."""
    ticks = np.minimum(np.round(curve.times_s / step_s * TICKS).astype(np.int64), TICKS)
    cells = ticks * points // (TICKS + 1)
    found: list[int] = []
    for cell in np.unique(cells).tolist():
        inside = np.flatnonzero(cells == cell)
        top = inside[int(curve.bytes[inside].argmax())]
        for at in dict.fromkeys((int(top), int(inside[-1]))):
            found += [int(ticks[at]), round(float(curve.bytes[at]))]
    return found
