"""Measure collectives among subsets of the ranks, without the slow ones.

A rank with little processor time is late to answer, and all wait for it: on a tenth of a core a
collective of hardly any bytes takes six times as long as on a free one. And what it packs, sends and
adds up may take it longer than the link does. The figures of collectives (:mod:`hap.profiler.link_figures`)
are those of all ranks. So the ranks of each speed and those that are faster measure small and
larger collectives of each kind, while the others idle; what they take, by what the figures say of their
starts and of their bytes, are the *start* and the *traffic* of the devices of that speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from hap.cluster.link import IMPLEMENTATIONS
from hap.cluster.topology import Cluster
from hap.profiler import contention_bench
from hap.profiler.collective_bench import BenchComm, Range, among
from hap.profiler.contention_bench import Ranks
from hap.profiler.link_figures import Price
from hap.profiler.samples import ExchangeRecord, StartsRecord, expected

LARGE_BYTES = 2**20, 2**22
"""The largest that is measured tells traffic: links may carry the first part of it from a queue."""

_AT_ONCE = 1e-9  # for a start; 0 is refused
_LEAST_TRAFFIC = 0.01


def measure(
    whole: BenchComm,
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
    yield "collectives among faster ranks"
    yield known.get(StartsRecord.key) or _measured(
        whole, contention_bench.faster(each_s), limits, device
    )


def _measured(
    whole: BenchComm, parts: Sequence[Ranks], limits: Range, device: torch.device
) -> StartsRecord:
    found = []
    for ranks in parts:
        comm = contention_bench.only(whole, ranks)
        for kind in IMPLEMENTATIONS:
            sizes = limits.sizes[0], *LARGE_BYTES
            found += among(comm, ranks, kind, sizes, limits, device, whole)
    return StartsRecord(among=tuple(found))


def fitted(cluster: Cluster, record: StartsRecord, price: Price, date: str) -> Cluster:
    """The cluster whose devices have a start and traffic; 1 where all others are faster.

    Args:
        cluster: with the figures of collectives among all ranks.
        date: for the provenance.
    """
    groups: dict[Ranks, list[ExchangeRecord]] = {}
    for each in record.among:
        groups.setdefault(each.groups[0], []).append(each)
    found: dict[int, _Figures] = dict.fromkeys(range(cluster.world_size), _Figures(1.0, {}, {}))
    for ranks in sorted(groups, key=len, reverse=True):  # the fewest are the fastest
        found |= dict.fromkeys(ranks, _figures(cluster, groups[ranks], price, date))
    devices = list(cluster.devices)
    for alike in cluster.types():
        slowest = max((found[r] for r in alike), key=lambda figures: figures.start)
        for r in alike:
            devices[r] = replace(
                devices[r], start=slowest.start, traffic=slowest.traffic,
                source={**devices[r].source, **slowest.source},
            )  # fmt: skip
    return replace(cluster, devices=tuple(devices))


class _Figures(NamedTuple):
    start: float
    traffic: dict[str, float]
    source: dict[str, str]


def _figures(
    cluster: Cluster, records: Sequence[ExchangeRecord], price: Price, date: str
) -> _Figures:
    """Those of one group of ranks, by its records."""
    small = list({each.kind: each for each in reversed(records)}.values())  # they come in order
    large = list({each.kind: each for each in records if each not in small}.values())
    ratios = [expected(each.seconds) / price(cluster, each) for each in small]
    start = median(ratios)
    soon, at_once = (
        replace(cluster, devices=tuple(replace(d, start=part) for d in cluster.devices))
        for part in (min(1.0, start), _AT_ONCE)
    )
    traffic = {}
    for each in large:
        bytes_s = price(at_once, each)
        start_s = price(soon, each) - bytes_s
        part = (expected(each.seconds) - start_s) / bytes_s
        traffic[each.kind] = round(min(1.0, max(part, _LEAST_TRAFFIC)), 4)
    off = median(abs(ratio - start) for ratio in ratios)
    told = f"measured {date}, n={{}} among {len(records[0].groups[0])} ranks"
    source = {"start": f"{told.format(len(small))}, spread {off:.2f}"} if start < 1 else {}
    source |= {"traffic": told.format(len(large))} if large else {}
    return _Figures(min(1.0, round(start, 4)), traffic, source)
