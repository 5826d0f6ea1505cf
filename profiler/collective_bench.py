"""Time each implementation of each collective, and messages between ranks.

All ranks run the same list in the same order. Sizes that would take too long are left out; the
time of the slowest rank decides that, and all ranks know it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hap.cluster.link import IMPLEMENTATIONS
from hap.ir.hierarchical import exists, regular
from hap.profiler.samples import MESSAGE, ExchangeRecord, exchange_key
from hap.units import format_bytes

WIDTH = 64
"""Elements of a row; shards are whole rows."""

_SHORT_S, _MANY = 0.02, 16  # short calls are timed in a row: target duration, most calls
_BRIEF_S, _OFTEN = 0.08, 3  # shorter collectives get this many times the rounds
_SKEWED_BYTES = 2**18  # smaller collectives are not measured with skewed shards
_COMPUTE_S = 0.012
_LEAST_S = 1e-7  # smallest time that a measurement returns
_BOOT, _TIME = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
_PATIENT = 4
_NOISY, _AGAIN = 0.2, 3  # relative standard error that needs more rounds; most times to add them
_LONG = 4  # a call longer than this part (1/_LONG) of the limit gets only two rounds


class BenchComm(Protocol):
    """A rank's end of the measured collectives (:class:`hap.runtime.collectives.Comm`)."""

    rank: int
    world_size: int

    def __hash__(self) -> int: ...
    def subgroup(self, parts: Sequence[Sequence[int]]) -> BenchComm: ...
    def all_gather_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], how: str
    ) -> list[Tensor]: ...
    def reduce_scatter_many(
        self, xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int]], how: str
    ) -> list[Tensor]: ...
    def all_reduce_many(self, xs: Sequence[Tensor], how: str) -> list[Tensor]: ...
    def all_reduce_lse_many(self, xs: Sequence[Tensor], how: str) -> list[Tensor]: ...
    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sequence[int], dst_sizes: Sequence[int],
        how: str,
    ) -> Tensor: ...  # fmt: skip
    def all_reduce_max(self, x: Tensor) -> Tensor: ...


def gathered_from_all(mine: Any) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Sizes of whole tensors in bytes, rounds per size, and the longest time of one call."""

    sizes: tuple[int, ...]
    rounds: int
    longest_s: float


FULL = Range(sizes=(2**12, 2**16, 2**19, 2**22, 2**25), rounds=4, longest_s=0.5)
QUICK = Range(sizes=(2**14, 2**18, 2**21), rounds=3, longest_s=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Groups of ranks that run a collective in parallel, and the communicator of this rank's.

    Attributes:
        comm: on a rank of no group, a communicator that is not used.
        counts: number of ranks of each machine; one entry if the groups are inside machines.
        skewed: whether unequal shards are measured, too.
    """

    comm: BenchComm
    groups: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    skewed: bool = True


def total(rings: Sequence[Ring], limits: Range) -> int:
    """Return the number of records of collectives if no size is left out."""
    return sum(len(_sizes(case, limits)) for ring in rings for case in _cases(ring))


def messages(
    ranks: int,
    limits: Range,
    device: torch.device,
    known: dict[str, ExchangeRecord],
    whole: BenchComm,
) -> Iterator[str | ExchangeRecord | None]:
    """Measure messages between neighbours; otherwise like :func:`measure`."""
    for pair in pairs(ranks):
        one = partial(_message, pair, limits, device, known, whole)
        yield from _grow(f"messages of ranks {pair[0]} and {pair[1]}", one, limits.sizes, limits)


def measure(
    rings: Sequence[Ring],
    limits: Range,
    device: torch.device,
    known: dict[str, ExchangeRecord],
    whole: BenchComm,
) -> Iterator[str | ExchangeRecord | None]:
    """Yield, for each measurement, its description and then its record; call it on all ranks.

    None replaces both for a size that is left out.

    Args:
        known: records of an earlier run by key; they are not measured again.
        whole: the communicator of all ranks.
    """
    for ring in rings:
        for case in _cases(ring):
            one = partial(_collective, ring, *case, limits, device, known, whole)
            yield from _grow(" ".join(case), one, _sizes(case, limits), limits)


def _grow(
    what: str, one: Callable[[int], ExchangeRecord], sizes: Sequence[int], limits: Range
) -> Iterator[str | ExchangeRecord | None]:
    """Measure sizes in ascending order, leaving out those that would take too long.

    The limit is four times as long while latency dominates: the bandwidth would be a guess.
    """
    made: list[ExchangeRecord] = []
    for nbytes in sizes:
        patience = 1 if _bandwidth_bound(made) else _PATIENT
        if _expected_s(made, nbytes) > patience * limits.longest_s:
            yield None
            continue
        yield f"{what}, {format_bytes(nbytes)}"
        made.append(one(nbytes))
        yield made[-1]


def _bandwidth_bound(made: Sequence[ExchangeRecord]) -> bool:
    """Return whether the largest measured size takes more than twice as long as the smallest."""
    return len(made) > 1 and median(made[-1].seconds) > 2 * median(made[0].seconds)


