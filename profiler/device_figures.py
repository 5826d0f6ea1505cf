"""Fit devices to records of operators: similar ranks form a type, which is fitted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from hap.cluster.device import Device
from hap.cluster.work import ELEMENTWISE, PRODUCTS
from hap.profiler.fit import Timing, fit_device, predict
from hap.profiler.probes import HOST, LAUNCH, LOOPED, UPDATE
from hap.profiler.samples import BesideRecord, OpRecord, RankInfo, middle, spread
from hap.units import format_bytes

ALIKE = 0.05
"""Relative difference of speeds below which ranks are one type; a larger spread allows more."""

_MEMORY_ALIKE = 0.1
_UNLIKE = 0.2  # relative deviation of products of different shapes from a common rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResidual:
    """One operator on one type of device: measured and predicted seconds."""

    name: str
    kind: str
    measured_s: float
    predicted_s: float
    spread: float

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """Similar ranks, and the fitted device of each of them."""

    ranks: tuple[int, ...]
    device: Device
    residuals: tuple[DeviceResidual, ...]


def types(ranks: Sequence[RankInfo], records: Sequence[OpRecord], date: str) -> list[Type]:
    """Return the types of devices, in the order of their first ranks.

    Args:
        date: date in the provenance of the figures.
    """
    groups: list[list[int]] = []
    for rank in range(len(ranks)):
        home = next((g for g in groups if _alike(ranks, records, g[0], rank)), None)
        if home is None:
            groups.append([rank])
        else:
            home.append(rank)
    return [_fitted(ranks, records, group, date) for group in groups]


def _alike(ranks: Sequence[RankInfo], records: Sequence[OpRecord], a: int, b: int) -> bool:
    if ranks[a].kind != ranks[b].kind:
        return False
    if abs(math.log(ranks[a].memory_bytes / ranks[b].memory_bytes)) > _MEMORY_ALIKE:
        return False
    ratios = [math.log(middle(r.seconds[a]) / middle(r.seconds[b])) for r in records]
    center = median(ratios)
    # Standard error of the median of a normal sample, from its median absolute deviation.
    error = 1.25 * 1.48 * median(abs(x - center) for x in ratios) / math.sqrt(len(ratios))
    return abs(center) <= max(ALIKE, 2 * error)


def _fitted(
    ranks: Sequence[RankInfo], records: Sequence[OpRecord], group: list[int], date: str
) -> Type:
    """Fit one device to the trimmed means over all windows of a group's ranks."""
    host = next((r for r in records if r.name == HOST), None)
    host_s = middle([s for rank in group for s in host.seconds[rank]]) if host else 0.0
    records, later_s, relaunch = _as_in_a_step([r for r in records if r is not host], group)
    windows = [[s for rank in group for s in record.seconds[rank]] for record in records]
    took_s = [
        middle(seconds) + later_s[record.name]
        for record, seconds in zip(records, windows, strict=True)
    ]
    samples = [
        Timing(works=[record.work], seconds=s, noise=spread(seconds), weight=weight)
        for record, s, seconds, weight in zip(
            records, took_s, windows, _weights(records, took_s), strict=True
        )
    ]
    memory = min(ranks[rank].memory_bytes for rank in group)
    start = replace(prior(samples, ranks[group[0]].kind, memory), relaunch=relaunch)
    device = fit_device(
        samples, prior=start, source="", kinds=tuple(start.efficiency), ridge=0.001, within=_UNLIKE
    )
    residuals = tuple(
        DeviceResidual(
            name=record.name, kind=f"{record.work.kind} {record.work.dtype}",
            measured_s=sample.seconds, predicted_s=predict(device, sample.works),
            spread=spread(seconds),
        )
        for record, sample, seconds in zip(records, samples, windows, strict=True)
    )  # fmt: skip
    device = replace(device, host_s=host_s)
    device = replace(device, source=_provenance(device, residuals, date, len(group)))
    return Type(ranks=tuple(group), device=device, residuals=residuals)


def _weights(records: Sequence[OpRecord], took_s: Sequence[float]) -> list[float]:
    """Return weights proportional to time within a kind: a step's time is a sum of seconds."""
    kinds = [(record.work.kind, record.work.dtype) for record in records]
    means = {
        kind: fmean(s for k, s in zip(kinds, took_s, strict=True) if k == kind)
        for kind in set(kinds)
    }
    return [s / means[kind] for kind, s in zip(kinds, took_s, strict=True)]


