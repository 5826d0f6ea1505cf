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
from hap.synthesizer.accumulation import _fewest
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.memory_price import MemoryPrice
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.recompute_modes import WORTH
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer
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


@cache
def one_stage(memory: tuple[float, ...], family: str = "gpt2") -> tuple[StageSearch, Sketch]:
    """Return a search of a model on devices with so much memory, and its step in two microbatches."""
    on = two_machines(len(memory))
    devices = tuple(
        replace(d, memory_bytes=round(b)) for d, b in zip(on.devices, memory, strict=True)
    )
    search = StageSearch(benchmark_case(family, "tiny").space, replace(on, devices=devices), 2)
    ranks = tuple(range(len(memory)))
    return search, Sketch(
        groups=(ranks,), cuts=(), microbatches=2, estimate_s=0.0, least_s=0.0, indices=(0,)
    )


def priced_bytes(search: StageSearch, sketch: Sketch) -> float:
    """Return the most bytes of a rank if memory has its highest price."""
    ((task,), _) = search._tasks(sketch)
    synthesizer = StageSynthesizer(task, search.cluster, 2)
    shares = next(synthesizer.starts())
    first = synthesizer.cheapest(shares)
    price = MemoryPrice.of(first, synthesizer._lacking(first), synthesizer._memory)
    pair = synthesizer.cheapest(shares, price.at(price.highest))
    return float(synthesizer._held(*synthesizer._priced_part(pair)).max())


def test_gradients_are_reduced_at_once_where_memory_has_a_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = priced_bytes(*one_stage((1.0, 1.0, 1.0)))
    monkeypatch.setattr(Space, "terms", frozenset())
    assert least < priced_bytes(*one_stage((1.0, 1.0, 1.0)))


@pytest.mark.slow
def test_devices_with_more_memory_store_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are memories at which the step fits only with shares that were solved anew."""
    enough = priced_bytes(*one_stage((1.0, 1.0, 1.0)))

    def fits(part: float) -> bool:
        # A new search: nothing that was found before the patch.
        search, sketch = one_stage.__wrapped__((4 * enough, part * enough, part * enough))
        made = search.pipeline(sketch)
        return made is not None and made.fits

    parts = (0.9, 0.8, 0.7, 0.6)
    found = [fits(part) for part in parts]
    monkeypatch.setattr(StageSynthesizer, "_within_memory", lambda self, pair: pair)
    alike = [fits(part) for part in parts]
    assert all(a <= b for a, b in zip(alike, found, strict=True))
    assert sum(found) > sum(alike)


def test_no_microbatches_are_searched_that_would_take_too_long() -> None:
    search, sketch = one_stage((1e12, 1e12))
    roomy_s = search.roomy_s(sketch)
    assert _fewest(search, 0.99 * roomy_s, (0, 1)) is None
    made = _fewest(search, 1.01 * roomy_s, (0, 1))
    assert made
    pipeline = search.pipeline(made.sketch)
    assert pipeline
    assert pipeline.times.step_s <= 1.01 * roomy_s