def _expected_s(made: Sequence[ExchangeRecord], nbytes: int) -> float:
    """Extrapolate the seconds of a size through the last two; a single one may be all latency."""
    if len(made) < 2:
        return median(made[0].seconds) if made else 0.0
    (x, s), (y, t) = ((r.nbytes, median(r.seconds)) for r in made[-2:])
    return t + max(0.0, t - s) / (y - x) * (nbytes - y)


def pairs(ranks: int) -> list[tuple[int, int]]:
    """Return each rank and the next one, the links of the ring in rank order; at most 16."""
    if ranks < 2:
        return []
    every = [(r, (r + 1) % ranks) for r in range(ranks if ranks > 2 else 1)]
    return every[:16]


def _cases(ring: Ring) -> Iterator[tuple[str, str, str]]:
    """Yield (collective, implementation, skew of the shards)."""
    stages = exists(ring.counts)
    for kind, ways in IMPLEMENTATIONS.items():
        for how in ways:
            possible = stages and (kind != "all_to_all" or regular(ring.counts))
            if how == "hierarchical" and not possible:
                continue
            yield kind, how, "even"
            if ring.skewed and not kind.startswith("all_reduce"):
                yield kind, how, "half on the first"


def _sizes(case: tuple[str, str, str], limits: Range) -> list[int]:
    skewed = case[2] != "even"
    return [nbytes for nbytes in limits.sizes if nbytes >= _SKEWED_BYTES or not skewed]


