"""How much sooner collectives start where the slow ranks take no part.

A rank with little processor time is late to answer, and all wait for it: on a tenth of a core a
collective of hardly any bytes takes six times as long as on a free one. The figures of collectives
(:mod:`hap.profiler.links`) are those of all ranks. So the ranks of each speed and those that are
faster measure a small collective of each kind, while the others idle; what it takes, by what the
figures say of it, is the *start* of the devices of that speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from hap.cluster import IMPLEMENTATIONS, Cluster
from hap.profiler import beside
from hap.profiler.beside import Ranks
from hap.profiler.exchange import Comm, Range, among
from hap.profiler.links import Price
from hap.profiler.samples import StartsRecord, expected


def measure(
    whole: Comm,
    each_s: Sequence[float],
    limits: Range,
    device: torch.device,
    known: Mapping[str, StartsRecord],
) -> Iterator[str | StartsRecord]:
    """On all ranks: what comes next, and then its record.

    Args:
        whole: the communicator of all the ranks.
        each_s: seconds of the same work, by rank.
    """
    yield "small collectives among faster ranks"
    yield known.get(StartsRecord.key) or _measured(whole, beside.faster(each_s), limits, device)


def _measured(
    whole: Comm, parts: Sequence[Ranks], limits: Range, device: torch.device
) -> StartsRecord:
    found = []
    for ranks in parts:
        comm = beside.only(whole, ranks)
        found += [among(comm, ranks, kind, limits, device, whole) for kind in IMPLEMENTATIONS]
    return StartsRecord(among=tuple(found))


def fitted(cluster: Cluster, record: StartsRecord, price: Price, date: str) -> Cluster:
    """The cluster whose devices have a start; 1 where all others are faster.

    Args:
        cluster: with the figures of collectives among all ranks.
        date: for the provenance.
    """
    ratios: dict[Ranks, list[float]] = {}
    for each in record.among:
        ratio = expected(each.seconds) / price(cluster, each)
        ratios.setdefault(each.groups[0], []).append(ratio)
    found = dict.fromkeys(range(cluster.world_size), (1.0, ""))
    for ranks in sorted(ratios, key=len, reverse=True):  # the fewest are the fastest
        start = median(ratios[ranks])
        off = median(abs(ratio - start) for ratio in ratios[ranks])
        told = f"measured {date}, n={len(ratios[ranks])} among {len(ranks)} ranks, spread {off:.2f}"
        found |= dict.fromkeys(ranks, (min(1.0, round(start, 4)), told))
    devices = list(cluster.devices)
    for alike in cluster.types():
        start, told = max(found[r] for r in alike)
        for r in alike:
            source = {**devices[r].source, **({"start": told} if start < 1 else {})}
            devices[r] = replace(devices[r], start=start, source=source)
    return replace(cluster, devices=tuple(devices))
