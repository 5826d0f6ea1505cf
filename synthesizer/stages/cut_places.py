"""Where a step may be cut into stages: places where few bytes cross."""

from __future__ import annotations

import numpy as np

from hap.errors import PlanError
from hap.ir.graph import Graph
from hap.ir.stages import crossing, cut_stages, repeatable
from hap.synthesizer.cost.operator_work import node_work

CUTS = 48
"""Most places of a cut that are tried: in each part of the work the one where the fewest bytes cross."""


def cut_places(graph: Graph) -> tuple[str, ...]:
    """Return the forward operators after which the step may be cut; others are dominated."""
    crossed, skip = crossing(graph), repeatable(graph)
    forward = [n for n in graph.nodes if n.name not in graph.backward and n.name not in skip]
    work = np.cumsum([node_work(n, graph).flops for n in forward])
    work = work / max(float(work[-1]), 1.0)
    names = list(crossed)
    nbytes = [sum(graph.tensors[t].nbytes for t in crossed[n]) for n in names]
    best: dict[int, int] = {}
    for k in sorted(range(len(names)), key=lambda k: (nbytes[k], k)):
        best.setdefault(round(float(work[k]) * 2 * CUTS), k)
    kept = sorted(sorted(best.values(), key=lambda k: (nbytes[k], k))[:CUTS])
    return possible(graph, tuple(names[k] for k in kept))


def possible(graph: Graph, places: tuple[str, ...]) -> tuple[str, ...]:
    """Return the places without those at which a sum over the microbatches would cross."""
    if _can_cut(graph, places):
        return places
    return tuple(p for p in places if _can_cut(graph, (p,)))


def _can_cut(graph: Graph, places: tuple[str, ...]) -> bool:
    try:
        cut_stages(graph, places)
    except PlanError:
        return False
    return True
