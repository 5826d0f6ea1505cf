"""Conversions of weights that two stages share, in pieces that overlap with their transfer.

A weight that two stages read crosses once per step, and so does the sum of its gradients. A stage of several
ranks receives the weight in shards and gathers them, and reduces the gradient to shards that it returns.
While one piece of the rows is gathered, the next one arrives; while one is sent, the next one is reduced.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hap.ir.graph import Graph
from hap.ir.microbatch import BEFORE, SUMMED
from hap.ir.placement import S
from hap.ir.program import Convert, Program, Value
from hap.ir.returned_sums import returned_conversions, returned_values

PIECE_BYTES = 2**22
"""Least bytes of a piece: smaller ones cost more starts than they hide."""

MOST_PIECES = 8


def in_pieces(graph: Graph, program: Program, world_size: int) -> dict[int, int]:
    """Return the instructions of a stage that run in pieces, and how many pieces each has.

    They gather a received weight, or reduce a sum that the stage returns, along dim 0, and are not fused
    with others. A sum to which another stage contributes is reduced whole.
    """
    if world_size == 1:
        return {}
    received = {i: Value(i.tensor, program.inputs[i.tensor]) for i in graph.role("received")}
    weights = {value for i, value in received.items() if i.target == BEFORE}
    awaited = {value for i, value in received.items() if i.target == SUMMED}
    for step in program.instructions:
        if not awaited.isdisjoint(step.reads(graph)):
            awaited.update(step.writes(graph))
    sums = set(returned_values(graph, program, summed=True))
    once = returned_conversions(graph, program)
    readers = Counter(v for step in program.instructions for v in step.reads(graph))
    found = {}
    for first, end in program.bounds(graph):
        step = program.instructions[first]
        if end - first > 1 or not isinstance(step, Convert):
            continue
        (source,), (made,) = step.reads(graph), step.writes(graph)
        gathers = (
            step.kind == "all_gather" and not step.backward and step.src == S(0)
            and source in weights
        )  # fmt: skip
        reduces = (
            step.kind == "reduce_scatter" and step.dst == S(0) and first in once
            and source not in awaited
        )  # fmt: skip
        if gathers or (reduces and made in sums and not readers[made]):
            tensor = graph.tensors[step.tensor]
            count = min(MOST_PIECES, tensor.nbytes // PIECE_BYTES, tensor.shape[0] // world_size)
            if count > 1:
                found[first] = count
    return found


def pieces_of(graph: Graph, program: Program, world_size: int, tensor: str) -> int:
    """Return in how many pieces a shared weight, or its gradient, crosses to or from a stage."""
    for k, count in in_pieces(graph, program, world_size).items():
        if [v.tensor for v in program.instructions[k].reads(graph)] == [tensor]:
            return count
    return 1


def piece(start: int, stop: int, number: int, count: int) -> tuple[int, int]:
    """Return the rows of a piece of the rows from ``start`` to ``stop``."""
    ends = [start + (stop - start) * k // count for k in range(count + 1)]
    return list(pairwise(ends))[number]
