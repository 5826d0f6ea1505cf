"""A candidate: a program, its shares, and its predictions, serial and overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hap.ir.axes import Shares
from hap.ir.program import Program
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.machine import PerRank
from hap.synthesizer.cost.serial_cost import Timeline
from hap.synthesizer.schedule.list_scheduler import estimate_s, orders

_WORTH = 1e-3
"""Part of a step; for less than that, no more buckets."""

_LITTLE = 5e-3
"""Part of a step; for what overlapping could save less of, it is not estimated."""

Merit = tuple[float, float]
"""Bytes that lack on the rank that lacks most, seconds of a step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A program and its shares, and what they are predicted to do.

    ``program`` is as the search wrote it, ``serial`` its timeline with nothing overlapped. The
    program that runs is that of ``timeline``. With ``overlap=False`` its collectives stay in place.
    """

    shares: Shares
    serial: Timeline
    price: Callable[[], CostModel]
    overlap: bool = True

    @property
    def program(self) -> Program:
        return self.serial.program

    @cached_property
    def timeline(self) -> Timeline:
        """The fastest schedule that fits the memory; if none does, the one that lacks least."""
        cost = self.price()
        found = list(orders(cost.graph, self.serial, cost))
        first, tried = found[0], found if self.overlap else found[:1]
        least = min(order.step_s for order in tried)
        # The simplest that is about as fast as the fastest, then what runs as it stands: it
        # holds gathered parameters and unreduced gradients for the shortest time.
        fastest = next(o for o in tried if o.step_s <= least * (1 + _WORTH))
        return min((fastest, first), key=lambda o: (_lacking(o, cost).max(), o.step_s))

    @cached_property
    def lacking_bytes(self) -> PerRank:
        """Per rank, by how much the peak exceeds the memory; all zero if it fits."""
        return _lacking(self.timeline, self.price())

    @cached_property
    def lacking_in_series(self) -> PerRank:
        """:attr:`lacking_bytes` with nothing overlapped, which takes no schedule to know."""
        return _lacking(self.serial, self.price())

    @property
    def fits(self) -> bool:
        return not self.lacking_bytes.any()

    @property
    def rank(self) -> Merit:
        """The order of candidates: what fits first, then what is faster."""
        return float(self.lacking_bytes.max()), self.timeline.step_s

    @cached_property
    def estimate(self) -> Merit:
        """About what :attr:`rank` is, for a fraction of its price."""
        in_turn_s = self.serial.step_s
        if not self.overlap or in_turn_s <= self.floor[1] * (1 + _LITTLE):
            return self.floor[0], in_turn_s
        cost = self.price()
        return self.floor[0], estimate_s(cost.graph, self.program, cost)

    @property
    def in_turn(self) -> Merit:
        """:attr:`rank` with nothing overlapped."""
        return float(self.lacking_in_series.max()), self.serial.step_s

    @cached_property
    def floor(self) -> Merit:
        """Rarely above :attr:`estimate`: the busier of computing and communicating."""
        busiest_s = max(float(self.serial.compute_s.max()), self.serial.communicate_s)
        return float(self.lacking_in_series.max()), busiest_s


def fastest(candidates: Iterable[Candidate]) -> Candidate:
    """The first in the order of :attr:`Candidate.estimate`; few are scheduled to find it.

    Raises:
        ValueError: there are none.
    """
    best: Candidate | None = None
    for candidate in sorted(candidates, key=lambda c: c.floor):
        if best is not None and candidate.floor >= best.estimate:
            break
        if best is None or candidate.estimate < best.estimate:
            best = candidate
    if best is None:
        raise ValueError("no candidates")
    return best


def _lacking(line: Timeline, cost: CostModel) -> PerRank:
    room = np.array([d.memory_bytes for d in cost.machine.cluster.devices], dtype=np.float64)
    lacking: PerRank = np.maximum(line.peak_bytes - room, 0.0)
    return lacking
