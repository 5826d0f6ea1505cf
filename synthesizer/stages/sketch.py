"""A pipeline before its stages are searched."""

from __future__ import annotations

from dataclasses import dataclass

from hap.synthesizer.stages.device_blocks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """An estimated pipeline: groups in order, the last operator of each stage but the last.

    ``least_s``: no pipeline of this sketch is predicted to be faster. ``fills``: the part of its memory that each group
    needs by the estimate. ``indices``: each group in the search, and ``ideal_s`` the
    seconds of a microbatch on it if its devices were one of the sum of their speeds.
    """

    groups: tuple[Ranks, ...]
    cuts: tuple[str, ...]
    microbatches: int
    estimate_s: float
    least_s: float
    fills: tuple[float, ...] = ()
    indices: tuple[int, ...] = ()
    ideal_s: tuple[float, ...] = ()

    @property
    def lacking(self) -> bool:
        """Whether devices lack memory by the estimate."""
        return any(fill > 1 for fill in self.fills)
