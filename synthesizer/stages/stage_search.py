"""Search for pipeline stages: cuts, groups of devices, microbatches; a program for each stage.

Stages are estimated first, as if a group of devices were one device of the sum of their speeds. The most
promising ones get an exact search of each stage on its group, and are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hap.cluster.topology import Cluster
from hap.cluster.work import Work
from hap.errors import HapError, PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.program import Program
from hap.ir.stages import Stage, Stages, Transfer, crossing, cut_stages, repeatable
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.machine import Machine, PerRank
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.schedule.pipeline_simulator import (
    PipelineTimes,
    StageSeconds,
    simulate_pipeline,
)
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.storage_sharding import program_axes
from hap.synthesizer.stages.stage_times import StageFigures, SumsOverTime, figures, in_parts
from hap.synthesizer.stages.time_axis import OverTime, over_time
from hap.synthesizer.synthesize import Synthesizer

MICROBATCHES = (2, 4, 8, 16, 32)
"""Numbers of microbatches that are tried."""

MOST_STAGES = 4

SEARCHED = 3
"""Estimated pipelines that get an exact search of each stage."""

CUTS = 24
"""Places of a cut that are tried: those where the fewest bytes cross."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages with their predictions. Ranks are those of ``cluster``."""

    cluster: Cluster
    left: Ranks
    over_time: OverTime
    microbatches: int
    stages: Stages
    figures: tuple[StageFigures, ...]
    seconds: tuple[StageSeconds, ...]
    times: PipelineTimes
    transfers: tuple[Transfer, ...]
    parts: tuple[Graph, ...]
    """The graph of each stage for one microbatch."""

    @property
    def fits(self) -> bool:
        memory = [d.memory_bytes for d in self.cluster.devices]
        return all(
            float(peak) <= memory[rank]
            for stage, each in zip(self.stages.stages, self.figures, strict=True)
            for rank, peak in zip(stage.ranks, each.peak_bytes, strict=True)
        )


class StageSynthesizer(Synthesizer):
    """Searches a stage on its group of devices; its sums over time are free."""

    def _cost(self, program: Program | None, shares: Shares) -> CostModel:
        axes = program_axes(self.space.axes, program) if program else self.space.axes
        if self._priced is None or self._priced[0] != (axes, shares):
            model = CostModel(
                self.space.graph, axes, self.machine, shares, self._states, crossing=SumsOverTime()
            )
            self._priced = (axes, dict(shares)), model
        return self._priced[1]


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