def _as_in_a_step(
    records: Sequence[OpRecord], group: Sequence[int]
) -> tuple[list[OpRecord], dict[str, float], float]:
    """Return (records to fit, seconds by which each operator is slower in a step than in its loop,
    launch cost of an update relative to that of an operator).

    An operator starts sooner in a loop. An update does not, since its loop is like a step.
    """
    took_s = {r.name: middle([s for rank in group for s in r.seconds[rank]]) for r in records}
    launch_s = took_s[LAUNCH]
    sooner_s = max(0.0, launch_s - took_s.get(LOOPED, launch_s))
    relaunch = round(min(1.0, took_s.get(UPDATE, launch_s) / launch_s), 4)
    fitted = [r for r in records if r.name not in (LOOPED, UPDATE)]
    return fitted, {
        r.name: 0.0 if r.name == LAUNCH or r.work.kind == "update" else sooner_s for r in fitted
    }, relaunch  # fmt: skip


def prior(samples: Sequence[Timing], kind: str, memory_bytes: int) -> Device:
    """Return a first guess: each figure is estimated from the samples that it may bind."""
    rates: dict[str, list[float]] = {}
    kinds: dict[tuple[str, str], list[float]] = {}
    traffic, least = [], math.inf
    for sample in samples:
        (work,) = sample.works
        least = min(least, sample.seconds)
        if work.kind == "matmul":
            rates.setdefault(work.dtype, []).append(work.flops / sample.seconds)
        elif work.kind == "memory":
            traffic.append(work.bytes / sample.seconds)
        else:
            kinds.setdefault((work.kind, work.dtype), []).append(work.flops / sample.seconds)
    flops = {dtype: max(found) for dtype, found in rates.items()}
    return Device(
        name=kind, kind=kind, node="", memory_bytes=memory_bytes, flops_per_s=flops,
        memory_bytes_per_s=max(traffic), operand_bytes_per_s=max(traffic) / 4, launch_s=least,
        efficiency={  # relative to products of the same dtype
            kind: median(kinds[kind, dtype]) / flops.get(dtype, flops["float32"])
            for kind, dtype in sorted(kinds, key=lambda k: (*PRODUCTS, *ELEMENTWISE).index(k[0]))
        },
        source={},
    )  # fmt: skip


def beside(of_rank: Mapping[int, Device], record: BesideRecord, date: str) -> dict[int, Device]:
    """Return the devices with their contention figures, which devices of one type share."""
    of_type: dict[object, list[int]] = {}
    for rank, device in of_rank.items():
        of_type.setdefault(device.figures, []).append(rank)
    found = dict(of_rank)
    for ranks in of_type.values():
        beside_what = f"beside an all-reduce of {format_bytes(record.nbytes)}"
        for figure, windows_of, how, digits in (
            ("interference", record.lost, beside_what, 4),
            ("drag", record.drag, beside_what, 4),
            ("delay_s", record.delay, "small collectives beside computing", 6),
        ):
            windows = [value for rank in ranks for value in windows_of[rank]]
            center = median(windows)
            off = median(abs(value - center) for value in windows)
            told = f"measured {date}, n={len(windows)}, {how}, spread {off:.2g}"
            for rank in ranks:
                source = {**found[rank].source, figure: told}
                values = {f"contention.{figure}": round(center, digits)}
                found[rank] = found[rank].changed(values, source=source)
    return found


def _provenance(
    device: Device, residuals: Sequence[DeviceResidual], date: str, ranks: int
) -> dict[str, str]:
    """Return, per figure: date, number of operators, error of the fit, and spread of repeats."""

    def told(kind: str, dtype: str | None = None) -> str:
        own = [
            r for r in residuals if r.kind.split()[0] == kind and dtype in (None, r.kind.split()[1])
        ]
        own = own or list(residuals)
        off = median(abs(r.error) for r in own)
        varied = median(r.spread for r in own)
        return (
            f"measured {date}, n={len(own)} on {ranks} rank{'s' * (ranks > 1)}, "
            f"fit off by {off:.0%}, spread {varied:.0%}"
        )

    kinds = ", ".join(f"{k} {told(k).split('off by ')[1]}" for k in device.efficiency)
    return {
        "memory_bytes": f"read {date}",
        **{f"flops_per_s.{dtype}": told("matmul", dtype) for dtype in device.flops_per_s},
        "memory_bytes_per_s": told("memory"),
        "operand_bytes_per_s": told("matmul"),
        **dict.fromkeys(
            ("launch_s", *["host_s"] * (device.host_s > 0), "relaunch"),
            f"measured {date}, n=1 on {ranks} rank{'s' * (ranks > 1)}",
        ),
        "efficiency": f"measured {date}, fit off by: {kinds}",
    }
