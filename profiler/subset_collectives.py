"""Measure collectives among the sets of ranks that plans may keep.

A rank with little processor time answers late, and is slow to pack, send and sum; all others wait
for it. So collectives among all ranks say little about those among the fast ones. Plans leave
devices out by kind (:mod:`hap.synthesizer.device_selection`) and put kinds into stages, so the sets
are the ranks of each speed class alone, and with all faster ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hap.cluster.link import MeasuredSet
from hap.cluster.topology import Cluster
from hap.profiler.contention_bench import ALIKE, Ranks, classes, faster
from hap.profiler.link_figures import LinkResidual, Price, collectives
from hap.profiler.samples import MESSAGE, ExchangeRecord

MOST_SETS = 6
"""Most sets; the first of :func:`participants` are measured."""


def participants(each_s: Sequence[float]) -> list[Ranks]:
    """Return the sets of ranks to measure besides all ranks, each of two ranks or more.

    Args:
        each_s: seconds of the same work, by rank.
    """
    alone = [
        tuple(r for r, s in enumerate(each_s) if fastest <= s < fastest * ALIKE)
        for fastest in classes(each_s)
    ]
    found = dict.fromkeys([*faster(each_s), *alone])
    return [ranks for ranks in found if 1 < len(ranks) < len(each_s)][:MOST_SETS]


def fitted(
    cluster: Cluster, records: Sequence[ExchangeRecord], price: Price, date: str
) -> tuple[tuple[MeasuredSet, ...], list[LinkResidual]]:
    """Return the measured sets of a cluster, and the residuals of their fits.

    Args:
        cluster: the cluster with links fitted to messages.
        records: those of :func:`among_some`.
        date: date in the provenance.
    """
    found, residuals = [], []
    for ranks in dict.fromkeys(each.groups[0] for each in records):
        part = cluster.keep(ranks)
        here = (tuple(range(len(ranks))),)
        own = [replace(each, groups=here) for each in records if each.groups[0] == ranks]
        links, errors = collectives(part, own, price, f"{date} among {len(ranks)} devices")
        found.append(MeasuredSet(frozenset(d.name for d in part.devices), links))
        residuals += [replace(e, record=replace(e.record, groups=(ranks,))) for e in errors]
    return tuple(found), residuals


def among_some(records: Sequence[ExchangeRecord], world_size: int) -> list[ExchangeRecord]:
    """Return the collectives of a single group of some ranks, while the others idled."""
    return [
        each for each in records
        if each.kind != MESSAGE and len(each.groups) == 1 and len(each.groups[0]) < world_size
    ]  # fmt: skip
