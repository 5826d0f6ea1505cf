"""Align shares to blocks, such as a cache line, that kernels handle efficiently.

A product with rows that do not begin on vectors writes them in pieces, and tensor cores need multiples
of eight. The cost model ignores that: shares are rounded where the predicted cost is negligible.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.operator_work import FLOPS
from hap.synthesizer.shares.share_task import proportional
from hap.synthesizer.synthesize import Synthesizer

BLOCK_BYTES = 64
"""Size of a vector register, and of a cache line."""

_MOST_MORE = 0.02
"""Largest relative growth of a rank's share; axes of few blocks are therefore not rounded."""

_WORTH = 0.01
"""Largest relative increase of the predicted step."""


def aligned(synthesizer: Synthesizer, pair: Candidate) -> Candidate:
    """Return the pair with shares of whole blocks if it is nearly as fast; else the pair."""
    space = synthesizer.space
    shares = in_blocks(pair.shares, blocks(space.graph, space.axes))
    if shares == pair.shares:
        return pair
    found = replace(synthesizer.judge(pair.program, shares), overlap=pair.overlap)
    most_s = pair.timeline.step_s * (1 + _WORTH)
    return found if found.objective <= (pair.objective[0], most_s) else pair


def blocks(graph: Graph, axes: Axes) -> dict[str, int]:
    """Return units per block of the axes along which a product writes."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.outputs if node.op in FLOPS else ():
            tensor = graph.tensors[name] if name else None
            axis = axes.axis(tensor.name, len(tensor.shape) - 1) if tensor else None
            if tensor and axis and tensor.numel:
                elements = max(1, BLOCK_BYTES * tensor.numel // tensor.nbytes)
                granule = tensor.shape[-1] // axis.units
                units = elements // gcd(elements, granule)
                found[axis.name] = max(units, found.get(axis.name, 1))
    return found


def in_blocks(shares: Shares, blocks: dict[str, int]) -> Shares:
    """Round shares to blocks where no rank's share grows much; the largest share takes the rest."""
    found = dict(shares)
    for axis, units in blocks.items():
        before = np.array(shares[axis])
        count, remainder = divmod(int(before.sum()), units)
        after = np.array(proportional(count, before.astype(np.float64))) * units
        after[after.argmax()] += remainder
        if (after <= before * (1 + _MOST_MORE)).all():
            found[axis] = tuple(after.tolist())
    return found
