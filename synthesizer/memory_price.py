"""The price of memory: seconds per byte on the ranks that lack memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.search.bucket_elimination import FORBIDDEN
from hap.synthesizer.search.cost_tables import PICOSECONDS

MOST_S = FORBIDDEN / PICOSECONDS / 4
"""Highest price of all bytes of a program together."""

LOWEST_PRICE, HIGHEST_PRICE = -10, 4
"""Range of the price of a byte: powers of two of the step's time per byte of memory."""

TYPICAL_PRICE = -4
"""The first guess; it was the result for two of four deep models of language and images."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPrice:
    """The ranks that lack memory, and the price of their bytes.

    ``unit_s``: seconds per byte at exponent 0. ``highest``: the highest exponent with which costs
    stay below :data:`FORBIDDEN`.
    """

    ranks: npt.NDArray[np.bool_]
    unit_s: float
    highest: int

    @classmethod
    def of(cls, pair: Candidate, lacking: PerRank, memory: PerRank) -> MemoryPrice:
        """Return the ranks and the price of a program that lacks ``lacking`` of ``memory`` bytes."""
        ranks = lacking > 0
        unit_s, highest = pair.serial.step_s / float(memory.max()), HIGHEST_PRICE
        held = float(pair.serial.peak_bytes[ranks].sum())
        while highest > LOWEST_PRICE and held * unit_s * 2.0**highest > MOST_S:
            highest -= 1
        return cls(ranks, unit_s, highest)

    def at(self, exponent: int) -> PerRank:
        """Return the seconds per byte of each rank."""
        return np.where(self.ranks, self.unit_s * 2.0**exponent, 0.0)


def lowest_fitting(
    fits: Callable[[int], bool], low: int, high: int, first: int | None
) -> int | None:
    """Return the lowest number above ``low`` that fits; ``None`` if ``high`` does not.

    Args:
        fits: monotone; false for ``low``.
        first: the result of a similar search, from which steps double; default: that of a typical one.
    """
    guess = TYPICAL_PRICE if first is None else first
    tried = guess if low < guess < high else high
    going, down, step = tried != high, fits(tried), 1
    if not down and not (going and fits(high)):
        return None
    low, high = (low, tried) if down else (tried, high)
    going &= down or first is not None
    while going and high - low > 1:
        tried = max(high - step, low + 1) if down else min(low + step, high - 1)
        fitted = fits(tried)
        low, high = (low, tried) if fitted else (tried, high)
        going, step = fitted == down, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
