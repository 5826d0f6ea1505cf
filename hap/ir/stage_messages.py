"""Which rank sends which rows of a tensor to which rank, at a boundary between two stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from hap.ir.graph import Graph
from hap.ir.placement import Placement
from hap.ir.program import Program, Value
from hap.ir.stages import Stage, Transfer

Rows = Mapping[int, tuple[int, int]]
"""Rank -> (start, stop) of its rows."""


class Message(NamedTuple):
    """Rows ``start`` to ``stop`` of a tensor, from one rank of the cluster to another."""

    src: int
    dst: int
    start: int
    stop: int


def given_placement(graph: Graph, program: Program, transfer: Transfer) -> Placement:
    """Return the placement in which the sending stage, whose graph this is, makes a tensor."""
    role = "returned" if transfer.backward else "sent"
    at = next(
        k for k, o in enumerate(graph.outputs)
        if (o.tensor, o.role, o.target) == (transfer.tensor, role, str(transfer.dst))
    )  # fmt: skip
    return program.outputs[at]


def rows_of(graph: Graph, stage: Stage, tensor: str, placement: Placement) -> Rows:
    """Return the rows that each rank of a stage has in a placement: all, or a shard of dim 0."""
    shape = graph.tensors[tensor].shape
    if not placement.sharded:
        return dict.fromkeys(stage.ranks, (0, shape[0] if shape else 1))
    sizes = stage.program.sizes(graph, Value(tensor, placement), stage.shares)
    found, start = {}, 0
    for rank, size in zip(stage.ranks, sizes, strict=True):
        found[rank] = (start, start + size)
        start += size
    return found


def messages(held: Rows, needed: Rows, *, split: bool) -> list[Message]:
    """Return the messages that give every rank its rows.

    Args:
        held: of the senders; ``needed``: of the receivers.
        split: the senders have different rows, in order; otherwise each has all, and they take turns.
    """
    found = []
    owners = list(held)
    starts = [held[rank][0] for rank in owners]
    for turn, (dst, (start, stop)) in enumerate(needed.items()):
        at = max(0, bisect_right(starts, start) - 1) if split else turn % len(owners)
        for src in owners[at:] if split else [owners[at]]:
            if split and held[src][0] >= stop:
                break
            first, last = max(start, held[src][0]), min(stop, held[src][1])
            if first < last:
                found.append(Message(src, dst, first, last))
    return found
