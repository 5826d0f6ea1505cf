"""Search for pipeline stages: cuts, groups of devices, microbatches; a program for each stage.

Pipelines are estimated first, as if a group of devices were one device of the sum of their speeds. The most
promising ones get an exact search of each stage on its group, and are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hap.background import each
from hap.cluster.topology import Cluster
from hap.errors import HapError, PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.program import Program
from hap.ir.stages import PipelineStages, Stage, Transfer, cut_stages
from hap.synthesizer.bounds.lower_bound import Relaxed
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.device_selection import CLOSE
from hap.synthesizer.schedule.pipeline_simulator import (
    PipelineTimes,
    StageSeconds,
    simulate_pipeline,
)
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.stages.flights import arrange
from hap.synthesizer.stages.regrouping import regrouped
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_estimates import StageEstimates
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer, StageTask
from hap.synthesizer.stages.stage_times import StageFigures, figures, least_gathering
from hap.synthesizer.stages.stage_transfers import Ranks, StageTransfers
from hap.synthesizer.stages.time_axis import OverTime, over_time
from hap.synthesizer.synthesize import Synthesizer, is_long

SEARCHED = 8
"""Most pipelines whose stages are searched exactly."""

LACKING = 2
"""Most pipelines that are searched although they lack memory by the estimate, and then do not fit."""

STARTS = 8
"""Estimated pipelines from which a local search of their groups starts."""

NEAR = 1.05
"""Estimated seconds up to which a pipeline is searched, relative to the best plan so far."""

Chosen = tuple[Program, Shares]
"""The program and shares of a microbatch."""

Programs = Callable[[StageTask], Chosen | None]
"""A stage -> what was chosen for it, if it has a program."""


@dataclass(frozen=True, slots=True)
class Overfull:
    """The result for a stage that does not fit: the part of its memory that the fullest rank needs."""

    fill: float


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages with their predictions. Ranks are those of ``cluster``."""

    cluster: Cluster
    left: Ranks
    over_time: OverTime
    microbatches: int
    stages: PipelineStages
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


