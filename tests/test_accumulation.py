"""Microbatches where memory is short: plans against every number of microbatches, and gathers of weights."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import hap
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, PlanningStopped
from hap.ir.plan import Plan
from hap.ir.program import Convert
from hap.ir.shared_pieces import in_pieces
from hap.ir.weight_gathers import before_microbatches, forward_gathers
from hap.runtime.pipeline.segments import StageSegment, layout
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.recompute_modes import WORTH
from hap.synthesizer.stages.stage_estimates import Sketch
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.stages.stage_times import figures
from tests.random_plans import Case, benchmark_case, two_machines, verdict
from tests.random_stages import FAMILIES, random_groups, random_staged_plan
from tests.test_recompute_modes import BATCH, Deep, unlike
from tests.test_recompute_modes import peak_bytes as deep_peak_bytes
from tests.test_synthesize import screen

BEFORE = (StageSegment.ONCE, StageSegment.SHARED)


def small(nbytes: float, world: int = 3) -> Cluster:
    """Return devices with so much memory each."""
    cluster = two_machines(world)
    devices = tuple(replace(d, memory_bytes=round(nbytes)) for d in cluster.devices)
    return replace(cluster, devices=devices)


def planned(case: Case, on: Cluster, *, accumulate: bool) -> Plan | None:
    torch.manual_seed(0)
    options = PlanOptions(accumulate=accumulate, recompute="", all_devices=True)
    try:
        return hap.plan(
            case.model, case.batch, on, loss=case.loss, optimizer=case.optimizer, options=options
        )
    except InfeasibleError:
        return None


@cache
def peak_bytes(family: str) -> int:
    """Return the highest peak of the plan without limits of memory."""
    plan = planned(benchmark_case(family, "tiny"), small(1e12), accumulate=True)
    assert plan is not None
    assert plan.stages is None
    return max(rank.peak_bytes for rank in plan.prediction.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, 0.8, 0.7, 0.6])
@pytest.mark.parametrize("family", ["vit", "llama"])
def test_microbatches_serve_memory(family: str, part: float) -> None:
    case, on = benchmark_case(family, "tiny"), small(part * peak_bytes(family))
    plan, whole = (planned(case, on, accumulate=given) for given in (True, False))
    assert whole is None or whole.stages is None
    assert plan or not whole
    if plan is None or plan.stages is None:
        assert plan == whole
        return
    assert part < 1
    (stage,) = plan.stages.stages
    assert len(stage.ranks) == on.world_size
    assert all(r.peak_bytes <= r.memory_bytes for r in plan.prediction.ranks)
    if whole:
        assert plan.prediction.step_s < whole.prediction.step_s
        (row,) = (a for a in plan.prediction.alternatives if a.name == "without microbatches")
        assert row.step_s == whole.prediction.step_s
    assert plan.prediction.bounds[0].step_s <= plan.prediction.step_s
    assert f"{plan.microbatches} microbatches" in screen(plan)
    assert verdict(case, plan).ok


@pytest.mark.slow
def test_a_step_that_fits_slowly_is_accumulated() -> None:
    """Without microbatches the weights of this model are gathered twice, or its rows are split."""
    torch.manual_seed(0)
    on, found = unlike(0.8 * deep_peak_bytes()), []
    for given in (True, False):
        options = PlanOptions(recompute="", accumulate=given)
        found.append(hap.plan(Deep(), BATCH, on, options=options))
    plan, whole = found
    assert plan.microbatches > 1
    assert whole.microbatches == 1
    assert plan.prediction.step_s < WORTH * whole.prediction.step_s


@pytest.mark.slow
def test_a_stop_keeps_the_plan_without_microbatches() -> None:
    def stop(text: str) -> None:
        if text == "memory is short: searching microbatches":
            raise PlanningStopped("stopped")

    options = PlanOptions(recompute="")
    plan = hap.plan(Deep(), BATCH, unlike(0.8 * deep_peak_bytes()), options=options, progress=stop)
    assert (plan.stopped, plan.microbatches) == ("stopped", 1)


@pytest.mark.slow
def test_the_fewest_microbatches_that_fit_are_taken() -> None:
    case, on = benchmark_case("llama", "tiny"), small(0.6 * peak_bytes("llama"))
    plan = planned(case, on, accumulate=True)
    assert plan is not None
    assert plan.stages is not None
    assert plan.stages.stages[0].gather_each
    search = StageSearch(case.space, on, 2)
    fewer = [count for count in search.estimates.counts if count < plan.microbatches]
    for count in fewer:
        made = search.pipeline(
            Sketch(
                groups=(tuple(range(on.world_size)),), cuts=(), microbatches=count,
                estimate_s=0.0, least_s=0.0,
            )
        )  # fmt: skip
        assert made is None or not made.fits


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), itertools.product(FAMILIES, range(2)))
def test_gathers_run_in_each_microbatch(family: str, seed: int) -> None:
    """The runtime's segments, the prices and the memory agree on what runs once per step."""
    groups = random_groups(random.Random(f"gathers/{family}/{seed}"))
    plan = random_staged_plan(benchmark_case(family, "tiny"), groups, seed)
    assert plan.stages is not None
    for part, stage in zip(plan.cut[0], plan.stages.stages, strict=True):
        program, world = stage.program, len(stage.ranks)
        each = forward_gathers(part, program)
        assert each <= before_microbatches(part, program)
        assert all(isinstance(program.instructions[k], Convert) for k in each)
        hardware = HardwareModel(two_machines(world))
        found = {
            given: figures(part, program, stage.shares, hardware, 2, 4, 1, gather_each=given)
            for given in (False, True)
        }
        for given, numbers in ((False, frozenset[int]()), (True, each)):
            made = layout(part, program, world_size=world, gather_each=given).numbers
            once = before_microbatches(part, program, numbers)
            split = in_pieces(part, program, world)
            assert once - {*split} == {k for s in BEFORE for k in made[s]}
            assert numbers <= {*made[StageSegment.FORWARD]}
        once_, again = found[False], found[True]
        steps = (program.instructions[k] for k in each)
        gathering = 2 * sum(part.tensors[s.tensor].nbytes for s in steps if isinstance(s, Convert))
        assert (again.peak_bytes <= once_.peak_bytes + gathering).all()
        assert again.before_s <= once_.before_s
        assert again.forward_s >= once_.forward_s
        if not each:
            assert again.before_s == once_.before_s
            assert (again.peak_bytes == once_.peak_bytes).all()


@pytest.mark.slow
def test_devices_with_more_memory_store_more() -> None:
    """Two of three equal devices have little memory; nothing fits if all store alike."""
    torch.manual_seed(0)
    on, options = two_machines(3), PlanOptions(recompute="", all_devices=True)
    peak = deep_peak_bytes()

    def planned(part: float) -> Plan:
        memory = (2 * peak, part * peak, part * peak)
        devices = tuple(
            replace(d, memory_bytes=round(b)) for d, b in zip(on.devices, memory, strict=True)
        )
        return hap.plan(Deep(), BATCH, replace(on, devices=devices), options=options)

    plans = [planned(part) for part in (0.45, 0.4, 0.35)]
    assert any(plan.microbatches > 1 for plan in plans)
    for plan in plans:
        first, *others = plan.prediction.ranks
        assert all(first.peak_bytes > rank.peak_bytes for rank in others)
        assert all(r.peak_bytes <= r.memory_bytes for r in plan.prediction.ranks)
