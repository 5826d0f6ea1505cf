"""Alternatives to the choices of a plan with pipeline stages: in each stage, and over time.

A stage is searched as the planner does it, with the choice forced; the other stages stay. Then the
pipeline is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hap.cluster.topology import Cluster
from hap.errors import HapError, PlanError
from hap.explanation.forced_choices import (
    ForcedChoice,
    best_first,
    both,
    changed,
    count_collectives,
    explain_devices,
    impossible,
    listed,
    other_shares,
    placements_in,
    the_plan,
)
from hap.ir.graph import Graph
from hap.ir.mesh import divide, origin
from hap.ir.microbatch_sizes import resized
from hap.ir.placement import Placement
from hap.ir.plan import Plan
from hap.ir.stages import Stage, cut_stages
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.pins import options_of, pinned
from hap.synthesizer.schedule.pipeline_simulator import StageSeconds, simulate_pipeline
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.stages.flights import arrange
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer, StageTask
from hap.synthesizer.stages.stage_times import StageFigures, figures
from hap.synthesizer.stages.stage_transfers import StageTransfers
from hap.synthesizer.stages.time_axis import OverTime

OVER_TIME = "over time"


def explain_staged_tensor(plan: Plan, tensor: str) -> list[ForcedChoice]:
    """Return a tensor's placements in the stages that store or make it, the fastest first."""
    variant, rows = _Variant.of(plan), list[ForcedChoice]()
    for number, (part, stage) in enumerate(zip(variant.parts, variant.stages, strict=True)):
        own = (t for t in part.tensors if origin(t).tensor == tensor and _made(part, t))
        if (name := next(own, None)) is None:
            continue
        chosen = placements_in(part, stage.program, name)
        rows.append(the_plan(plan, both(chosen), _level(number)))
        for placement in _options(part, stage, name):
            if chosen != (placement,):
                forced = variant.searched(number, {name: placement})
                rows.append(_row(plan, str(placement), number, forced))
    return best_first(rows)


