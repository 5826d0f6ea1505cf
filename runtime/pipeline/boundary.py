"""Boundaries between stages: which rank sends which rows of a tensor to which rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hap.ir.graph import Graph
from hap.ir.placement import Placement
from hap.ir.plan import Plan
from hap.ir.program import Value
from hap.ir.stages import Transfer
from hap.runtime.collectives import Comm, Waiting


class Message(NamedTuple):
    """Rows ``start`` to ``stop`` of a tensor, from one rank of the cluster to another."""

    src: int
    dst: int
    start: int
    stop: int


class Boundary:
    """One tensor between two stages, as seen by one rank.

    Args:
        given: its placement where it is made; ``wanted``: where it is read. Both are replicated, or
            shards by rows.
    """

    def __init__(self, plan: Plan, transfer: Transfer, rank: int) -> None:
        self.transfer = transfer
        self.given, held = _held(plan, transfer, transfer.src)
        self.wanted, needed = _held(plan, transfer, transfer.dst)
        self._messages = messages(held, needed, split=self.given.sharded)
        self._rank = rank
        self._start = (held | needed).get(rank, (0, 0))[0]
        shape = plan.cut[0][transfer.src].tensors[transfer.tensor].shape
        rows = needed.get(rank, (0, 0))
        self._shape = (rows[1] - rows[0], *shape[1:]) if shape else shape
        self._whole = not shape

    @property
    def sends(self) -> Value:
        """The value that the sending stage makes."""
        return Value(self.transfer.tensor, self.given)

    @property
    def arrives(self) -> Value:
        """The value that the receiving stage reads."""
        return Value(self.transfer.tensor, self.wanted)

    def send(self, x: Tensor, comm: Comm) -> list[tuple[Tensor, Waiting]]:
        """Start to send this rank's part; the tensors must live until the waits return."""
        found = []
        for m in self._messages:
            if m.src == self._rank:
                rows = x if self._whole else x[m.start - self._start : m.stop - self._start]
                rows = rows.contiguous()
                found.append((rows, comm.send(rows, m.dst)))
        return found

    def receive(self, comm: Comm, dtype: torch.dtype, device: torch.device) -> Arrival:
        """Start to receive this rank's part."""
        into = torch.empty(self._shape, dtype=dtype, device=device)
        waits = []
        for m in self._messages:
            if m.dst == self._rank:
                rows = into if self._whole else into[m.start - self._start : m.stop - self._start]
                waits.append(comm.receive(rows, m.src))
        return Arrival(into, waits)


class Arrival:
    """A tensor that is arriving."""

    def __init__(self, into: Tensor, waits: list[Waiting]) -> None:
        self._into, self._waits = into, waits

    def wait(self) -> Tensor:
        """Return the tensor as soon as all of it is there."""
        for wait in self._waits:
            wait()
        return self._into


def messages(
    held: dict[int, tuple[int, int]], needed: dict[int, tuple[int, int]], *, split: bool
) -> list[Message]:
    """Return the messages that give every rank its rows.

    Args:
        held: rank -> (start, stop) of the rows that it has; ``needed``: that it must get.
        split: the holders have different rows; otherwise each has all, and they take turns.
    """
    found = []
    owners = list(held)
    for turn, (dst, (start, stop)) in enumerate(needed.items()):
        for src in owners if split else [owners[turn % len(owners)]]:
            first, last = max(start, held[src][0]), min(stop, held[src][1])
            if first < last:
                found.append(Message(src, dst, first, last))
    return found


def _held(
    plan: Plan, transfer: Transfer, number: int
) -> tuple[Placement, dict[int, tuple[int, int]]]:
    """Return a tensor's placement in a stage, and the rows of each of its ranks."""
    assert plan.stages is not None
    graph, stage = plan.cut[0][number], plan.stages.stages[number]
    placement = _placement(graph, transfer, number, plan)
    shape = graph.tensors[transfer.tensor].shape
    rows = shape[0] if shape else 1
    if not placement.sharded:
        return placement, dict.fromkeys(stage.ranks, (0, rows))
    sizes = stage.program.sizes(graph, Value(transfer.tensor, placement), stage.shares)
    found, start = {}, 0
    for rank, size in zip(stage.ranks, sizes, strict=True):
        found[rank] = (start, start + size)
        start += size
    return placement, found


def _placement(graph: Graph, transfer: Transfer, number: int, plan: Plan) -> Placement:
    assert plan.stages is not None
    program = plan.stages.stages[number].program
    if number == transfer.dst:
        return program.inputs[transfer.tensor]
    role = "returned" if transfer.backward else "sent"
    at = next(
        k for k, o in enumerate(graph.outputs)
        if (o.tensor, o.role, o.target) == (transfer.tensor, role, str(transfer.dst))
    )  # fmt: skip
    return program.outputs[at]
