"""Measure the contention between computing and collectives.

A collective packs, sends and sums, and so competes with computing for cores and memory on a CPU,
or for multiprocessors on a GPU. A rank that computes also forwards received data late. Ranks of one
speed class compute products, alone and during an all-reduce with all faster ranks, which only
communicate; slower ranks idle, since a plan may leave them out. *Interference* is the time that
products lose, divided by the undisturbed time of the all-reduce. *Drag* is the factor by which its
bytes take longer while devices compute. Consecutive small collectives measure the *delay*: the
seconds by which each message is later, whatever its size, since it waits for ranks that compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from hap.cluster.link import messages
from hap.profiler import collective_bench
from hap.profiler.collective_bench import BenchComm, gathered_from_all
from hap.profiler.samples import BesideRecord

Ranks = tuple[int, ...]
Start = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Starts a collective in the background; returns a function that waits for its end."""

WINDOWS = 3
_WANTED_S = 0.25
_FIRST, _LEAST, _MOST = 2**21, 2**16, 2**25
_WIDTH = 384
_LONGER = 2.0
"""Duration of products relative to the all-reduce alone, which is slower beside them."""

ALIKE = 1.2
"""Ratio of times below which ranks are in one speed class."""

_MOST_LOST, _MOST_DRAG = 0.95, 10.0

_SMALL, _SMALL_BYTES = ("all_reduce", "all_gather", "reduce_scatter"), 2**12
_ROW, _MUCH_LONGER = 4, 8.0
"""Small collectives in a row, and the relative duration of products: these slow down by more."""


def measure(
    comm: BenchComm,
    start: Start,
    each_s: Sequence[float],
    device: torch.device,
    known: dict[str, BesideRecord],
) -> Iterator[str | BesideRecord]:
    """Yield a description of the measurement, and then its record; call it on all ranks.

    Args:
        each_s: seconds of the same work, by rank.
    """
    yield "computing beside an all-reduce"
    yield known.get(BesideRecord.key) or _measured(comm, start, each_s, device)


