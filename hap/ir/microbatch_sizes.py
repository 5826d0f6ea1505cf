"""Sizes of microbatches: where their number does not divide the batch, the first ones have a row more.

All microbatches of a stage run one program. Its shares are those of the first, largest microbatch;
:func:`resized` derives those of a smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hap.errors import PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.mesh import divide
from hap.ir.program import Program
from hap.ir.stages import PipelineStages, Stage, cut_stages


def even_parts(units: int, count: int) -> tuple[int, ...]:
    """Return ``count`` parts of ``units`` that differ by at most one, the larger ones first."""
    each, more = divmod(units, count)
    return (each + 1,) * more + (each,) * (count - more)


Size = tuple[int, ...]
"""The units of a microbatch on each axis over time."""

Sized = tuple[tuple[Graph, ...], tuple[Stage, ...]]
"""The graphs of the stages for one microbatch, and the stages with its shares."""


def size_of(shares: Shares, number: int) -> Size:
    """Return the size of a microbatch, given the shares over time."""
    return tuple(units[number] for units in shares.values())


def sized_stages(
    graph: Graph, program: Program, shares: Shares, stages: PipelineStages
) -> Mapping[Size, Sized]:
    """Return the stages for each size of microbatches; the size of the first is the first.

    Args:
        graph: the whole step; ``program``, ``shares``: those over time.

    Raises:
        PlanError: a stage's axes can't be cut in a microbatch of some size.
    """
    numbers: dict[Size, int] = {}
    for number in range(len(next(iter(shares.values())))):
        numbers.setdefault(size_of(shares, number), number)
    found: dict[Size, Sized] = {}
    for size, number in numbers.items():
        parts, _ = cut_stages(divide(graph, program, shares, number), stages.cuts)
        own = stages.stages
        if found:
            first, _ = next(iter(found.values()))
            fitting = list(map(resized, own, first, parts))
            own = tuple(stage for stage in fitting if stage is not None)
            if len(own) < len(fitting):
                raise PlanError(
                    f"microbatches of {' and '.join(map(str, size))} parts are too small for the stages",
                    hint="plan anew",
                )
        found[size] = parts, own
    return found


def resized(stage: Stage, before: Graph, after: Graph) -> Stage | None:
    """Return a stage with the program and shares for microbatches of another size.

    Each rank's part stays as nearly the same as whole units allow. ``None``: an axis can't be cut
    into blocks of as many elements as before.

    Args:
        before: the stage's graph for a microbatch of the size of its shares.
        after: that of the other size.
    """
    axes, units_of = {}, dict[str, int]()
    for dim, (name, units) in stage.program.axes.items():
        tensor, _, at = dim.rpartition(":")
        whole, own = before.tensors[tensor].shape[int(at)], after.tensors[tensor].shape[int(at)]
        if (units * own) % max(whole, 1):
            return None
        axes[dim] = name, units * own // whole
        if units_of.setdefault(name, axes[dim][1]) != axes[dim][1] or not axes[dim][1]:
            return None
    shares = {name: _in_proportion(units_of[name], given) for name, given in stage.shares.items()}
    return replace(stage, program=replace(stage.program, axes=axes), shares=shares)


def _in_proportion(units: int, given: Sequence[int]) -> tuple[int, ...]:
    """Return shares that sum to ``units``, by largest remainder; the first of equals wins.

    The planner has the same in floating point and numpy, which reading a plan must not import.
    """
    total = sum(given)
    pairs = [divmod(units * share, total) for share in given]
    order = sorted(range(len(given)), key=lambda k: (-pairs[k][1], k))
    more = set(order[: units - sum(whole for whole, _ in pairs)])
    return tuple(whole + (k in more) for k, (whole, _) in enumerate(pairs))
