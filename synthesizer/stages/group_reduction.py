"""Seconds that groups of devices need to reduce the gradients of a stage."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from hap.cluster.topology import Cluster
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.device_selection import CLOSE
from hap.synthesizer.stages.device_blocks import DeviceBlocks, Ranks
from hap.synthesizer.stages.segment_costs import Floats

SIZES = 1 << 20, 1 << 26
"""Bytes at which collectives are priced, for a line through both."""

Line = tuple[float, float]
"""Seconds of a start, and seconds per byte."""

NONE: Line = 0.0, 0.0


class GroupReduction:
    """Prices the collectives that each group needs once per step, in data parallelism."""

    def __init__(self, cluster: Cluster, blocks: DeviceBlocks) -> None:
        self._cluster, self._blocks = cluster, blocks
        self._known: dict[Ranks, tuple[Line, Line]] = {}

    def of(self, ranks: Ranks, nbytes: float) -> tuple[float, float]:
        """Return the seconds before and after the microbatches for parameters of so many bytes.

        Parameters are gathered before and gradients scattered after them, if that takes no longer than an
        all-reduce after them.
        """
        if ranks not in self._known:
            self._known[ranks] = self._lines(ranks) if len(ranks) > 1 else (NONE, NONE)
        before, after = self._known[ranks]
        return before[0] + nbytes * before[1], after[0] + nbytes * after[1]

    def seconds(self, nbytes: Floats) -> Floats:
        """Return the seconds before and after together, of all groups: dims [bytes, group]."""
        start, rate = self._totals
        seconds: Floats = start + nbytes[:, None] * rate
        return seconds

    @cached_property
    def _totals(self) -> Floats:
        """Start and seconds per byte of each group, on the first devices that it may have."""
        found = np.zeros((2, len(self._blocks.vectors)))
        for group in range(1, len(self._blocks.vectors)):
            (ranks,) = self._blocks.ranks([group])
            start_s, more_s = sum(self.of(ranks, 0.0)), sum(self.of(ranks, 1.0))
            found[:, group] = start_s, more_s - start_s
        return found

    def _lines(self, ranks: Ranks) -> tuple[Line, Line]:
        network = HardwareModel(self._cluster.keep(ranks)).network
        even = np.full(len(ranks), 1 / len(ranks))

        def line(kind: str) -> Line:
            few, many = (network.choices(kind, b, even, even)[0].seconds for b in SIZES)
            rate = (many - few) / (SIZES[1] - SIZES[0])
            return max(0.0, few - SIZES[0] * rate), rate

        whole, gather, scatter = map(line, ("all_reduce", "all_gather", "reduce_scatter"))
        apart = gather[1] + scatter[1] <= whole[1] * CLOSE
        return (gather, scatter) if apart else (NONE, whole)
