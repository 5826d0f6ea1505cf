"""Measure collectives among subsets of the ranks, without the slow ones.

A rank with little processor time answers late, and all others wait: with a tenth of a core, a tiny
collective takes six times as long as with a free core. Packing, sending and summing may also take
longer on it than on the link. The figures of collectives (:mod:`hap.profiler.link_figures`) are
those of all ranks. So the ranks of each speed class, with all faster ranks, measure small and
larger collectives of each kind while the others idle. The ratios of their times to the predicted
start-up and byte costs are the *start* and the *traffic* of the devices of that class.
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
"""The largest measured size gives traffic: a link's queue may hide the cost of smaller ones."""

_AT_ONCE = 1e-9  # a negligible start; 0 is invalid
_LEAST_TRAFFIC = 0.01


def measure(
    whole: BenchComm,
    each_s: Sequence[float],
    limits: Range,
    device: torch.device,
    known: Mapping[str, StartsRecord],
) -> Iterator[str | StartsRecord]:
    """Yield a description of the measurement, and then its record; call it on all ranks.

    Args:
        whole: the communicator of all ranks.
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
    """Return the cluster with each device's start and traffic; without records, start is 1.

    Args:
        cluster: the cluster with figures of collectives among all ranks.
        date: date in the provenance.
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
    """Return the figures of one group of ranks from its records, which ascend in size per kind."""
    small = list({each.kind: each for each in reversed(records)}.values())
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