class StageSearch:
    """Searches pipelines of a graph on a cluster.

    Raises:
        HapError: the step can't be run in microbatches.
    """

    def __init__(self, space: Space, cluster: Cluster, optimizer_states: int) -> None:
        self._cluster, self._states = cluster, optimizer_states
        self._time = over_time(space, cluster, optimizer_states)
        self._whole = self._time.whole()
        self._machine = Machine(cluster)
        self._found: dict[object, tuple[Program, Shares] | None] = {}

    def best(
        self, limit_s: float, progress: Callable[[str], None] = lambda text: None
    ) -> Pipeline | None:
        """Return the fastest pipeline that fits, if one is faster than ``limit_s``."""
        sketches = sorted(self.sketches(), key=lambda s: s.estimate_s)
        chosen, seen = [], set[object]()
        for sketch in sketches:
            key = sketch.groups, len(sketch.cuts)
            if key not in seen and sketch.estimate_s < limit_s:
                seen.add(key)
                chosen.append(sketch)
        found = []
        for sketch in chosen[:SEARCHED]:
            shown = " | ".join(str(len(g)) for g in sketch.groups)
            progress(f"stages on {shown} devices, {sketch.microbatches} microbatches")
            near = [
                s for s in sketches
                if s.groups == sketch.groups and s.estimate_s <= 1.1 * sketch.estimate_s
            ]  # fmt: skip
            found += [p for s in near[:6] if (p := self.pipeline(s)) is not None and p.fits]
        best = min(found, key=lambda p: p.times.step_s, default=None)
        return best if best and best.times.step_s < limit_s else None

    # --- estimates ---

    def sketches(self) -> Iterator[Sketch]:
        """Yield estimated pipelines."""
        for groups in self.groups():
            for cuts in self._cut_candidates(groups):
                for count in MICROBATCHES:
                    if self._time.shares(count) is None:
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
            send = self._send_s(groups, number, nbytes[at[number]] / count) if cuts[number:] else 0
            forward_s, backward_s = (each.part_s(ranks, part, count) for each in self._alone_s)
            stages.append(
                StageSeconds(
                    forward_s=forward_s, backward_s=backward_s, send_s=send, return_s=send,
                    after_s=self._reduce_s(ranks, float(part)),
                    in_flight=self._in_flight(len(groups), number, count),
                )
            )  # fmt: skip
        return simulate_pipeline(stages, count).step_s

    def _in_flight(self, stages: int, number: int, count: int) -> int:
        """Return microbatches in flight: twice those of 1F1B, so that transfers are hidden."""
        return min(count, 2 * (stages - number) - 1)

    def _send_s(self, groups: Sequence[Ranks], number: int, nbytes: float) -> float:
        devices = self._cluster.devices
        here, there = groups[number][0], groups[number + 1][0]
        node = devices[here].node
        inside = node == devices[there].node
        link = self._cluster.intra[node] if inside else self._cluster.inter
        return link.latency_s + nbytes / link.bandwidth_bytes_per_s

    def _reduce_s(self, ranks: Ranks, part: float) -> float:
        if len(ranks) == 1:
            return 0.0
        nbytes = part * sum(
            self._whole.tensors[i.tensor].nbytes for i in self._whole.role("parameter")
        )
        even = np.full(len(ranks), 1 / len(ranks))
        network = Machine(self._cluster.keep(ranks)).network
        return network.choices("all_reduce", round(nbytes), even, even)[0].seconds

    # --- exact searches ---

    def pipeline(self, sketch: Sketch) -> Pipeline | None:
        """Return the pipeline of a sketch with the cheapest program of each stage, if there is one."""
        try:
            wholes, _ = cut_stages(self._whole, sketch.cuts)
            parts, transfers = cut_stages(self._time.part(sketch.microbatches), sketch.cuts)
        except PlanError:
            return None
        kept = tuple(sorted(r for group in sketch.groups for r in group))
        stages, found, seconds = [], [], []
        for number, (group, whole, part) in enumerate(
            zip(sketch.groups, wholes, parts, strict=True)
        ):
            ranks = tuple(sorted(group))
            searched = self._searched(whole, ranks, sketch.cuts, number)
            scaled = searched and in_parts(whole, part, *searched)
            if not scaled:
                return None
            program, shares = scaled
            flight = self._in_flight(len(parts), number, sketch.microbatches)
            machine = Machine(self._cluster.keep(ranks))
            each = figures(
                part, program, shares, machine, self._states, sketch.microbatches, flight
            )
            stages.append(
                Stage(
                    ranks=tuple(kept.index(r) for r in ranks), program=program, shares=shares,
                    in_flight=flight,
                )
            )  # fmt: skip
            found.append(each)
            seconds.append((each, flight))
        times = self._timed(sketch, parts, transfers, seconds)
        return Pipeline(
            cluster=self._cluster.keep(kept),
            left=tuple(r for r in range(self._cluster.world_size) if r not in kept),
            over_time=self._time, microbatches=sketch.microbatches,
            stages=Stages(cuts=sketch.cuts, stages=tuple(stages)), figures=tuple(found),
            seconds=tuple(times), times=simulate_pipeline(times, sketch.microbatches),
            transfers=transfers, parts=parts,
        )  # fmt: skip

    def _timed(
        self, sketch: Sketch, parts: Sequence[Graph], transfers: Sequence[Transfer],
        found: Sequence[tuple[StageFigures, int]],
    ) -> list[StageSeconds]:  # fmt: skip
        def moved(src: int, dst: int, once: bool) -> float:
            return float(
                sum(
                    parts[t.src].tensors[t.tensor].nbytes for t in transfers
                    if min(t.src, t.dst) <= min(src, dst) < max(t.src, t.dst)
                    and t.backward == (src > dst) and t.once == once
                )
            )  # fmt: skip

        stages = []
        for number, (each, flight) in enumerate(found):
            last = number == len(found) - 1
            send = back = 0.0
            before, after = each.before_s, each.after_s
            if not last:
                send = self._send_s(sketch.groups, number, moved(number, number + 1, False))
                back = self._send_s(sketch.groups, number, moved(number + 1, number, False))
                if late := moved(number + 1, number, True):
                    after += self._send_s(sketch.groups, number, late)
            if number and (early := moved(number - 1, number, True)):
                before += self._send_s(sketch.groups, number - 1, early)
            stages.append(
                StageSeconds(
                    forward_s=each.forward_s,
                    backward_s=each.backward_s,
                    send_s=send,
                    return_s=back,
                    before_s=before,
                    after_s=after,
                    in_flight=flight,
                )
            )
        return stages

    def _searched(
        self, whole: Graph, ranks: Ranks, cuts: tuple[str, ...], number: int
    ) -> tuple[Program, Shares] | None:
        """Return the cheapest program of a stage on its devices, with its shares."""
        key = (
            tuple(self._cluster.devices[r] for r in ranks),
            (None, *cuts, None)[number : number + 2],
        )
        if key not in self._found:
            self._found[key] = self._search(whole, ranks)
        return self._found[key]

    def _search(self, whole: Graph, ranks: Ranks) -> tuple[Program, Shares] | None:
        try:
            search = StageSynthesizer(build_space(whole), self._cluster.keep(ranks), self._states)
            pair = search.cheapest(next(search.starts()))
            if len(ranks) > 1:
                pair = search.cheapest(search.balance(pair))
                pair = search.judge(pair.program, search.balance(pair))
        except HapError:
            return None
        return pair.program, {a: pair.shares[a] for a in pair.program.used_axes()}
