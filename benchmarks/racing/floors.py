"""Lower limits of a cell's step: its products, and the proved bound."""

from __future__ import annotations

import math
from itertools import combinations

from benchmarks.racing.results import Cell
from hap.cluster.topology import Cluster
from hap.ir.graph import Graph
from hap.synthesizer.cost.operator_work import FLOPS, node_work
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.synthesize import Synthesizer

SEARCHES = 40
"""Most searches for one part of a cluster."""

COVERS = "all programs over one mesh axis, with any shares, on any of the devices"


def fill(
    cell: Cell, graph: Graph, cluster: Cluster, optimizer_states: int, *, proved: bool
) -> None:
    """Write a cell's floors into it; ``cluster`` is the whole cluster, as profiled.

    ``proved`` is false for plans over two mesh axes, whose space has no bound.
    """
    cell.arithmetic_s = arithmetic_s(graph, cluster)
    if proved:
        cell.bound_s = bound_s(graph, cluster, optimizer_states)
        cell.covers = COVERS


def arithmetic_s(graph: Graph, cluster: Cluster) -> float:
    """Return the seconds of the step's products spread over all devices without any loss."""
    total = 0.0
    for node in graph.nodes:
        work = node_work(node, graph)
        if node.op in FLOPS:
            total += work.flops / sum(d.rate(work.kind, work.dtype) for d in cluster.devices)
    return total


def bound_s(graph: Graph, cluster: Cluster, optimizer_states: int) -> float:
    """Return a lower bound of the predicted step of all programs, shares and sets of devices.

    A program that uses some of the devices is a program of that part, and pays for that part's
    links. So the least bound of all parts of the cluster
    (:mod:`hap.synthesizer.bounds.lower_bound`) holds for every program. Most parts need no search:
    their products alone exceed the least bound. Others get up to :data:`SEARCHES` more searches
    over boxes of shares, while their bound is the least.
    """
    space = build_space(graph)
    parts = [
        cluster.keep(ranks)
        for size in range(cluster.world_size, 0, -1)
        for ranks in combinations(range(cluster.world_size), size)
    ]
    least = math.inf
    for part in parts:
        if arithmetic_s(graph, part) < least:
            bound_s, _ = Synthesizer(space, part, optimizer_states).proved(least, SEARCHES)
            least = min(least, bound_s)
    return least
