"""Check that collectives overlap computing on the device, and that the losses stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_proof.models import FAMILIES, Prepared, built
from benchmarks.gpu_proof.report import MET, MISSED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from hap.ir.batch import call
from hap.runtime.collectives import Comm
from hap.runtime.hap_module import HapModule
from hap.runtime.lanes import lane_of

PART = "overlap"
ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 18}
WIDTH = {"cuda": 4096, "cpu": 256}
PRODUCTS = 24
STEPS = 3
ROOM = {"cuda": 1e-6, "cpu": 0.0}
"""Relative tolerance of losses: kernels with atomic additions round differently in each run."""


class Intervals(NamedTuple):
    """Seconds since a common start of a collective and of simultaneous computing on one rank."""

    collective: tuple[float, float]
    computing: tuple[float, float]

    @property
    def shared_s(self) -> float:
        """Seconds during which both ran."""
        begin = max(self.collective[0], self.computing[0])
        return max(0.0, min(self.collective[1], self.computing[1]) - begin)


def run(settings: Settings) -> Iterator[Line]:
    """Yield the timeline of one collective, then the losses of whole steps."""
    found: list[Intervals] = settings.on_ranks(side_by_side, settings.ranks)
    shared = min(f.shared_s / min(f.collective[1] - f.collective[0], f.computing[1] - f.computing[0])
                 for f in found)  # fmt: skip
    seen = f"{shared:.0%} of the shorter one, on the rank with the least"
    claim = "an all-reduce runs beside matrix products"
    yield Line(
        part=PART, claim=claim, outcome=MET if shared > 0 else MISSED, seen=seen, aim="> 0 %",
        reason="" if shared > 0 else "the intervals do not intersect",
    )  # fmt: skip
    plans = {f: Prepared.load(settings.folder, f"random-{f}") for f in FAMILIES}
    there = [prepared for prepared in plans.values() if prepared]
    for family in (family for family, prepared in plans.items() if not prepared):
        yield unprepared(PART, f"{family}: same losses")
    ranks = settings.on_ranks(both_ways, settings.ranks, there)
    room = ROOM[settings.device.type]
    for prepared, seen_by_rank in zip(there, zip(*ranks, strict=True), strict=True):
        pairs = [
            pair for beside, serial in seen_by_rank for pair in zip(beside, serial, strict=True)
        ]
        apart = max(abs(a - b) / abs(b) for a, b in pairs)
        yield Line(
            part=PART, claim=f"{prepared.family}: losses of {STEPS} steps, overlapped and serial",
            outcome=MET if apart <= room else MISSED, seen=f"{apart:.1e} apart", aim=f"<= {room:g}",
            reason="" if apart <= room else "the losses differ",
        )  # fmt: skip


def side_by_side(comm: Comm, device: torch.device) -> Intervals:
    """Issue an all-reduce on the communication lane and compute meanwhile."""
    lane = lane_of(comm, device)
    x = torch.ones(ELEMENTS[device.type], device=device)
    w = torch.randn(WIDTH[device.type], WIDTH[device.type], device=device)
    for _ in range(2):  # the first one makes communicators and handles
        clock = _Clock(device)

        def reduce(term: torch.Tensor, clock: _Clock = clock) -> torch.Tensor:
            return clock.timed("collective", lambda: comm.all_reduce(term, "one shot"))

        pending = lane.issue(reduce, x)
        clock.timed("computing", lambda: [torch.mm(w, w) for _ in range(PRODUCTS)])
        total = lane.wait(pending)
        assert float(total[0]) == comm.world_size
        found = clock.intervals()
    return found


class _Clock:
    """Begin and end of named work, by CUDA events on its stream or by the CPU's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._start = self._now()

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        begin = self._now()
        result = work()
        self._marks[name] = begin, self._now()
        return result

    def intervals(self) -> Intervals:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spans = {
            name: (self._since(begin), self._since(end))
            for name, (begin, end) in self._marks.items()
        }
        return Intervals(spans["collective"], spans["computing"])

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _since(self, mark: Any) -> float:
        if self._device.type != "cuda":
            return float(mark - self._start)
        return float(self._start.elapsed_time(mark)) / 1e3


Losses = list[float]


def both_ways(
    comm: Comm, device: torch.device, plans: Sequence[Prepared]
) -> list[tuple[Losses, Losses]]:
    """Return per plan (losses of an overlapped run, losses of a serial one), from equal weights."""
    return [
        (
            _losses(comm, device, prepared, serial=False),
            _losses(comm, device, prepared, serial=True),
        )
        for prepared in plans
    ]


def _losses(comm: Comm, device: torch.device, prepared: Prepared, *, serial: bool) -> Losses:
    model, batch, _, optimizer = built(prepared.family)
    module = HapModule(prepared.plan, model, comm, device, seed=0)
    updates = optimizer(module.parameters())
    mine = prepared.plan.local_batch(batch, comm.rank)
    losses = []
    for _ in range(STEPS):
        if serial:
            with module.in_turn():
                loss = call(module, mine)
                loss.backward()
        else:
            loss = call(module, mine)
            loss.backward()
        losses.append(float(loss.detach()))
        updates.step()
        updates.zero_grad()
    return losses
