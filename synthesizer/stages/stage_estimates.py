"""Estimate pipelines: groups of devices, cuts and microbatches, before any search of a stage.

A group of devices counts as one device of the sum of their speeds, and a stage as its part of the
step's floating-point operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hap.cluster.topology import Cluster
from hap.cluster.work import Work
from hap.ir.stages import crossing, repeatable
from hap.synthesizer.cost.machine import Machine, PerRank
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.schedule.pipeline_simulator import StageSeconds, simulate_pipeline
from hap.synthesizer.stages.stage_transfers import Ranks, send_s
from hap.synthesizer.stages.time_axis import OverTime

MICROBATCHES = (2, 4, 8, 16, 32)
"""Numbers of microbatches that are tried."""

MOST_STAGES = 4

CUTS = 24
"""Places of a cut that are tried: those where the fewest bytes cross."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """An estimated pipeline: groups in order, the last operator of each stage but the last."""

    groups: tuple[Ranks, ...]
    cuts: tuple[str, ...]
    microbatches: int
    estimate_s: float


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds of a whole side of the step on each device alone: of work, and of starting operators."""

    busy_s: PerRank
    start_s: PerRank

    @staticmethod
    def nothing(machine: Machine) -> Alone:
        return Alone(np.zeros_like(machine.speed), np.zeros_like(machine.speed))

    def part_s(self, ranks: Ranks, part: float, microbatches: int) -> float:
        """Return the seconds of a part of the operators in one microbatch, divided among devices."""
        each = list(ranks)
        together = 1.0 / float((1.0 / np.maximum(self.busy_s[each], 1e-12)).sum())
        return part * (together / microbatches + float(self.start_s[each].max()))


