"""Makespan of a one-forward-one-backward (1F1B) pipeline with uneven stages, by its events.

Stage ``s`` runs forwards until ``depth[s]`` microbatches are in flight, then one backward and one
forward in turns, then the remaining backwards. A forward waits for the forward of the stage before
it, and a backward for the backward of the stage after it, plus the boundary's transfer. With
``boundary_blocks`` the sender computes nothing during its transfer, as with synchronous sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """Begin and end of every forward and backward: ``forward[stage][microbatch]``, in seconds."""

    forward: tuple[tuple[tuple[float, float], ...], ...]
    backward: tuple[tuple[tuple[float, float], ...], ...]
    makespan_s: float
    done_s: tuple[float, ...]
    """Per stage, the end of its last task."""


def in_flight(stages: int, microbatches: int) -> tuple[int, ...]:
    """Return the microbatches in flight per stage of plain 1F1B: as many as stages follow, plus 1."""
    return tuple(min(microbatches, stages - s) for s in range(stages))


def stage_order(microbatches: int, depth: int) -> list[tuple[str, int]]:
    """Return a stage's tasks in order: ``("forward" | "backward", microbatch)``."""
    first = min(depth, microbatches)
    order = [("forward", i) for i in range(first)]
    for i in range(microbatches):
        order.append(("backward", i))
        if first + i < microbatches:
            order.append(("forward", first + i))
    return order


def simulate_pipeline(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    microbatches: int,
    boundary_s: Sequence[float] | None = None,
    depth: Sequence[int] | None = None,
    boundary_blocks: bool = False,
) -> PipelineTimeline:
    """Return the timeline of one training step, without gradient reduction and update.

    Args:
        forward_s, backward_s: Seconds of one microbatch, per stage.
        microbatches: Number of microbatches.
        boundary_s: Seconds of one transfer between stages ``s`` and ``s + 1``, either way; one
            entry fewer than stages. Default: no time.
        depth: Most microbatches in flight per stage; default: :func:`in_flight`.
        boundary_blocks: Whether a transfer occupies its sender.

    Raises:
        ValueError: Lengths differ, a number is out of its range, or a stage keeps fewer
            microbatches in flight than the stages after it need to advance.
    """
    stages = len(forward_s)
    boundary = [0.0] * (stages - 1) if boundary_s is None else list(boundary_s)
    depth = in_flight(stages, microbatches) if depth is None else depth
    _check(forward_s, backward_s, boundary, depth, microbatches)
    orders = [stage_order(microbatches, d) for d in depth]
    seconds = {"forward": forward_s, "backward": backward_s}
    ends: dict[tuple[str, int, int], tuple[float, float]] = {}
    free, place = [0.0] * stages, [0] * stages
    left = 2 * stages * microbatches
    while left:
        before = left
        for s in range(stages):
            while place[s] < len(orders[s]):
                way, i = orders[s][place[s]]
                ready = _ready(way, s, i, stages, boundary, ends)
                if ready is None:
                    break
                begin = max(free[s], ready)
                ends[way, s, i] = begin, begin + seconds[way][s]
                free[s] = begin + seconds[way][s]
                if boundary_blocks:
                    to = s if way == "forward" else s - 1
                    free[s] += boundary[to] if 0 <= to < stages - 1 else 0.0
                place[s] += 1
                left -= 1
        assert left < before, "1F1B orders never wait for each other in a circle"
    times = [
        tuple(tuple(ends[way, s, i] for i in range(microbatches)) for s in range(stages))
        for way in ("forward", "backward")
    ]
    done = tuple(stage[-1][1] for stage in times[1])
    return PipelineTimeline(forward=times[0], backward=times[1], makespan_s=max(done), done_s=done)


def _ready(
    way: str,
    s: int,
    i: int,
    stages: int,
    boundary: Sequence[float],
    ends: dict[tuple[str, int, int], tuple[float, float]],
) -> float | None:
    """Return the time at which a task's input has arrived; ``None`` if its sender has not run."""
    if way == "forward":
        if s == 0:
            return 0.0
        sent, link = ends.get(("forward", s - 1, i)), s - 1
    elif s == stages - 1:
        sent, link = ends.get(("forward", s, i)), None
    else:
        sent, link = ends.get(("backward", s + 1, i)), s
    if sent is None:
        return None
    return sent[1] + (0.0 if link is None else boundary[link])


def _check(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    boundary: Sequence[float],
    depth: Sequence[int],
    microbatches: int,
) -> None:
    stages = len(forward_s)
    if not stages or microbatches < 1:
        raise ValueError("a pipeline needs a stage and a microbatch")
    if not (len(backward_s) == len(depth) == stages and len(boundary) == stages - 1):
        raise ValueError(
            f"{stages} stages have {len(backward_s)} backward times, {len(boundary)} boundaries "
            f"and {len(depth)} depths: give one time and depth per stage, one boundary fewer"
        )
    if any(not t >= 0 for t in (*forward_s, *backward_s, *boundary)):
        raise ValueError("a time of a stage or boundary is negative, or no number")
    if any(d < 1 for d in depth):
        raise ValueError(f"microbatches in flight are {list(depth)}: give at least 1 per stage")
