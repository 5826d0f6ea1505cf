"""Emulate N ranks in one process, with a thread per rank.

Each collective is defined in a few lines. Programs for any world size can be tested without
processes or a network.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hap.runtime.collectives import Comm, Sizes, Waiting, part_of

T = TypeVar("T")

_GRACE_S = 1.0


class EmulatedWorld:
    """Shared state of the ranks: a slot each, and a barrier between writing and reading."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self._children: list[EmulatedWorld] = []
        self._mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {}

    def child(self, size: int) -> EmulatedWorld:
        """Return a world of some of the ranks; it is aborted with this one."""
        world = EmulatedWorld(size)
        self._children.append(world)
        return world

    def abort(self) -> None:
        """Release all ranks that wait here or in a child, now or later."""
        self.barrier.abort()
        for world in self._children:
            world.abort()

    def mail(self, src: int, dst: int) -> queue.SimpleQueue[Tensor]:
        """Return the queue of messages from one rank to another."""
        return self._mail.setdefault((src, dst), queue.SimpleQueue())

    def taken(self, src: int, dst: int) -> Tensor:
        """Wait for the next message; raises ``BrokenBarrierError`` if a rank failed."""
        while True:
            try:
                return self.mail(src, dst).get(timeout=0.1)
            except queue.Empty:
                if self.barrier.broken:
                    raise threading.BrokenBarrierError from None

    def exchange(self, rank: int, item: Any, combine: Callable[[list[Any]], T]) -> T:
        """Collect an item of every rank, and return ``combine`` of all items.

        No rank returns before all have combined: an item may be a parameter, which its rank
        updates in place afterwards.
        """
        self.slots[rank] = item
        self.barrier.wait()
        made = combine(list(self.slots))
        self.barrier.wait()
        return made


class EmulatedComm(Comm):
    """One rank of an emulated world."""

    def __init__(self, world: EmulatedWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world_size = world.size

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        assert x.shape[dim] == sizes[self.rank], (x.shape, dim, sizes, self.rank)
        return self._world.exchange(self.rank, x, lambda parts: torch.cat(parts, dim))

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        start = sum(sizes[: self.rank])
        total = self._world.exchange(self.rank, x, _total)
        return total.narrow(dim, start, sizes[self.rank])

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        return self._world.exchange(self.rank, x, _total)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._world.exchange(self.rank, x, lambda terms: torch.stack(terms).amax(0))

    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sizes, dst_sizes: Sizes, how: str
    ) -> Tensor:
        whole = self.all_gather(x, src, src_sizes, how)
        return whole.narrow(dst, sum(dst_sizes[: self.rank]), dst_sizes[self.rank])

    def send(self, x: Tensor, rank: int) -> Waiting:
        self._world.mail(self.rank, rank).put(x.clone())
        return lambda: None

    def receive(self, into: Tensor, rank: int) -> Waiting:
        return lambda: into.copy_(self._world.taken(rank, self.rank))

    def texts(self, text: str) -> list[str]:
        return self._world.exchange(self.rank, text, list)

    def subgroup(self, parts: Sequence[Sequence[int]]) -> EmulatedComm:
        mine = part_of(parts, self.rank, self.world_size)
        own = self._world.child(len(mine)) if self.rank == mine[0] else None
        world = self._world.exchange(self.rank, own, lambda worlds: worlds[mine[0]])
        return EmulatedComm(world, mine.index(self.rank))


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)


def run_ranks(world_size: int, target: Callable[[Comm], T]) -> list[T]:
    """Run ``target(comm)`` on every rank of an emulated world; return results in rank order.

    Raises:
        Exception: the error of the first rank that failed; the others are released.
    """
    world = EmulatedWorld(world_size)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            # A GPU's backwards share one thread of autograd: a rank that waits there for the others would
            # keep theirs from starting. So each rank runs its own in this thread, as on a CPU.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = target(EmulatedComm(world, rank))
        except threading.BrokenBarrierError:
            return  # another rank failed first and reported its error
        except BaseException as error:
            errors.append((rank, error))
            world.abort()

    threads = [
        threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: ranks end at their next collective, or with the process
        world.abort()
        for thread in threads:
            thread.join(_GRACE_S / world_size)
        raise
    if errors:
        rank, error = errors[0]
        error.add_note(f"on rank {rank}")
        raise error
    return results