class StageEstimates:
    """Estimates pipelines of a step on a cluster."""

    def __init__(self, over_time: OverTime, cluster: Cluster) -> None:
        self._over_time, self._cluster = over_time, cluster
        self._whole, self._machine = over_time.whole(), Machine(cluster)

    def sketches(self) -> Iterator[Sketch]:
        """Yield estimated pipelines."""
        for groups in self.groups():
            for cuts in self._cut_candidates(groups):
                for count in MICROBATCHES:
                    if self._over_time.shares(count) is None:
                        continue
                    seconds = self._estimated(groups, cuts, count)
                    if seconds is not None:
                        yield Sketch(
                            groups=groups, cuts=cuts, microbatches=count, estimate_s=seconds
                        )

    def groups(self) -> Iterator[tuple[Ranks, ...]]:
        """Yield ordered partitions of some of the devices: by machine, by kind, one by one."""
        cluster = self._cluster
        seen: set[object] = set()
        for kept in self._subsets():
            devices = cluster.devices
            nodes = [tuple(r for r in kept if devices[r].node == n) for n in cluster.nodes]
            kinds = [tuple(r for r in kept if r in ranks) for ranks in cluster.types()]
            ways = [nodes, kinds]
            if len(kept) <= MOST_STAGES:
                ways.append([(r,) for r in kept])
            for way in ways:
                parts = [part for part in way if part]
                if not 2 <= len(parts) <= MOST_STAGES:
                    continue
                for order in itertools.permutations(parts):
                    key = self._figures(order)
                    if key not in seen:
                        seen.add(key)
                        yield order

    def _figures(self, groups: Sequence[Ranks]) -> object:
        """Return a key that is equal for groups of equal devices on equally many machines."""
        devices, number = self._cluster.devices, dict[str, int]()
        return tuple(
            tuple(
                (devices[r].figures, number.setdefault(devices[r].node, len(number))) for r in group
            )
            for group in groups
        )

    def _subsets(self) -> Iterator[Ranks]:
        """Yield all devices, then the fastest kinds together."""
        speed = np.round(self._machine.speed, 12)
        for value in sorted(set(speed.tolist())):
            yield tuple(np.flatnonzero(speed >= value).tolist())

    @cached_property
    def _costs(self) -> tuple[list[str], np.ndarray, list[float]]:
        """Forward operators that may end a stage, work up to each (0 to 1), bytes per step there."""
        graph = self._whole
        crossed = crossing(graph)
        skip = repeatable(graph)
        forward = [n for n in graph.nodes if n.name not in graph.backward and n.name not in skip]
        work = np.cumsum([node_work(n, graph).flops for n in forward])
        work = work / max(float(work[-1]), 1.0)
        names = list(crossed)
        nbytes = [float(sum(graph.tensors[t].nbytes for t in crossed[n])) for n in names]
        order = sorted(range(len(names)), key=lambda k: (nbytes[k], k))
        best: dict[float, int] = {}
        for k in order:  # the cheapest place for each amount of work
            best.setdefault(round(float(work[k]), 4), k)
        kept = sorted(sorted(best.values(), key=lambda k: nbytes[k])[: CUTS * 2])
        return [names[k] for k in kept], work[kept], [nbytes[k] for k in kept]

    def _cut_candidates(self, groups: tuple[Ranks, ...]) -> Iterator[tuple[str, ...]]:
        names, work, nbytes = self._costs
        speed = [float(self._machine.speed[list(g)].sum()) for g in groups]
        ends = np.cumsum(speed) / sum(speed)
        near = []
        for end in ends[:-1]:
            window = [k for k in range(len(names)) if abs(work[k] - end) < 0.15]
            window.sort(key=lambda k: (abs(work[k] - end), nbytes[k]))
            near.append(window[: CUTS // (2 * len(groups) - 2)])
        for chosen in itertools.product(*near):
            if list(chosen) == sorted(set(chosen)):
                yield tuple(names[k] for k in chosen)

    @cached_property
    def _alone_s(self) -> tuple[Alone, Alone]:
        """Seconds of the whole step's forward and backward on each device alone."""
        machine, graph = self._machine, self._whole
        found = [Alone.nothing(machine), Alone.nothing(machine)]
        one = np.ones_like(machine.speed)
        for node in graph.nodes:
            work = node_work(node, graph)
            if not work.flops and not work.bytes:
                continue
            names = {n for n in (*node.inputs, *node.outputs) if n is not None}
            nbytes = float(sum(graph.tensors[n].nbytes for n in names))
            start = machine.seconds(work, 1e-9 * one, 0 * one)
            busy = machine.seconds(work, work.flops * one, nbytes * one) - start
            side = found[node.name in graph.backward]
            side.busy_s[:] += busy
            side.start_s[:] += start
        for i in graph.role("parameter"):  # each microbatch adds its gradients to the sums
            held = graph.tensors[i.tensor]
            work = Work("memory", held.dtype, held.numel, 0.0)
            found[1].start_s[:] += machine.seconds(work, 0 * one, 3 * held.nbytes * one)
        return found[0], found[1]

    def _estimated(
        self, groups: tuple[Ranks, ...], cuts: tuple[str, ...], count: int
    ) -> float | None:
        names, work, nbytes = self._costs
        at = [names.index(c) for c in cuts]
        parts = np.diff([0.0, *(float(work[k]) for k in at), 1.0])
        stages = []
        for number, (ranks, part) in enumerate(zip(groups, parts, strict=True)):
            send = (
                send_s(self._cluster, groups, number, nbytes[at[number]] / count)
                if cuts[number:]
                else 0
            )
            forward_s, backward_s = (each.part_s(ranks, part, count) for each in self._alone_s)
            stages.append(
                StageSeconds(
                    forward_s=forward_s, backward_s=backward_s, send_s=send, return_s=send,
                    after_s=self._reduce_s(ranks, float(part)),
                    in_flight=in_flight(len(groups), number, count),
                )
            )  # fmt: skip
        return simulate_pipeline(stages, count).step_s

    def _reduce_s(self, ranks: Ranks, part: float) -> float:
        if len(ranks) == 1:
            return 0.0
        nbytes = part * sum(
            self._whole.tensors[i.tensor].nbytes for i in self._whole.role("parameter")
        )
        even = np.full(len(ranks), 1 / len(ranks))
        network = Machine(self._cluster.keep(ranks)).network
        return network.choices("all_reduce", round(nbytes), even, even)[0].seconds


def in_flight(stages: int, number: int, count: int) -> int:
    """Return microbatches in flight: twice those of 1F1B, so that transfers are hidden."""
    return min(count, 2 * (stages - number) - 1)