class StageSearch:
    """Searches pipelines of a graph on a cluster.

    Args:
        keep: ranks that each pipeline must use.
        quick: whether estimates for one number of microbatches are enough.

    Raises:
        HapError: the step can't be run in microbatches.
    """

    def __init__(
        self, space: Space, cluster: Cluster, optimizer_states: int,
        keep: frozenset[int] = frozenset(), *, quick: bool = False,
    ) -> None:  # fmt: skip
        self._space, self.cluster, self.states = space, cluster, optimizer_states
        self._relaxed: dict[Ranks, Relaxed] = {}
        _check(space.graph)
        self._time = over_time(space, cluster, optimizer_states)
        self._found: dict[object, Chosen | Overfull | None] = {}
        self._latest: tuple[object, StageSynthesizer] | None = None
        self._regrouped: dict[tuple[int, tuple[Ranks, ...], tuple[str, ...]], Sketch] = {}
        self.estimates = StageEstimates(self._time, cluster, optimizer_states, keep, quick=quick)

    def relaxed(self, ranks: Ranks) -> Relaxed:
        """Return the bound of all programs without stages on a set of devices."""
        if ranks not in self._relaxed:
            part = self.cluster.keep(ranks)
            self._relaxed[ranks] = Synthesizer(self._space, part, self.states).relaxed
        return self._relaxed[ranks]

    def best(
        self, limit_s: float, progress: Callable[[str], None] = lambda text: None
    ) -> Pipeline | None:
        """Return the fastest pipeline found that fits, if one is faster than ``limit_s``."""
        best: tuple[Pipeline, Sketch] | None = None
        tried, beat_s, lacking = set[object](), limit_s, 0

        def search(sketch: Sketch) -> None:
            nonlocal best, limit_s, lacking
            tried.add((sketch.groups, sketch.cuts, sketch.microbatches))
            found = self._tried(sketch, progress)
            lacking += found is None and sketch.lacking
            if found and found.fits and found.times.step_s < limit_s:
                best, limit_s = (found, sketch), found.times.step_s

        def new(sketches: Sequence[Sketch]) -> list[Sketch]:
            left = (s for s in sketches if (s.groups, s.cuts, s.microbatches) not in tried)
            return [s for s in left if not self.estimates.overfull(s)]

        for _ in range(SEARCHED):
            if not (promising := new(self._promising(limit_s))):
                break
            if promising[0].lacking and lacking >= LACKING:  # and so do all others
                break
            search(promising[0])
        before = None
        while best and best is not before:
            before, (_, sketch) = best, best
            for near in new([self.estimates.recut(sketch), *self.estimates.other_counts(sketch)]):
                if self.estimates.expected_s(near) <= NEAR * limit_s:
                    search(near)
        return self._fewer_devices(*best, beat_s, progress) if best else None

    def _fewer_devices(
        self, best: Pipeline, sketch: Sketch, limit_s: float, progress: Callable[[str], None]
    ) -> Pipeline:
        """Return a pipeline with fewer stages that is about as fast, or the same one."""
        limit_s = min(limit_s, CLOSE * best.times.step_s)
        while near := self.estimates.without_stage(sketch):
            found = self._tried(near[0], progress)
            if not (found and found.fits and found.times.step_s <= limit_s):
                break
            best, sketch = found, near[0]
        return best

    def _tried(self, sketch: Sketch, progress: Callable[[str], None]) -> Pipeline | None:
        """Search the stages of a sketch; later estimates learn from it."""
        shown = " | ".join(str(len(g)) for g in sketch.groups)
        progress(f"stages on {shown} devices, {sketch.microbatches} microbatches")
        found = self.pipeline(sketch)
        if found is not None:
            each_s = [s.forward_s + s.backward_s for s in found.seconds]
            self.estimates.learn(sketch, each_s, found.times.step_s)
            for key in [key for key in self._regrouped if key[0] == sketch.microbatches]:
                del self._regrouped[key]
        return found

    def _promising(self, limit_s: float) -> list[Sketch]:
        """Return the pipelines that may be faster, the one that is expected to be fastest first."""
        expected_s = self.estimates.expected_s

        def near(sketches: Iterable[Sketch]) -> list[Sketch]:
            found = (s for s in sketches if min(s.estimate_s, expected_s(s)) <= NEAR * limit_s)
            return sorted(found, key=lambda s: (s.lacking, expected_s(s)))

        found = near(self.estimates.sketches(limit_s))
        starts = dict[object, Sketch]()
        for sketch in found:
            starts.setdefault((sketch.groups, sketch.microbatches), sketch)
        first = itertools.islice(starts.values(), STARTS)
        return near([*found, *map(self._at_optimum, first)])

    def _at_optimum(self, sketch: Sketch) -> Sketch:
        """Return the end of a local search from a pipeline; searched anew after its estimates have learnt."""
        key = sketch.microbatches, sketch.groups, sketch.cuts
        if key not in self._regrouped:
            self._regrouped[key] = regrouped(self.estimates, sketch)
        return self._regrouped[key]

    def pipeline(
        self, sketch: Sketch, programs: Programs | None = None, flights: tuple[int, ...] = ()
    ) -> Pipeline | None:
        """Return the pipeline of a sketch, if each stage has a program.

        Args:
            programs: of the stages; by default the cheapest ones.
            flights: microbatches in flight of each stage; by default chosen, within the memory, as are
                delays of gradients of weights, and stages that run their forwards again.
        """
        count, groups = sketch.microbatches, [tuple(sorted(g)) for g in sketch.groups]
        try:
            tasks, transfers = self._tasks(sketch)
        except PlanError:
            return None
        parts = tuple(task.part for task in tasks)
        found = [*map(programs, tasks)] if programs else self._searched(tasks)
        for number, one in enumerate(found):
            if isinstance(one, Overfull):
                self.estimates.learn_fill(sketch, number, one.fill)
        chosen = [one for one in found if isinstance(one, tuple)]
        if len(chosen) < len(tasks):
            return None

        memory = [[float(self.cluster.devices[r].memory_bytes) for r in g] for g in groups]

        def of_stage(number: int, recompute: bool) -> StageFigures:
            hardware = HardwareModel(self.cluster.keep(groups[number]))
            how = parts[number], *chosen[number], hardware, self.states, count, 1
            return least_gathering(
                lambda each: figures(*how, recompute=recompute, gather_each=each), memory[number]
            )

        priced = StageTransfers(
            self.cluster, parts,
            [
                Stage(ranks=ranks, program=program, shares=shares, in_flight=1)
                for ranks, (program, shares) in zip(groups, chosen, strict=True)
            ],
            transfers,
        )  # fmt: skip
        arranged = arrange(of_stage, priced.seconds, memory, count, flights)
        if arranged is None:
            return None
        every, times = arranged
        kept = tuple(sorted(r for group in groups for r in group))
        stages = tuple(
            Stage(
                ranks=tuple(kept.index(r) for r in group), program=program, shares=shares,
                in_flight=time.in_flight, delay=each.delay, recompute=each.recompute,
                gather_each=each.gather_each,
            )
            for group, (program, shares), time, each in zip(
                groups, chosen, times, every, strict=True
            )
        )  # fmt: skip
        pipeline = PipelineStages(cuts=sketch.cuts, stages=stages)
        if not self._time.runs(pipeline, count):
            return None
        return Pipeline(
            cluster=self.cluster.keep(kept),
            left=tuple(r for r in range(self.cluster.world_size) if r not in kept),
            over_time=self._time, microbatches=count,
            stages=pipeline, figures=tuple(every), seconds=tuple(times),
            times=simulate_pipeline(times, count), transfers=transfers, parts=parts,
        )  # fmt: skip

    def _tasks(self, sketch: Sketch) -> tuple[list[StageTask], tuple[Transfer, ...]]:
        """Return the stages of a sketch, and the transfers between them."""
        count = sketch.microbatches
        wholes, _ = cut_stages(self._time.whole(count), sketch.cuts)
        parts, transfers = cut_stages(self._time.part(count), sketch.cuts)
        tasks = [
            StageTask(
                whole=whole, part=part, ranks=tuple(sorted(ranks)), count=count,
                in_flight=min(count, len(parts) - number),  # of 1F1B
            )
            for number, (ranks, whole, part) in enumerate(
                zip(sketch.groups, wholes, parts, strict=True)
            )
        ]  # fmt: skip
        return tasks, transfers

    def roomy_s(self, sketch: Sketch) -> float:
        """Return the seconds of a step as one stage, on devices with unlimited memory; infinite without a program."""
        try:
            (task,), _ = self._tasks(sketch)
            synthesizer = self._synthesizer(task)
            program, shares = synthesizer.in_order(synthesizer.first)
        except HapError:
            return float("inf")
        part, hardware = task.part, synthesizer.hardware
        made = figures(part, program, shares, hardware, self.states, task.count, in_flight=1)
        each_s = made.forward_s + made.backward_s
        return made.before_s + task.count * each_s + made.after_s - made.hidden_s

    def _searched(self, tasks: Sequence[StageTask]) -> list[Chosen | Overfull | None]:
        """Return the cheapest program of each stage on its devices, with its shares."""
        keys = [self._key(task) for task in tasks]
        new = {k: task for k, task in zip(keys, tasks, strict=True) if k not in self._found}
        large_first = sorted(new, key=lambda k: -len(new[k].whole.nodes))
        found = each(self._search, [new[k] for k in large_first], apart=is_long(self._space))
        self._found.update(zip(large_first, found, strict=True))
        return [self._found[k] for k in keys]

    def _key(self, task: StageTask) -> object:
        """Return what the search of a stage depends on."""
        devices, whole = tuple(self.cluster.devices[r] for r in task.ranks), task.whole
        # The same operators may send to other stages, if other cuts differ.
        names = tuple(n.name for n in whole.nodes)
        return devices, task.count, task.in_flight, whole.inputs, whole.outputs, names

    def _search(self, task: StageTask) -> Chosen | Overfull | None:
        synthesizer = self._synthesizer(task)
        try:
            fill = synthesizer.fill
            return synthesizer.chosen() if fill <= 1 else Overfull(fill)
        except HapError:
            return None

    def _synthesizer(self, task: StageTask) -> StageSynthesizer:
        key = self._key(task)
        if self._latest is None or self._latest[0] != key:
            part = self.cluster.keep(task.ranks)
            self._latest = key, StageSynthesizer(task, part, self.states)
        return self._latest[1]


def _check(graph: Graph) -> None:
    """Raise ``HapError`` for a step that the runtime does not run in stages."""
    if any(o.role == "buffer" for o in graph.outputs):
        raise HapError("the step updates buffers, which pipelines do not support")
    if graph.whole_parameters:
        raise HapError("the optimizer reads across parameters, but a stage holds only some")
    if scalars := [i.target for i in graph.role("parameter") if not graph.tensors[i.tensor].shape]:
        raise HapError(f"{scalars[0]} is a scalar parameter, which pipelines do not support")
