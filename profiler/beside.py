"""How much computing is slowed by a collective that runs beside it.

Packing, sending and adding up take some of what computing would have: cores and memory on a CPU,
multiprocessors on a GPU. Each rank times products alone and beside an all-reduce of all ranks;
what the products lose, by the time of the all-reduce, is the device's *interference*.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hap.profiler.exchange import Comm
from hap.profiler.samples import BesideRecord

Start = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Starts a collective beside what is computed next; what it returns waits for its end."""

WINDOWS = 3
_WANTED_S = 0.4
_FIRST, _LEAST, _MOST = 2**21, 2**16, 2**25
_WIDTH = 384
_LONGER = 1.3
"""Products last that much longer than the all-reduce, so that it runs beside them throughout."""

_MOST_LOST = 0.95


def measure(
    comm: Comm, start: Start, device: torch.device, known: dict[str, BesideRecord]
) -> Iterator[str | BesideRecord]:
    """On all ranks: what comes next, and then its record."""
    yield "computing beside an all-reduce"
    yield known.get(BesideRecord.key) or _measured(comm, start, device)


def _measured(comm: Comm, start: Start, device: torch.device) -> BesideRecord:
    once = _reduce(comm, _FIRST, device)
    once()
    took = _together(comm, device, once)
    nbytes = min(_MOST, max(_LEAST, round(_FIRST * _WANTED_S / took)))
    call = _reduce(comm, nbytes, device)
    call()
    a = torch.randn(_WIDTH, _WIDTH, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    lost: list[float] = []
    for _ in range(WINDOWS):
        reduced_s = _together(comm, device, call)
        each_s = _timed(lambda: products(8), device) / 8
        count = math.ceil(_LONGER * reduced_s / each_s)
        comm.all_reduce_max(torch.zeros((), device=device))  # all start together
        alone_s = _timed(lambda count=count: products(count), device)  # type: ignore[misc]
        comm.all_reduce_max(torch.zeros((), device=device))
        wait = start(call)
        both_s = _timed(lambda count=count: products(count), device)  # type: ignore[misc]
        wait()
        lost.append(min(max((both_s - alone_s) / reduced_s, 0.0), _MOST_LOST))
    told: list[Any] = [None] * comm.world_size
    dist.all_gather_object(told, tuple(lost))
    return BesideRecord(nbytes=nbytes, lost=tuple(told))


def _reduce(comm: Comm, nbytes: int, device: torch.device) -> Callable[[], Any]:
    x = torch.ones(nbytes // 4, device=device)
    return lambda: comm.all_reduce_many([x, x[:1]], "one shot")[0]


def _together(comm: Comm, device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds until the last rank has ended, known to all."""
    comm.all_reduce_max(torch.zeros((), device=device))
    mine = _timed(call, device)
    return float(comm.all_reduce_max(torch.tensor(mine, device=device)))


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        # The stream that computes alone: the collective may still be on its way in another.
        torch.cuda.current_stream(device).synchronize()
