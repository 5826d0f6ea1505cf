"""Hierarchical collectives: stages inside machines and between them.

The stages use :meth:`Comm.subgroup`, so that the emulator runs the same stages as NCCL and gloo.
Every byte crosses a machine's adapter once per stage between machines, instead of once per rank.
A *column* has at most one rank per machine; the columns exchange their parts in parallel. After
BlueConnect (Cho et al., MLSys 2019); :mod:`hap.ir.hierarchical` handles unequal machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hap.ir.hierarchical import cheaper, even, exists, regular
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm, Sizes, Waiting

NAME = "hierarchical"


class Levels(NamedTuple):
    """A rank's two communicators: the ranks of its machine, and those of its column."""

    inside: Comm
    across: Comm


class TwoLevelComm(Comm):
    """Runs ``hierarchical`` collectives in stages and all others on the flat communicator.

    Args:
        flat: the communicator of all ranks; the ranks of a machine are consecutive.
        counts: number of ranks of each machine.
    """

    def __init__(self, flat: Comm, counts: Sequence[int]) -> None:
        if sum(counts) != flat.world_size:
            raise ValueError(f"machines of {list(counts)} ranks, a world of {flat.world_size}")
        self._flat, self.counts = flat, tuple(counts)
        self.rank, self.world_size = flat.rank, flat.world_size
        ends = list(itertools.accumulate(counts))
        self._starts = [0, *ends[:-1]]
        self.machine = next(m for m, end in enumerate(ends) if self.rank < end)
        self.column = self.rank - self._starts[self.machine]
        self._width = min(counts)
        self._levels: Levels | None = None

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._flat.all_reduce_max(x)

    @property
    def levels(self) -> Levels:
        """The two communicators, created by the first hierarchical collective on all ranks."""
        # No cached_property: Python 3.11 locks it for all instances, and emulated ranks are
        # threads that wait for one another here.
        if self._levels is None:
            self._levels = self._cut()
        return self._levels

    def _cut(self) -> Levels:
        inside = [range(s, s + n) for s, n in zip(self._starts, self.counts, strict=True)]
        columns = range(max(self.counts))
        across = [[ranks[j] for ranks in inside if j < len(ranks)] for j in columns]
        return Levels(self._flat.subgroup(inside), self._flat.subgroup(across))

    @property
    def _in_a_column(self) -> bool:
        """Whether this rank exchanges data with other machines."""
        return self.column < self._width

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        if how != NAME:
            return self._flat.all_reduce(x, how)
        sizes = self._padded(even(x.numel(), self._width))
        inside, across = self.levels
        mine = inside.reduce_scatter(x.reshape(-1), 0, sizes, cheaper(sizes))
        if self._in_a_column:
            mine = across.all_reduce(mine, "one shot")
        return inside.all_gather(mine, 0, sizes, cheaper(sizes)).view(x.shape)

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        if how != NAME:
            return self._flat.all_gather(x, dim, sizes, how)
        inside, across = self.levels
        cuts, own = self._cuts(sizes), self._own(sizes)
        mine = x.movedim(dim, 0)
        if not regular(self.counts):
            machine = inside.all_gather(mine, 0, own, cheaper(own))
            held = self._padded(cuts[self.machine])
            mine = machine.split(held)[self.column]
        if self._in_a_column:
            column = [cut[self.column] for cut in cuts]
            mine = across.all_gather(mine, 0, column, cheaper(column))
        totals = self._padded([sum(column) for column in zip(*cuts, strict=True)])
        by_column = inside.all_gather(mine, 0, totals, cheaper(totals))
        parts = by_column.split([n for column in zip(*cuts, strict=True) for n in column])
        machines = len(self.counts)
        return torch.cat([part for m in range(machines) for part in parts[m::machines]]).movedim(
            0, dim
        )

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        if how != NAME:
            return self._flat.reduce_scatter(x, dim, sizes, how)
        inside, across = self.levels
        cuts, own = self._cuts(sizes), self._own(sizes)
        parts = x.movedim(dim, 0).split([n for cut in cuts for n in cut])
        by_column = torch.cat([p for j in range(self._width) for p in parts[j :: self._width]])
        totals = self._padded([sum(column) for column in zip(*cuts, strict=True)])
        mine = inside.reduce_scatter(by_column, 0, totals, cheaper(totals))
        if self._in_a_column:
            column = [cut[self.column] for cut in cuts]
            mine = across.reduce_scatter(mine, 0, column, cheaper(column))
        if not regular(self.counts):
            held = self._padded(cuts[self.machine])
            mine = inside.all_gather(mine, 0, held, cheaper(held)).split(own)[self.column]
        return mine.movedim(0, dim)

    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sizes, dst_sizes: Sizes, how: str
    ) -> Tensor:
        if how != NAME:
            return self._flat.all_to_all(x, src, dst, src_sizes, dst_sizes, how)
        assert regular(self.counts), "a hierarchical all-to-all needs machines of one size"
        inside, across = self.levels
        # Send to the column's rank in each machine the data for all ranks of that machine.
        held = self._cuts(src_sizes)
        wanted = [sum(cut) for cut in self._cuts(dst_sizes)]
        column = [cut[self.column] for cut in held]
        x = across.all_to_all(x, src, dst, column, wanted, "exact")
        columns = [sum(column) for column in zip(*held, strict=True)]
        x = inside.all_to_all(x, src, dst, columns, self._own(dst_sizes), "exact")
        parts = x.split([n for column in zip(*held, strict=True) for n in column], src)
        machines = len(self.counts)
        return torch.cat([part for m in range(machines) for part in parts[m::machines]], src)

    def texts(self, text: str) -> list[str]:
        return self._flat.texts(text)

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Comm:
        return self._flat.subgroup(parts)

    def send(self, x: Tensor, rank: int) -> Waiting:
        return self._flat.send(x, rank)

    def receive(self, into: Tensor, rank: int) -> Waiting:
        return self._flat.receive(into, rank)

    def _own(self, sizes: Sizes) -> list[int]:
        """Return the entries of this machine's ranks."""
        start = self._starts[self.machine]
        return list(sizes[start : start + self.counts[self.machine]])

    def _cuts(self, sizes: Sizes) -> list[list[int]]:
        """Return, per machine, the number of rows that each column exchanges."""
        blocks = [
            list(sizes[s : s + n]) for s, n in zip(self._starts, self.counts, strict=True)
        ]  # fmt: skip
        if regular(self.counts):
            return blocks
        return [even(sum(block), self._width) for block in blocks]

    def _padded(self, parts: list[int]) -> list[int]:
        """Return the columns' entries, with zeros for ranks of this machine in no column."""
        return parts + [0] * (self.counts[self.machine] - len(parts))


def on_machines(comm: Comm, counts: Sequence[int]) -> Comm:
    """Return ``comm`` with hierarchical collectives if the machines have any, else ``comm``."""
    return TwoLevelComm(comm, counts) if exists(counts) else comm


def along_axes(plan: Plan, comm: Comm) -> tuple[Comm, ...]:
    """Return this rank's communicators: all ranks; between machines and inside; all and its stage."""
    if plan.stages:
        return comm, comm.subgroup([stage.ranks for stage in plan.stages.stages])
    if plan.mesh:
        return comm.subgroup(plan.mesh.columns), comm.subgroup(plan.mesh.machines)
    return (on_machines(comm, plan.cluster.counts),)
