"""Devices' current speed relative to their profile, by kind of work.

On a shared machine different kinds of work slow down differently: products, which arithmetic
limits, more or less than work that memory limits. So each kind has a probe, weighted by the kind's
part of the model's step.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hap.cli.profiling import Settings
from hap.cluster.device import Device
from hap.ir.graph import Graph
from hap.profiler.call_timing import FULL, Pace, seconds_per_call
from hap.profiler.probes import Arena, Probe, probes
from hap.profiler.samples import OpRecord, middle, of_kind, read
from hap.synthesizer.cost.operator_work import node_work

CPU = torch.device("cpu")
LOOK = Pace(windows=8, window_s=FULL.window_s)
"""Windows of one timing of a probe on a rank."""
SURPRISE, LOOKS = 0.08, 3
_LEAST = 0.05
"""Smallest part of the step at which a kind of work gets a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One of the profiler's probes.

    Attributes:
        name: Name of the probe.
        part: Part of the step's computing that is of the probe's kind.
        seconds: Its time on each rank in the profile.
    """

    name: str
    part: float
    seconds: tuple[float, ...]


def parts(graph: Graph, device: Device) -> dict[str, float]:
    """Return kind of work -> part of the model's step, as predicted on one device."""
    seconds: Counter[str] = Counter()
    for node in graph.nodes:
        work = node_work(node, graph)
        seconds[work.kind] += device.seconds(work)
    return {kind: s / seconds.total() for kind, s in seconds.items()}


def ticks(graph: Graph, device: Device, profile: Path) -> tuple[Tick, ...]:
    """Return the probes of the kinds of work that take most of a model's step.

    Args:
        device: The device whose figures determine these kinds.
        profile: The cluster file; its samples are in the same folder.
    """
    records = {r.name: r for r in of_kind(OpRecord, read(Settings(output=str(profile)).samples))}
    found: dict[str, Tick] = {}
    counts = parts(graph, device)
    for probe in _glances():
        part = counts.get(probe.work.kind, 0.0)
        if part >= _LEAST and probe.work.kind not in found and probe.name in records:
            seconds = tuple(middle(each) for each in records[probe.name].seconds)
            found[probe.work.kind] = Tick(name=probe.name, part=part, seconds=seconds)
    return tuple(found.values())


class Clock:
    """The probes of one rank, made at their first use."""

    def __init__(self, told: Sequence[Tick], rank: int) -> None:
        self._told = [(tick.name, tick.part, tick.seconds[rank]) for tick in told]

    def slower(self) -> float:
        """Return the time of the model's kinds of work relative to the profile."""
        ratios = [part * self._seconds(name) / then for name, part, then in self._told]
        return sum(ratios) / sum(part for _, part, _ in self._told)

    def _seconds(self, name: str) -> float:
        call, count = self._calls[name]
        return statistics.median(seconds_per_call(call, CPU, LOOK)) / count

    @cached_property
    def _calls(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Return a call of each probe and the number of repetitions in it."""
        arena, known = Arena(CPU), {probe.name: probe for probe in _glances()}
        return {name: (known[name].make(arena), known[name].count) for name, _, _ in self._told}


def settled(look: Callable[[], float]) -> float:
    """Return one measurement, or the median of three if it deviates by more than :data:`SURPRISE`.

    The median ignores other processes that use the machine for a second.

    Args:
        look: Returns the current time of the model's work relative to the profile.
    """
    found = [look()]
    while abs(found[0] - 1) > SURPRISE and len(found) < LOOKS:
        found.append(look())
    return statistics.median(found)


def _glances() -> list[Probe]:
    """Return the quick probes that depend on no other probe."""
    return [probe for probe in probes(CPU) if probe.quick and probe.after is None]