def _measured(
    whole: BenchComm, start: Start, each_s: Sequence[float], device: torch.device
) -> BesideRecord:
    once = _reduce(whole, _FIRST, device)
    once()
    took = _together(whole, device, once)
    nbytes = min(_MOST, max(_LEAST, round(_FIRST * _WANTED_S / took)))
    a = torch.randn(_WIDTH, _WIDTH, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    products(8)
    product_s = _timed(partial(products, 16), device) / 16
    lost: list[float] = []
    drag: list[float] = []
    delay: list[float] = []
    nested = [*faster(each_s), tuple(range(whole.world_size))]
    for fastest in classes(each_s):
        mine = fastest <= each_s[whole.rank] < fastest * ALIKE
        ranks = next(group for group in nested if each_s.index(fastest) in group)
        comm = only(whole, ranks)
        if whole.rank in ranks:
            pair = _Pair(comm, start, device, products, product_s if mine else math.inf)
            large = [pair.large(nbytes) for _ in range(WINDOWS)]
            drags, delays = split(
                [each[:2] for each in large], [pair.small(kind) for kind in _SMALL]
            )
            if mine:
                lost, drag, delay = [part for _, _, part in large], drags, delays
        _meet(whole, device)
    return BesideRecord(
        nbytes=nbytes, lost=tuple(gathered_from_all(tuple(lost))), drag=tuple(gathered_from_all(tuple(drag))),
        delay=tuple(gathered_from_all(tuple(delay))),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pair:
    """Measures computing and communicating at the same time, on ranks of which some compute.

    ``product_s``: seconds of one product, infinite on a rank that does not compute.
    """

    comm: BenchComm
    start: Start
    device: torch.device
    products: Callable[[int], None]
    product_s: float

    def large(self, nbytes: int) -> tuple[float, float, float]:
        """Return (seconds of a message alone, slowdown beside computing, interference)."""
        call = _reduce(self.comm, nbytes, self.device)
        alone_s = _together(self.comm, self.device, call)
        work = self._work(_LONGER * alone_s)
        _meet(self.comm, self.device)
        computed_s = _timed(work, self.device)
        both_s, slower = self._beside(call, alone_s, work)
        beside_s = min(alone_s, both_s / slower)
        message_s = alone_s / messages("all_reduce", self.comm.world_size)
        return message_s, slower, min(max((both_s - computed_s) / beside_s, 0.0), _MOST_LOST)

    def small(self, kind: str) -> tuple[float, float]:
        """Return (seconds of a message alone, slowdown beside computing) of small collectives."""
        one = collective_bench.small(self.comm, kind, _SMALL_BYTES, self.device)
        one()
        alone_s = collective_bench.consecutive_seconds(one, _ROW, self.device, self.comm)

        def row() -> None:
            for _ in range(_ROW):
                one()

        work = self._work(_MUCH_LONGER * _ROW * alone_s)
        slower = self._beside(row, _ROW * alone_s, work)[1]
        return alone_s / messages(kind, self.comm.world_size), slower

    def _work(self, seconds: float) -> Callable[[], None]:
        """Return products that last for ``seconds``; none on a rank that does not compute."""
        return partial(self.products, math.ceil(seconds / self.product_s))

    def _beside(
        self, call: Callable[[], Any], alone_s: float, work: Callable[[], None]
    ) -> tuple[float, float]:
        """Return (seconds of this rank's work, slowdown of a collective beside it)."""
        _meet(self.comm, self.device)
        clock = _Clock(self.device)
        wait = self.start(partial(clock.after, call))
        both_s = _timed(work, self.device)
        wait()
        ended_s = _last(self.comm, self.device, clock.seconds())
        return both_s, dragged(alone_s, _last(self.comm, self.device, both_s), ended_s)


class _Clock:
    """Records the end of a background collective, which may be long before the wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._ended = self._now()

    def after(self, call: Callable[[], Any]) -> Any:
        result = call()
        self._ended = self._now()
        return result

    def seconds(self) -> float:
        """Return seconds from the creation of this object to the end of the call."""
        if self._device.type != "cuda":
            return float(self._ended - self._begun)
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1e3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # in the current stream: collectives run in their own
        return event


def dragged(alone_s: float, computed_s: float, ended_s: float) -> float:
    """Return the slowdown of a collective that takes ``alone_s`` undisturbed, and ended after
    ``ended_s`` beside computing that ended after ``computed_s``.
    """
    if ended_s <= computed_s:
        found = ended_s / alone_s
    else:  # the rest of the collective ran undisturbed
        done_s = alone_s - (ended_s - computed_s)
        found = computed_s / done_s if done_s > 0 else _MOST_DRAG
    return min(max(found, 1.0), _MOST_DRAG)


def split(
    large: Sequence[tuple[float, float]], small: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return (drag by each large collective, delay by each small one).

    The model: a collective with messages of ``s`` seconds each slows down by ``drag + delay / s``.

    Args:
        large, small: (seconds of a message alone, slowdown beside computing).
    """
    whole_s, slower = (median(each) for each in zip(*large, strict=True))
    delays = [
        max((times - slower) / (1 / alone_s - 1 / whole_s), 0.0) if alone_s < whole_s else 0.0
        for alone_s, times in small
    ]
    delay_s = median(delays)
    return [max(times - delay_s / alone_s, 1.0) for alone_s, times in large], delays


def classes(each_s: Sequence[float]) -> list[float]:
    """Return the seconds of the fastest rank of each speed class, the fastest class first."""
    found: list[float] = []
    for seconds in sorted(each_s):
        if not found or seconds >= found[-1] * ALIKE:
            found.append(seconds)
    return found


def faster(each_s: Sequence[float]) -> list[Ranks]:
    """Return, for each speed class but the slowest, its ranks and all faster ones, if at least two.

    Args:
        each_s: seconds of the same work, by rank.
    """
    limits = classes(each_s)[1:]
    found = [tuple(r for r, s in enumerate(each_s) if s < limit) for limit in limits]
    return [ranks for ranks in found if len(ranks) > 1]


def only(whole: BenchComm, ranks: Ranks) -> BenchComm:
    """Return the communicator of ``ranks`` on these; that of all other ranks on the others."""
    others = tuple(r for r in range(whole.world_size) if r not in ranks)
    return whole.subgroup((ranks, others)) if others else whole


def _reduce(comm: BenchComm, nbytes: int, device: torch.device) -> Callable[[], Any]:
    x = torch.ones(nbytes // 4, device=device)
    return lambda: comm.all_reduce_many([x, x[:1]], "one shot")[0]


def _meet(comm: BenchComm, device: torch.device) -> None:
    """Wait for all ranks."""
    comm.all_reduce_max(torch.zeros((), device=device))
    _synchronize(device)


def _last(comm: BenchComm, device: torch.device, seconds: float) -> float:
    """Return the maximum of all ranks' seconds."""
    return float(comm.all_reduce_max(torch.tensor(seconds, device=device)))


def _together(comm: BenchComm, device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds until the last rank has ended, the same on all ranks."""
    _meet(comm, device)
    return _last(comm, device, _timed(call, device))


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        # Only the computing stream: a collective may still run in another.
        torch.cuda.current_stream(device).synchronize()