def parts(rows: int, ranks: int, skew: str) -> list[int]:
    """Return the rows of each rank: an even split, or half of all rows on the first rank."""
    first = rows // 2 if skew != "even" and ranks > 1 else -1
    if first < 0:
        return [rows // ranks + (k < rows % ranks) for k in range(ranks)]
    rest = rows - first
    return [first, *(rest // (ranks - 1) + (k < rest % (ranks - 1)) for k in range(ranks - 1))]


def small(comm: BenchComm, kind: str, nbytes: int, device: torch.device) -> Callable[[], object]:
    """Return a call of a collective's first implementation: about ``nbytes``, even shards."""
    n, how = comm.world_size, IMPLEMENTATIONS[kind][0]
    half, even = parts(_rows(kind, nbytes, n) // 2, n, "even"), parts(WIDTH, n, "even")
    return _call(comm, kind, how, half, even, device)


def consecutive_seconds(
    call: Callable[[], object], count: int, device: torch.device, whole: BenchComm
) -> float:
    """Return the mean seconds of ``count`` consecutive calls, the same value on all ranks."""
    return _last([_one(call, count, device, whole)], count, device, whole)[0]


def _collective(
    ring: Ring, kind: str, how: str, skew: str, limits: Range, device: torch.device,
    known: dict[str, ExchangeRecord], whole: BenchComm, nbytes: int,
) -> ExchangeRecord:  # fmt: skip
    n = len(ring.groups[0])
    rows = _rows(kind, nbytes, n)
    nbytes = rows * WIDTH * 4
    key = exchange_key(kind, how, nbytes, ring.groups, skew)
    if key in known:
        return known[key]
    half, even = parts(rows // 2, n, skew), parts(WIDTH, n, "even")
    takes_part = any(whole.rank in group for group in ring.groups)
    call = _call(ring.comm, kind, how, half, even, device) if takes_part else None
    seconds = _seconds(call, limits, device, whole, _OFTEN)
    src, dst = _ends(kind, half, even)
    return ExchangeRecord(
        kind=kind, how=how, nbytes=nbytes, groups=ring.groups, skew=skew, seconds=seconds,
        src=src, dst=dst,
    )  # fmt: skip


def _rows(kind: str, nbytes: int, ranks: int) -> int:
    """Return the rows of two tensors together: about ``nbytes``, and some for each rank."""
    rows = max(2 * ranks, nbytes // (WIDTH * 4 * 2)) * 2
    return max(4 * ranks, rows) if kind == "all_to_all" else rows


def _ends(
    kind: str, half: Sequence[int], even: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the ranks' fractions of the tensor before and after the collective."""
    split, other = (tuple((np.array(x) / sum(x)).tolist()) for x in (half, even))
    ones = (1.0,) * len(half)
    return {
        "all_gather": (split, ones), "reduce_scatter": (ones, split), "all_to_all": (split, other)
    }.get(kind, (ones, ones))  # fmt: skip


def _call(
    comm: BenchComm, kind: str, how: str, half: list[int], even: list[int], device: torch.device
) -> Callable[[], object]:
    """Return a call of a fused collective of two tensors, as in programs; all-to-all has one."""
    n, rank = comm.world_size, comm.rank
    if n == 1:
        return lambda: None
    sizes = half[:n] if len(half) == n else parts(sum(half), n, "even")
    rows = sum(sizes)
    if kind == "all_gather":
        mine = [torch.ones(sizes[rank], WIDTH, device=device) for _ in range(2)]
        return lambda: comm.all_gather_many(mine, [0, 0], [sizes, sizes], how)
    if kind == "all_to_all":
        wide = torch.ones(2 * sizes[rank], WIDTH, device=device)
        doubled = [2 * size for size in sizes]
        return lambda: comm.all_to_all(wide, 0, 1, doubled, even, how)
    terms = [torch.ones(rows, WIDTH, device=device) for _ in range(2)]
    if kind == "reduce_scatter":
        return lambda: comm.reduce_scatter_many(terms, [0, 0], [sizes, sizes], how)
    if kind == "all_reduce":
        return lambda: comm.all_reduce_many(terms, how)
    return lambda: comm.all_reduce_lse_many(terms, how)


def _message(
    pair: tuple[int, int], limits: Range, device: torch.device,
    known: dict[str, ExchangeRecord], whole: BenchComm, nbytes: int,
) -> ExchangeRecord:  # fmt: skip
    """Measure a round trip, so that one clock suffices; a message takes half of it."""
    key = exchange_key(MESSAGE, "", nbytes, [pair], "")
    if key in known:
        return known[key]
    a, b = pair
    x = torch.ones(nbytes // 4, device=device)

    def call() -> None:
        if whole.rank == a:
            dist.send(x, b)
            dist.recv(x, b)
        elif whole.rank == b:
            dist.recv(x, a)
            dist.send(x, a)

    seconds = _seconds(call, limits, device, whole, 1)
    return ExchangeRecord(
        kind=MESSAGE, how="", nbytes=nbytes, groups=(pair,), skew="",
        seconds=tuple(s / 2 for s in seconds), src=(1.0, 1.0), dst=(1.0, 1.0),
    )  # fmt: skip


def _seconds(
    call: Callable[[], object] | None,
    limits: Range,
    device: torch.device,
    whole: BenchComm,
    often: int,
) -> tuple[float, ...]:
    """Return seconds, per round, until the last rank has its result; idle ranks pass no call."""
    if call is not None:
        call()  # creates connections, allocates memory
    once = _last([_one(call, 1, device, whole)], 1, device, whole)[0]
    # Run short calls in a row: a throttled rank may be paused for longer than one call.
    count = max(1, min(_MANY, round(_SHORT_S / max(once, 1e-6))))
    long = once > limits.longest_s / _LONG
    rounds = 2 if long else limits.rounds * (often if once < _BRIEF_S else 1)
    found = [once] if long else []
    for _ in range(1 + _AGAIN):
        mine = [_one(call, count, device, whole) for _ in range(rounds)]
        found += _last(mine, count, device, whole)
        if not too_noisy(found):
            break
    return tuple(found)


def too_noisy(seconds: Sequence[float]) -> bool:
    """Return whether the mean of repeats is uncertain, for example because of lost packets."""
    return len(seconds) > 1 and stdev(seconds) > _NOISY * fmean(seconds) * len(seconds) ** 0.5


def _one(
    call: Callable[[], object] | None, count: int, device: torch.device, whole: BenchComm
) -> tuple[float, float]:
    """Return (start plus computing time alone, time of the last result) of this rank.

    On a CPU each call follows some computing, as in a step: caches hold other data, and a
    throttled rank has little processor time left. Ranks of one machine share a clock, and times
    are that clock's. Otherwise they count from this rank's start, and so include the wait for
    ranks that start late.
    """
    busy = _busy() if device.type == "cpu" and call is not None else None
    one_clock = _one_clock(device, whole)
    whole.all_reduce_max(torch.zeros((), device=device))  # a barrier
    _synchronize(device)
    if call is None:
        return 0.0, 0.0
    start, computed = time.perf_counter(), 0.0
    for _ in range(count):
        if busy is not None:
            begun = time.perf_counter()
            busy()
            computed += time.perf_counter() - begun
        call()
    _synchronize(device)
    origin = 0.0 if one_clock else start
    return start - origin + computed, time.perf_counter() - origin


@cache
def _one_clock(device: torch.device, whole: BenchComm) -> bool:
    """Return whether all ranks share a clock: one machine, and one time namespace."""
    try:
        name = _BOOT.read_text() + _TIME.readlink().name
    except OSError:  # not Linux, or these files are hidden: assume a clock per rank
        name = str(whole.rank)
    number = float(crc32(name.encode()))
    both = torch.tensor([number, -number], dtype=torch.float64, device=device)
    largest, least = whole.all_reduce_max(both).tolist()
    return bool(largest == -least)


@cache
def _busy() -> Callable[[], object]:
    """Return a function that computes matrix products for about :data:`_COMPUTE_S`."""
    a = torch.randn(256, 256)
    torch.mm(a, a)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < 10 * _COMPUTE_S:
        torch.mm(a, a)
        count += 1
    each = range(max(1, round(count / 10)))

    def products() -> None:
        for _ in each:
            torch.mm(a, a)

    return products


def _last(
    rounds: list[tuple[float, float]], count: int, device: torch.device, whole: BenchComm
) -> list[float]:
    """Return the seconds per call of each round, from the end of the last rank's computing to
    the last result, the same on all ranks.
    """
    found = whole.all_reduce_max(torch.tensor(rounds, dtype=torch.float64, device=device)).tolist()
    return [max((ended - computed) / count, _LEAST_S) for computed, ended in found]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
