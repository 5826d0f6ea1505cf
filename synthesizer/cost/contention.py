"""The compute and the communication stream of every rank, and their contention.

A collective starts once all ranks have issued it and the earlier ones have ended; it ends on all
ranks at once. Ranks that compute meanwhile slow it down, and it slows them down
(:class:`hap.cluster.device.Contention`). It takes ``drag`` times as long, and ``delay_s`` more per
message, by the slowest rank that computes; computing loses ``interference`` of its undisturbed
seconds. If ranks compute only during a part of the collective, that part of the delay counts.

The host issues operators and collectives one by one, each in its device's ``host_s``. It does not wait
for the device; the device starts none earlier than it was issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank


@dataclass(slots=True)
class Job:
    """A collective. Its start and end are known once the ranks' clocks have reached them."""

    issued_s: PerRank
    messages: int
    """Number of consecutive messages."""
    left_s: float
    """Undisturbed seconds of its remaining communication."""
    free_s: float = 0.0
    """The end of the earlier collectives."""
    start_s: float = 0.0
    end_s: float = 0.0


class Streams:
    """The times at which each rank's streams become free; they advance as work is issued.

    Attributes:
        clock_s: per rank, the end of its computing.
        now_s: the latest of these.
        jobs: all collectives so far, in order.
    """

    def __init__(self, hardware: HardwareModel, *, overlap: bool = True) -> None:
        self.clock_s: PerRank = np.zeros(hardware.cluster.world_size)
        self.now_s = 0.0
        self.jobs: list[Job] = []
        self._overlap = overlap
        self._host_s = hardware.host_s
        self._by_host = bool(hardware.host_s.any())
        self._issued_s: PerRank = np.zeros_like(self.clock_s)  # the end of the host's issuing
        self._lost = hardware.interference
        self._disturbed = bool(hardware.interference.any())
        self._drag, self._delay_s = hardware.drag, hardware.delay_s
        self._delayed = bool(hardware.delay_s.any())
        self._slow(0.0)
        self._computed_s: PerRank = np.zeros_like(self.clock_s)
        self._communicated_s = 0.0
        self._open = 0  # the first job that has not ended
        self._at_s = 0.0  # the time that it has reached

    def ended(self, number: int) -> bool:
        """Return whether a collective has ended by now; true for a negative number."""
        return number < self._open

    @property
    def idle(self) -> bool:
        """Return whether no collective is running now."""
        return self._open == len(self.jobs)

    @property
    def least_s(self) -> PerRank:
        """A lower bound of each rank's end: its computing, and the loss to all communication.

        The simulation may underestimate the loss of a lagging rank.
        """
        least: PerRank = self._computed_s + self._lost * self._communicated_s
        return least

    def compute(self, seconds: PerRank) -> tuple[PerRank, PerRank]:
        """Return (start, end) of an operator that can start at once."""
        self._wait_for_host(seconds > 0)
        start = self.clock_s
        self._computed_s = self._computed_s + seconds
        if self._disturbed and not self.idle:
            left_s = sum(job.left_s for job in self.jobs[self._open :])
            seconds = np.minimum(seconds * self._slowed, seconds + self._lost * left_s)
        self.clock_s = end = start + seconds
        self.now_s = float(end.max())
        while not self.idle and self._advance():
            pass
        return start, end

    def issue(self, seconds: float, messages: int) -> int:
        """Issue a collective; return its number."""
        self._wait_for_host(np.ones_like(self.clock_s))
        self._communicated_s += seconds
        self.jobs.append(Job(self.clock_s, messages, seconds))
        number = len(self.jobs) - 1
        if self._open == number:
            self._begin()
        if not self._overlap:
            self.wait(number)
        return number

    def wait(self, number: int) -> None:
        """Stop computing until a collective has ended."""
        if number < 0:
            return
        while not self.ended(number):
            self._end(self._at_s + self.jobs[self._open].left_s)
        end_s = self.jobs[number].end_s
        self.clock_s = np.maximum(self.clock_s, end_s)
        self.now_s = max(self.now_s, end_s)

    def drain(self) -> None:
        """Stop computing until all collectives have ended."""
        self.wait(len(self.jobs) - 1)

    def _wait_for_host(self, runs: npt.NDArray[Any]) -> None:
        """Issue one operator to the ranks that run it; they wait until it is issued."""
        if self._by_host:
            self._issued_s = self._issued_s + runs * self._host_s
            self.clock_s = np.maximum(self.clock_s, runs * self._issued_s)
            self.now_s = max(self.now_s, float(self.clock_s.max()))

    def _begin(self) -> None:
        job = self.jobs[self._open]
        if self._delayed:
            self._slow(job.messages / job.left_s if job.left_s else 0.0)
        job.free_s = self.jobs[self._open - 1].end_s if self._open else 0.0
        job.start_s = self._at_s = max(job.free_s, float(job.issued_s.max()))

    def _slow(self, messages_per_s: float) -> None:
        """Set the mutual slowdown of the open job and computing."""
        drag = self._drag + self._delay_s * messages_per_s
        worst = sorted({float(d) for d in drag if d > 1}, reverse=True)
        # Slowdown factors while such ranks compute, the largest first, with the ranks.
        self._drags = [(d, np.flatnonzero(drag == d)) for d in worst]
        self._slowed: PerRank = 1 / (1 - self._lost / drag)

    def _end(self, at_s: float) -> None:
        job = self.jobs[self._open]
        job.end_s, job.left_s = at_s, 0.0
        self._open += 1
        if not self.idle:
            self._begin()

    def _advance(self) -> bool:
        """Communicate until now, or until the first collective ends, and then return true."""
        job = self.jobs[self._open]
        for drag, ranks in self._drags:  # first while the slowest compute, then the others
            until_s = float(self.clock_s[ranks].max())
            if until_s > self._at_s:
                done_s = (until_s - self._at_s) / drag
                if done_s >= job.left_s:
                    self._end(self._at_s + job.left_s * drag)
                    return True
                job.left_s -= done_s
                self._at_s = until_s
        if self.now_s - self._at_s >= job.left_s:
            self._end(self._at_s + job.left_s)
            return True
        if self.now_s > self._at_s:
            job.left_s -= self.now_s - self._at_s
            self._at_s = self.now_s
        return False
