"""The graph of a captured step, before its backward recomputes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hap.capture.recompute import Region, chosen, recomputed
from hap.ir.graph import Graph
from hap.ir.regather import with_backward_aliases


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step, and the parts of it that the user's checkpoints recompute."""

    graph: Graph
    regions: Mapping[str, Region]

    def recomputing(self, mode: str) -> Graph:
        """Return the step whose backward recomputes these parts and those of a mode.

        Args:
            mode: one of :data:`hap.capture.recompute.WAYS`, or nothing.
        """
        regions = dict(self.regions)
        if mode:  # a checkpoint inside of a block adds nothing
            own = chosen(self.graph, mode)
            last = max((region.number for region in own.values()), default=-1)
            regions = {n: r._replace(number=last + 1 + r.number) for n, r in regions.items()} | own
        return with_backward_aliases(recomputed(self.graph, regions))
