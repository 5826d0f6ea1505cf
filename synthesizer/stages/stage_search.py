"""Search for pipeline stages: cuts, groups of devices, microbatches; a program for each stage.

PipelineStages are estimated first, as if a group of devices were one device of the sum of their speeds. The most
promising ones get an exact search of each stage on its group, and are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hap.cluster.topology import Cluster
from hap.errors import HapError, PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.program import Program
from hap.ir.stages import PipelineStages, Stage, Transfer, cut_stages
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.machine import Machine
from hap.synthesizer.schedule.pipeline_simulator import (
    PipelineTimes,
    StageSeconds,
    simulate_pipeline,
)
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.storage_sharding import program_axes
from hap.synthesizer.stages.stage_estimates import Sketch, StageEstimates, in_flight
from hap.synthesizer.stages.stage_times import StageFigures, SumsOverTime, figures, in_parts
from hap.synthesizer.stages.stage_transfers import Ranks, stage_seconds
from hap.synthesizer.stages.time_axis import OverTime, over_time
from hap.synthesizer.synthesize import Synthesizer

SEARCHED = 3
"""Estimated pipelines that get an exact search of each stage."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """PipelineStages with their predictions. Ranks are those of ``cluster``."""

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


class StageSearch:
    """Searches pipelines of a graph on a cluster.

    Raises:
        HapError: the step can't be run in microbatches.
    """

    def __init__(self, space: Space, cluster: Cluster, optimizer_states: int) -> None:
        self._cluster, self._states = cluster, optimizer_states
        _check(space.graph)
        self._time = over_time(space, cluster, optimizer_states)
        self._whole = self._time.whole()
        self._found: dict[object, tuple[Program, Shares] | None] = {}

    def best(
        self, limit_s: float, keep: frozenset[int] = frozenset(),
        progress: Callable[[str], None] = lambda text: None,
    ) -> Pipeline | None:  # fmt: skip
        """Return the fastest pipeline that fits, if one is faster than ``limit_s``.

        Args:
            keep: ranks that it must use.
        """
        estimates = StageEstimates(self._time, self._cluster)
        sketches = [s for s in estimates.sketches() if keep <= {r for g in s.groups for r in g}]
        sketches.sort(key=lambda s: s.estimate_s)
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
            flight = in_flight(len(parts), number, sketch.microbatches)
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
        times = stage_seconds(self._cluster, sketch.groups, parts, transfers, seconds)
        return Pipeline(
            cluster=self._cluster.keep(kept),
            left=tuple(r for r in range(self._cluster.world_size) if r not in kept),
            over_time=self._time, microbatches=sketch.microbatches,
            stages=PipelineStages(cuts=sketch.cuts, stages=tuple(stages)), figures=tuple(found),
            seconds=tuple(times), times=simulate_pipeline(times, sketch.microbatches),
            transfers=transfers, parts=parts,
        )  # fmt: skip

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


def _check(graph: Graph) -> None:
    """Raise ``HapError`` for a step that the runtime does not run in stages."""
    if any(o.role == "buffer" for o in graph.outputs):
        raise HapError("the step updates buffers, which stages do not")
    if any(t.dtype == "float16" for t in graph.tensors.values()):
        raise HapError("float16 gradients need a loss scale, which stages do not apply")
    scalars = [i.target for i in graph.role("parameter") if not graph.tensors[i.tensor].shape]
    if scalars:
        raise HapError(f"{scalars[0]} is a parameter without dims, which no stage can store alone")
