"""Collectives with uneven shards on torch.distributed.

:class:`Comm` is the interface that an emitted program calls. :class:`ProcessGroupComm` implements
it on NCCL and gloo; :mod:`hap.runtime.emulate` implements it in one process. ``sizes`` are every
rank's elements along the sharded dim, so that ranks never exchange shapes. ``how`` names an
implementation of :mod:`hap.synthesizer.cost.collective_cost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hap.capture import torch_private
from hap.runtime import messages

Sizes = Sequence[int]

LATE = timedelta(minutes=30)
"""How long collectives wait for late ranks, which may compile, capture or plan meanwhile."""

Waiting = Callable[[], object]
"""Waits until a message has left or arrived."""


class Comm(ABC):
    """One rank's communicator. All ranks call the collectives in the same order.

    Tensors have one dtype and, but for sharded dims, one shape on all ranks. ``sizes`` are those of the ranks'
    shards along a dim, in rank order, and may be 0. ``how`` is an implementation of the collective, one of
    :data:`hap.cluster.link.IMPLEMENTATIONS`.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        """Return the whole tensor of shards: ``(..., sizes[rank], ...) -> (..., sum(sizes), ...)``."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        """Return this rank's shard of the sum of all terms: ``(..., sum(sizes), ...) -> (..., sizes[rank], ...)``."""

    @abstractmethod
    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        """Return the sum of all ranks' terms, which have the full shape."""

    @abstractmethod
    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of all ranks' terms, which have the full shape."""

    def all_reduce_lse(self, x: Tensor, how: str) -> Tensor:
        """Return the log-sum-exp of all ranks' terms, which have the full shape."""
        if how == "terms gathered":
            ones = [1] * self.world_size
            return torch.logsumexp(self.all_gather(x.unsqueeze(0), 0, ones, "padded"), 0)
        largest = self.all_reduce_max(x)
        shift = largest.masked_fill(largest.isinf(), 0.0)  # inf - inf would be nan
        return self.all_reduce((x - shift).exp(), "one shot").log() + shift

    def all_reduce_lse_many(self, xs: Sequence[Tensor], how: str) -> list[Tensor]:
        """Run :meth:`all_reduce_lse` on each tensor, as one collective."""
        return _joined(xs, lambda x: self.all_reduce_lse(x, how))

    @abstractmethod
    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sizes, dst_sizes: Sizes, how: str
    ) -> Tensor:
        """Return this rank's shard along dim ``dst``; ``x`` is its shard along dim ``src``.

        ``(..., src_sizes[rank], ..., sum(dst_sizes), ...) -> (..., sum(src_sizes), ..., dst_sizes[rank], ...)``
        """

    @abstractmethod
    def send(self, x: Tensor, rank: int) -> Waiting:
        """Start to send a contiguous tensor, which must not change before the wait returns.

        Messages between two ranks arrive in the order in which they are sent.
        """

    @abstractmethod
    def receive(self, into: Tensor, rank: int) -> Waiting:
        """Start to receive a tensor of the shape of ``into``, which is contiguous."""

    @abstractmethod
    def texts(self, text: str) -> list[str]:
        """Return the texts that the ranks pass, in rank order."""

    def agree(self, text: str) -> bool:
        """Return whether all ranks pass the same text."""
        return len(set(self.texts(text))) == 1

    @abstractmethod
    def subgroup(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return the communicator of this rank's part.

        A collective call: every rank passes the same parts, which contain each rank of this
        communicator once, in ascending order. A rank's number in the new communicator is its
        index in the part. Parts may be split again, if the ranks of all parts do so together.

        Raises:
            ValueError: the parts are not a partition of the ranks in ascending order.
        """

    # The *_many methods join tensors of one dtype; ``dims`` and ``sizes`` have an entry per tensor.

    def all_gather_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sizes], how: str
    ) -> list[Tensor]:
        """Run :meth:`all_gather` on each tensor, as one collective."""
        counts = _counts(xs, dims, sizes)
        flat = torch.cat([x.reshape(-1) for x in xs])
        totals = [sum(column) for column in zip(*counts, strict=True)]
        by_rank = self.all_gather(flat, 0, totals, how).split(totals)
        pieces = [part.split([c[r] for c in counts]) for r, part in enumerate(by_rank)]
        return [
            torch.cat([
                pieces[r][k].view(_resized(x, dim, size[r])) for r in range(self.world_size)
            ], dim)
            for k, (x, dim, size) in enumerate(zip(xs, dims, sizes, strict=True))
        ]  # fmt: skip

    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sizes], how: str
    ) -> list[Tensor]:
        """Run :meth:`reduce_scatter` on each tensor, as one collective."""
        split = [x.split(list(size), dim) for x, dim, size in zip(xs, dims, sizes, strict=True)]
        order = [parts[r] for r in range(self.world_size) for parts in split]
        totals = [sum(parts[r].numel() for parts in split) for r in range(self.world_size)]
        flat = torch.cat([part.reshape(-1) for part in order])
        mine = self.reduce_scatter(flat, 0, totals, how)
        return _parts_of(mine, [parts[self.rank] for parts in split])

    def all_reduce_many(self, xs: Sequence[Tensor], how: str) -> list[Tensor]:
        """Run :meth:`all_reduce` on each tensor, as one collective."""
        return _joined(xs, lambda x: self.all_reduce(x, how))


class ProcessGroupComm(Comm):
    """Collectives on the default (or a given) process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        whole = _rows_first(x, dim, sum(sizes))
        parts = list(whole.split(list(sizes)))
        mine = x.movedim(dim, 0).contiguous()
        if how == "grouped":
            parts[self.rank].copy_(mine)
            works = [
                dist.broadcast(part, group=self._group, group_src=rank, async_op=True)
                for rank, part in enumerate(parts)
                if part.numel()
            ]
            for work in works:
                work.wait()
            return whole.movedim(0, dim)
        largest = max(sizes)
        if min(sizes) == largest:
            messages.all_gather(whole, mine, self._group)
            return whole.movedim(0, dim)
        padded = mine.new_zeros((largest, *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        gathered = padded.new_empty((self.world_size * largest, *mine.shape[1:]))
        messages.all_gather(gathered, padded, self._group)
        for rank, part in enumerate(parts):
            part.copy_(gathered[rank * largest : rank * largest + sizes[rank]])
        return whole.movedim(0, dim)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        terms = x.movedim(dim, 0).split(list(sizes))
        if how == "grouped":
            # dist.reduce may overwrite the term on every rank; only the owner has the result.
            terms = [term.clone(memory_format=torch.contiguous_format) for term in terms]
            works = [
                dist.reduce(term, group=self._group, group_dst=rank, async_op=True)
                for rank, term in enumerate(terms)
                if term.numel()
            ]
            for work in works:
                work.wait()
            mine: Tensor = terms[self.rank]
            return mine.movedim(0, dim)
        padded = x.new_empty((self.world_size, max(sizes), *terms[0].shape[1:]))
        for rank, term in enumerate(terms):
            padded[rank, : sizes[rank]] = term
            padded[rank, sizes[rank] :] = 0
        return self._own_of(padded)[: sizes[self.rank]].movedim(0, dim)

    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sizes], how: str
    ) -> list[Tensor]:
        if how != "padded":
            return super().reduce_scatter_many(xs, dims, sizes, how)
        split = [x.split(list(size), dim) for x, dim, size in zip(xs, dims, sizes, strict=True)]
        counts = [sum(parts[r].numel() for parts in split) for r in range(self.world_size)]
        padded = xs[0].new_empty((self.world_size, max(counts)))
        for rank, count in enumerate(counts):
            torch.cat([parts[rank].reshape(-1) for parts in split], out=padded[rank, :count])
            padded[rank, count:] = 0
        own = [parts[self.rank] for parts in split]
        return _parts_of(self._own_of(padded), own)

    def _own_of(self, terms: Tensor) -> Tensor:
        """Return this rank's row of the sum of all ranks' ``terms``, which has a row per rank."""
        out = terms.new_empty(terms.shape[1:])
        messages.reduce_scatter(out, terms.flatten(0, 1), self._group)
        return out

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        return self.all_reduce_many([x], how)[0]

    def all_reduce_many(self, xs: Sequence[Tensor], how: str) -> list[Tensor]:
        # One copy in all: the results are parts of the tensor that is reduced in place.
        rest = -sum(x.numel() for x in xs) % self.world_size if how == "two step" else 0
        joined = torch.cat([*(x.reshape(-1) for x in xs), xs[0].new_zeros(rest)])
        if how == "two step":
            messages.all_reduce(joined, self._group)
        else:
            dist.all_reduce(joined, group=self._group)
        return _parts_of(joined, xs)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        out = x.contiguous().clone()
        dist.all_reduce(out, dist.ReduceOp.MAX, group=self._group)
        return out

    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sizes, dst_sizes: Sizes, how: str
    ) -> Tensor:
        if how == "gathered":
            whole = self.all_gather(x, src, src_sizes, "padded")
            return whole.narrow(dst, sum(dst_sizes[: self.rank]), dst_sizes[self.rank])
        pieces = x.split(list(dst_sizes), dim=dst)
        sent = torch.cat([p.reshape(-1) for p in pieces])
        shapes = [list(pieces[self.rank].shape) for _ in src_sizes]
        for shape, size in zip(shapes, src_sizes, strict=True):
            shape[src] = size
        counts = [torch.Size(shape).numel() for shape in shapes]
        received = sent.new_empty(sum(counts))
        messages.all_to_all(received, sent, counts, [p.numel() for p in pieces], self._group)
        parts = received.split(counts)
        return torch.cat([p.view(s) for p, s in zip(parts, shapes, strict=True)], dim=src)

    def send(self, x: Tensor, rank: int) -> Waiting:
        return messages.send(x, rank, self._group).wait

    def receive(self, into: Tensor, rank: int) -> Waiting:
        return messages.receive(into, rank, self._group).wait

    def texts(self, text: str) -> list[str]:
        found = [""] * self.world_size
        dist.all_gather_object(found, text, group=self._group)
        return found

    def subgroup(self, parts: Sequence[Sequence[int]]) -> ProcessGroupComm:
        mine = part_of(parts, self.rank, self.world_size)
        known = dist.get_process_group_ranks(self._group)
        # A group's name contains the number of groups that the rank is in. Programs may have made
        # groups of some ranks alone.
        counts: list[int] = [0] * self.world_size
        dist.all_gather_object(counts, torch_private.process_groups(), group=self._group)
        for _ in range(counts[self.rank], max(counts)):
            dist.new_group([known[self.rank]], backend="gloo", use_local_synchronization=True)
        # Each rank creates only the group of its own part, but every rank creates one, even a
        # single rank: NCCL splits its communicator in one call of all ranks.
        ranks = [known[rank] for rank in mine]
        return ProcessGroupComm(
            dist.new_group(
                ranks, timeout=LATE, use_local_synchronization=True, device_id=_bound_device()
            )
        )


