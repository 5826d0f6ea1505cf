"""``hap simulate``, ``hap show`` and ``hap report`` of plans with pipeline stages."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from rich.console import Console

from hap.cli.chrome_trace import trace_text
from hap.cli.pipeline_hint import pipeline_hint
from hap.cli.plan_screen import plan_screen
from hap.cli.report.figures_json import shown_with
from hap.cli.report.page import report_page
from hap.cli.simulation import rank_uses, simulation_json
from hap.errors import PlanError
from hap.ir.pipeline_order import StageWork
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan
from hap.synthesizer.schedule.event_simulator import COMPUTE
from tests.random_plans import benchmark_case
from tests.random_stages import random_staged_plan
from tests.test_stages import slow_pair


@cache
def planned() -> Plan:
    return slow_pair(benchmark_case("vit", "tiny"))


@pytest.mark.slow
def test_a_planned_pipeline_is_simulated_as_it_was_predicted() -> None:
    plan = planned()
    made = simulate_plan(plan)
    assert made.run.step_s == plan.prediction.step_s
    for rank, curve in zip(plan.prediction.ranks, made.memory, strict=True):
        assert round(float(curve.bytes.max())) == rank.peak_bytes
    for rank, parts in zip(plan.prediction.ranks, shown_with(made)["memory_parts"], strict=True):
        assert sum(parts.values()) == pytest.approx(rank.peak_bytes, abs=len(parts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("vit", (1, 1)),
        ("vit", (2, 1)),
        ("vit", (1, 2, 1)),
        ("gpt2", (1, 2, 1)),
        ("bert_moe", (2, 1)),
    ],
)
def test_turns_and_uses_of_random_pipelines(family: str, groups: tuple[int, ...]) -> None:
    plan = random_staged_plan(benchmark_case(family, "tiny"), groups, 3)
    made = simulate_plan(plan)
    ended: dict[tuple[int, int, str], float] = {}
    arrived: dict[tuple[int, int, str], float] = {}
    turns, delayed = defaultdict(list), set[int]()
    for span in made.run.spans:
        work = span.what
        assert isinstance(work, StageWork)
        first = plan.groups[work.stage][0]
        start, end = float(span.start_s[first]), float(span.end_s[first])
        assert not span.end_s[
            [r for r in range(plan.world_size) if r not in plan.groups[work.stage]]
        ].any()
        if work.to >= 0:
            assert start >= ended[work.stage, work.microbatch, work.part]
            arrived[work.to, work.microbatch, work.part] = end
        elif work.weights:
            assert start >= ended[work.stage, work.microbatch, work.part]
            turns[work.stage].append((start, end))
            delayed.add(work.stage)
        elif work.microbatch >= 0:
            ended[work.stage, work.microbatch, work.part] = end
            turns[work.stage].append((start, end))
            source = arrived.get((work.stage, work.microbatch, work.part), 0.0)
            assert start >= source
    count = plan.microbatches
    assert plan.stages is not None
    assert delayed <= {k for k, stage in enumerate(plan.stages.stages) if stage.delay}
    assert {stage: len(each) for stage, each in turns.items()} == {
        k: (3 if k in delayed else 2) * count for k in range(len(groups))
    }
    for each in turns.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(each), sorted(each)[1:], strict=False))
    for use in rank_uses(made):
        used = use.compute_s + use.waiting_s + use.communicate_s - use.overlapped_s + use.idle_s
        assert used == pytest.approx(made.run.step_s, rel=1e-9)
        assert use.peak_bytes > 0


def test_no_slices_of_a_thread_overlap_in_a_trace() -> None:
    plan = random_staged_plan(benchmark_case("vit", "tiny"), (1, 2, 1), 5)
    made = simulate_plan(plan)
    events = json.loads("".join(trace_text(plan, made.run, made.memory)))["traceEvents"]
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {rank for rank, _ in slices} == set(range(plan.world_size))
    for each in slices.values():
        each.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(each))
    assert any(event["ph"] == "C" for event in events)


def test_the_page_has_stages_transfers_and_modules() -> None:
    plan = planned()
    page = report_page(plan, name="plan.json")
    assert plan.stages is not None
    for number in range(len(plan.stages.stages)):
        assert f"stage {number}, forward" in page
        assert f"on stage {number}" in page
    for transfer in plan.cut[1]:
        assert f"stage {transfer.src} makes it and stage {transfer.dst} reads it" in page
    assert f"<b>{len(plan.stages.stages)}</b> stages, <b>{plan.microbatches}</b> micro" in page
    assert "<h2>Transfers</h2>" in page
    assert page.count("<canvas ") == plan.world_size
    turns = [s for s in simulate_plan(plan).run.spans if s.stream == COMPUTE]
    assert all(str(s.what) in page for s in turns)


@pytest.mark.parametrize("compare", [False, True])
def test_the_step_of_a_pipeline_has_no_sum_of_all_it_moves(compare: bool) -> None:
    """Its ranks take turns, and what its transfers take depends on them."""
    plan = planned()
    out = io.StringIO()
    Console(file=out, width=200).print(plan_screen(plan, compare=compare))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    (mine,) = (line for line in lines if line.startswith("this plan"))
    if compare:
        assert mine.split()[5] == "-"
    else:
        assert mine.endswith(" computing on the busiest device, 0 ns in collectives inside stages")
    stages = [line for line in lines if line.startswith(("0 0 ", "1 1 "))]
    assert len(stages) == 2, "each is one device"
    assert "axis of a microbatch" not in out.getvalue()


def test_the_shares_of_a_stage_are_listed_by_axis() -> None:
    plan = random_staged_plan(benchmark_case("vit", "tiny"), (1, 2, 1), 5)
    assert plan.stages is not None
    out = io.StringIO()
    Console(file=out, width=200).print(plan_screen(plan))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    head = lines.index("stage axis of a microbatch units per rank")
    axes = plan.stages.stages[1].program.used_axes()
    assert axes
    rows = list(itertools.takewhile(lambda line: line.startswith("1 "), lines[head + 1 :]))
    assert sum(int((re.findall(r"\((\d+)x\)", row) or [1])[0]) for row in rows) == len(axes)
    parts = {
        f"{axes[a]} -> {' '.join(map(str, s))}" for a, s in plan.stages.stages[1].shares.items()
    }
    assert {
        row[row.index(" -> ") - len(row.split(" -> ")[0].split()[-1]) :] for row in rows
    } == parts


def test_the_longest_work_names_stages() -> None:
    data = simulation_json(simulate_plan(planned()))
    assert {row["of"] for row in data["longest"]} <= {"stage 0", "stage 1"}
    assert np.isclose(data["step_s"], planned().prediction.step_s)


def test_in_turn_is_refused() -> None:
    with pytest.raises(PlanError, match="never in turn"):
        simulate_plan(planned(), overlap=False)


@pytest.mark.slow
def test_a_pipeline_that_is_estimated_to_be_faster_is_named() -> None:
    case = benchmark_case("vit", "tiny")
    plan = slow_pair(case, stages=False)
    assert "--stages searches for one" in pipeline_hint(plan, plan.cluster)
    quick = replace(plan, prediction=replace(plan.prediction, step_s=1e-9))
    assert pipeline_hint(quick, plan.cluster) == ""
