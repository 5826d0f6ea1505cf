"""A candidate: a program, its shares, and its predictions, serial and overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hap.ir.axes import Shares
from hap.ir.program import Program
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.serial_cost import Timeline
from hap.synthesizer.schedule.list_scheduler import Orders

_WORTH = 1e-2
"""Fraction of the step that additional buckets must save: the host's work for them has no price."""

_LITTLE = 5e-3
"""Skip the estimate if overlap could save less than this fraction of the step."""

Objective = tuple[float, float]
"""(lacking bytes of the rank that lacks most, seconds of a step); the least is the best."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A program and its shares, with their predictions.

    ``serial`` is the timeline without overlap; ``timeline`` has the program that runs. With
    ``overlap=False`` collectives stay in place. ``room``: bytes of memory per rank.
    """

    shares: Shares
    serial: Timeline
    room: PerRank
    price: Callable[[], CostModel]
    overlap: bool = True

    @property
    def program(self) -> Program:
        return self.serial.program

    @cached_property
    def timeline(self) -> Timeline:
        """The fastest schedule that fits the memory; if none fits, the one with the least excess."""
        orders = self._orders
        tried = list(orders.all()) if self.overlap else [orders.first]
        least = min(order.step_s for order in tried)
        # Take the simplest order that is about as fast as the fastest; next, the unscheduled one,
        # which holds gathered parameters and unreduced gradients for the shortest time.
        fastest = next(o for o in tried if o.step_s <= least * (1 + _WORTH))
        found = [self._in_place] if fastest is orders.first else [
            orders.timeline(fastest), self._in_place
        ]  # fmt: skip
        return min(found, key=lambda o: (self._lacking(o).max(), o.step_s))

    def _lacking(self, line: Timeline) -> PerRank:
        lacking: PerRank = np.maximum(line.peak_bytes - self.room, 0.0)
        return lacking

    @cached_property
    def _orders(self) -> Orders:
        cost = self.price()
        return Orders(cost.graph, self.serial, cost)

    @cached_property
    def _in_place(self) -> Timeline:
        return self._orders.timeline(self._orders.first)

    @cached_property
    def lacking_bytes(self) -> PerRank:
        """Per rank, the excess of the peak over the memory; zero if it fits."""
        return self._lacking(self.timeline)

    @cached_property
    def serial_lacking_bytes(self) -> PerRank:
        """:attr:`lacking_bytes` without overlap, which needs no schedule."""
        return self._lacking(self.serial)

    @property
    def fits(self) -> bool:
        # If the unscheduled order fits, so does the timeline.
        return not self._lacking(self._in_place).any() or not self.lacking_bytes.any()

    @property
    def objective(self) -> Objective:
        """Sort key of candidates: those that fit first, then the faster ones."""
        return float(self.lacking_bytes.max()), self.timeline.step_s

    @cached_property
    def estimated_objective(self) -> Objective:
        """An estimate of :attr:`objective` that is much cheaper to compute."""
        serial_s = self.serial.step_s
        if not self.overlap or serial_s <= self.least_objective[1] * (1 + _LITTLE):
            return self.least_objective[0], serial_s
        return self.least_objective[0], self._orders.estimate_s()

    @property
    def serial_objective(self) -> Objective:
        """:attr:`objective` with nothing overlapped."""
        return float(self.serial_lacking_bytes.max()), self.serial.step_s

    @cached_property
    def least_objective(self) -> Objective:
        """The larger of computing and communicating; rarely above :attr:`estimated_objective`."""
        busiest_s = max(float(self.serial.compute_s.max()), self.serial.communicate_s)
        return float(self.serial_lacking_bytes.max()), busiest_s


def fastest(candidates: Iterable[Candidate]) -> Candidate:
    """Return the least by :attr:`Candidate.estimated_objective`; most candidates need no estimate."""
    best: Candidate | None = None
    for candidate in sorted(candidates, key=lambda c: c.least_objective):
        if best is not None and candidate.least_objective >= best.estimated_objective:
            break
        if best is None or candidate.estimated_objective < best.estimated_objective:
            best = candidate
    if best is None:
        raise ValueError("no candidates")
    return best