def _bound_device() -> torch.device | None:
    """Return the CUDA device of NCCL's groups.

    A group that is bound to no device connects two ranks at their first message, and each waits for
    the other: stages that first receive would wait for ever.
    """
    if "nccl" not in dist.get_backend_config():
        return None
    return torch.device("cuda", torch.cuda.current_device())


class LocalComm(Comm):
    """The communicator of a world of one rank: every collective returns its input."""

    rank, world_size = 0, 1

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        return x

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sizes, dst_sizes: Sizes, how: str
    ) -> Tensor:
        return x

    def send(self, x: Tensor, rank: int) -> Waiting:
        raise ValueError("a world of one rank has nobody to send to")

    def receive(self, into: Tensor, rank: int) -> Waiting:
        raise ValueError("a world of one rank has nobody to receive from")

    def texts(self, text: str) -> list[str]:
        return [text]

    def subgroup(self, parts: Sequence[Sequence[int]]) -> LocalComm:
        part_of(parts, 0, 1)
        return self


def part_of(parts: Sequence[Sequence[int]], rank: int, world_size: int) -> Sequence[int]:
    """Return the part that contains ``rank``; raises the errors of :meth:`Comm.subgroup`."""
    whole = sorted(r for part in parts for r in part)
    if whole != list(range(world_size)) or any(list(part) != sorted(part) for part in parts):
        raise ValueError(f"{parts} is no partition of {world_size} ranks in ascending order")
    return next(part for part in parts if rank in part)


def _joined(xs: Sequence[Tensor], collective: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run an elementwise collective on several tensors, joined into one."""
    return _parts_of(collective(torch.cat([x.reshape(-1) for x in xs])), xs)


def _parts_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that lie end to end at the start of ``flat``, in the shapes of ``like``."""
    ends = flat[: sum(x.numel() for x in like)].split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(ends, like, strict=True)]


def _counts(xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sizes]) -> list[list[int]]:
    """Return, per tensor, the number of elements of every rank's shard."""
    return [
        [torch.Size(_resized(x, dim, n)).numel() for n in size]
        for x, dim, size in zip(xs, dims, sizes, strict=True)
    ]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _rows_first(x: Tensor, dim: int, rows: int) -> Tensor:
    """Return an uninitialized tensor of ``x``'s shape with ``dim`` in front, of length ``rows``."""
    shape = list(x.shape)
    del shape[dim]
    return x.new_empty((rows, *shape))