def explain_staged_axis(plan: Plan, axis: str) -> list[ForcedChoice]:
    """Return other numbers of microbatches, and other shares of an axis in each stage."""
    variant, rows = _Variant.of(plan), list[ForcedChoice]()
    if axis in plan.shares:
        rows.append(the_plan(plan, _microbatches(variant.count), OVER_TIME))
        for count in (variant.count // 2, variant.count * 2):
            if count:
                rows.append(_row(plan, _microbatches(count), None, variant.in_microbatches(count)))
    for number, stage in enumerate(variant.stages):
        if axis not in stage.shares:
            continue
        mine, level = stage.shares[axis], _level(number)
        rows.append(the_plan(plan, listed(mine), level))
        for name, shares in other_shares(mine, variant.hardware(number).speed):
            other = replace(stage, shares={**stage.shares, axis: shares})
            rows.append(_row(plan, name, number, variant.with_stage(number, other)))
    return best_first(rows)


def explain_staged_device(plan: Plan, rank: int) -> list[ForcedChoice]:
    """Return the plan, its stages with the device missing in one, and the best without stages."""
    assert plan.stages is not None
    name, variant = plan.cluster.devices[rank].name, _Variant.of(plan)
    number, _ = plan.stages.place(rank)
    ranks = tuple(r for r in variant.stages[number].ranks if r != rank)
    rows = [
        row if row.chosen else replace(row, choice=f"{row.choice}, no stages")
        for row in explain_devices(plan, name, [rank])
    ]  # fmt: skip
    alone = HapError("its stage has no other device")
    forced = variant.searched(number, {}, ranks) if ranks else alone
    row = _row(plan, f"without {name}, the same cuts", number, forced)
    return best_first([*rows, replace(row, level="")])


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """A pipeline of the plan's cuts on the plan's devices, and its figures.

    ``part``: the step of a microbatch, of which there are ``count``.
    """

    plan: Plan
    part: Graph
    count: int
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, plan: Plan) -> _Variant:
        assert plan.stages is not None
        return cls(
            plan=plan, part=plan.microbatch(), count=plan.microbatches, stages=plan.stages.stages
        )

    @cached_property
    def parts(self) -> tuple[Graph, ...]:
        assert self.plan.stages is not None
        return cut_stages(self.part, self.plan.stages.cuts)[0]

    @property
    def collectives(self) -> int:
        return sum(count_collectives(stage.program, len(stage.ranks)) for stage in self.stages)

    def hardware(self, number: int) -> HardwareModel:
        return HardwareModel(self._cluster(self.stages[number].ranks))

    def _cluster(self, ranks: tuple[int, ...]) -> Cluster:
        return self.plan.cluster.keep(ranks)

    def with_stage(self, number: int, stage: Stage) -> _Variant:
        stages = (*self.stages[:number], stage, *self.stages[number + 1 :])
        return replace(self, stages=stages)

    def searched(
        self, number: int, pins: Mapping[str, Placement], ranks: tuple[int, ...] = ()
    ) -> _Variant | HapError:
        """Return the pipeline with a stage searched anew, or why there is none.

        Args:
            pins: placements that its program must have.
            ranks: those of the stage; default: the plan's.
        """
        assert self.plan.stages is not None
        stage = self.stages[number]
        time = OverTime(graph=self.plan.graph, program=self.plan.program)
        whole = cut_stages(time.whole(self.count), self.plan.stages.cuts)[0][number]
        task = StageTask(
            whole=whole, part=self.parts[number], ranks=ranks or stage.ranks, count=self.count,
            in_flight=min(self.count, len(self.stages) - number),
        )  # fmt: skip
        allowed = pinned(task.space, pins) if pins else None
        on, states = self._cluster(task.ranks), self.plan.optimizer.states
        try:
            program, shares = StageSynthesizer(task, on, states, allowed).chosen()
        except HapError as error:
            return error
        found = replace(stage, program=program, shares=shares, ranks=task.ranks)
        return self.with_stage(number, found)

    def in_microbatches(self, count: int) -> _Variant | None:
        """Return the same programs in another number of microbatches, if the batch can be cut so."""
        time = OverTime(graph=self.plan.graph, program=self.plan.program)
        shares = time.shares(count)
        if shares is None:
            return None
        try:
            other = replace(self, part=divide(time.graph, time.program, shares, 0), count=count)
            stages = []
            for stage, before, after in zip(self.stages, self.parts, other.parts, strict=True):
                scaled = resized(stage, before, after)
                if scaled is None:
                    return None
                stages.append(scaled)
        except PlanError:
            return None
        return replace(other, stages=tuple(stages))._arranged()

    def _arranged(self) -> _Variant:
        """Return the pipeline with its turns chosen anew; those of 1F1B if none fit the memory."""
        devices = self.plan.cluster.devices
        memory = [[float(devices[r].memory_bytes) for r in s.ranks] for s in self.stages]

        def of_stage(number: int, recompute: bool) -> StageFigures:
            stage = replace(self.stages[number], in_flight=1, delay=0, recompute=recompute)
            return self._figures(number, stage)

        arranged = arrange(of_stage, self._seconds, memory, self.count)
        if arranged is None:
            flights = tuple(min(self.count, len(memory) - k) for k in range(len(memory)))
            arranged = arrange(of_stage, self._seconds, memory, self.count, flights)
            assert arranged is not None  # given flights may lack memory
        stages = (
            replace(s, in_flight=t.in_flight, delay=f.delay, recompute=f.recompute)
            for s, f, t in zip(self.stages, *arranged, strict=True)
        )
        return replace(self, stages=tuple(stages))

    def _figures(self, number: int, stage: Stage) -> StageFigures:
        return figures(
            self.parts[number], stage.program, stage.shares, self.hardware(number),
            self.plan.optimizer.states, self.count, stage.in_flight, stage.delay, stage.recompute,
            stage.gather_each,
        )  # fmt: skip

    def _seconds(self, found: Sequence[StageFigures]) -> list[StageSeconds]:
        assert self.plan.stages is not None
        _, transfers = cut_stages(self.part, self.plan.stages.cuts)
        priced = StageTransfers(self.plan.cluster, self.parts, self.stages, transfers)
        return priced.seconds(found)

    def measured(self) -> tuple[float, float]:
        """Return (seconds of the step, bytes that the rank which lacks most lacks)."""
        found, lacking = [], 0.0
        for number, stage in enumerate(self.stages):
            found.append(self._figures(number, stage))
            for rank, peak in zip(stage.ranks, found[-1].peak_bytes, strict=True):
                lacking = max(lacking, float(peak) - self.plan.cluster.devices[rank].memory_bytes)
        return simulate_pipeline(self._seconds(found), self.count).step_s, lacking


def _options(part: Graph, stage: Stage, tensor: str) -> tuple[Placement, ...]:
    """Return the placements that a stage may give a tensor; none if it is one device."""
    return options_of(build_space(part), tensor) if len(stage.ranks) > 1 else ()


def _made(part: Graph, tensor: str) -> bool:
    """Return whether a stage makes or stores a tensor, rather than receives it."""
    return tensor in part.producer or any(
        i.tensor == tensor and i.role != "received" for i in part.inputs
    )


def _row(
    plan: Plan, choice: str, number: int | None, forced: _Variant | HapError | None
) -> ForcedChoice:
    level = OVER_TIME if number is None else _level(number)
    if not isinstance(forced, _Variant):
        return impossible(choice, forced, level)
    step_s, lacking = forced.measured()
    changes: tuple[str, ...] = ()
    if number is not None:
        before = _Variant.of(plan)
        changes = changed(
            before.parts[number], before.stages[number].program, forced.stages[number].program
        )
    return ForcedChoice(
        choice=choice, chosen=False, step_s=step_s, level=level, lacking_bytes=round(lacking),
        changes=changes, collectives=forced.collectives,
    )  # fmt: skip


def _level(number: int) -> str:
    return f"stage {number}"


def _microbatches(count: int) -> str:
    return f"{count} microbatch{'' if count == 1 else 'es'}"
