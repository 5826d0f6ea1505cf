"""Reductions of gradients beside the last backward: where they run, what they hide, what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from hap.ir.axes import Shares
from hap.ir.last_turn import after_microbatches, beside_last
from hap.ir.microbatch import is_sum
from hap.ir.program import Compute, Convert, Instruction, Program
from hap.ir.stages import PipelineStages, Stage, crossing, cut_stages
from hap.runtime.emit import Emitter
from hap.runtime.pipeline.segments import AFTER, SegmentLayout, StageSegment, emitted, layout
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.stages.gradient_buckets import in_buckets, last_turn, with_buckets
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer, StageTask
from hap.synthesizer.stages.stage_times import figures, stage_cost
from hap.synthesizer.stages.turn_seconds import TimedProgram
from tests.random_plans import benchmark_case, random_plan, two_machines, verdict
from tests.random_stages import divided

CLUSTER = two_machines(4)
COUNT = 2
TURN = StageSegment.LAST_TURN


@cache
def searched(family: str) -> tuple[StageTask, Program, Shares, CostModel]:
    """Return a model as one stage on four devices: its task, program, shares and prices."""
    time = divided(benchmark_case(family, "tiny"))
    (whole,), _ = cut_stages(time.whole(COUNT), ())
    (part,), _ = cut_stages(time.part(COUNT), ())
    ranks = tuple(range(CLUSTER.world_size))
    task = StageTask(whole=whole, part=part, ranks=ranks, count=COUNT, in_flight=1)
    program, shares = StageSynthesizer(task, CLUSTER, 2).chosen()
    return task, program, shares, stage_cost(part, program, shares, HardwareModel(CLUSTER), 2)


def reductions(task: StageTask, program: Program) -> list[int]:
    beside = sorted(beside_last(task.part, program))
    steps = program.instructions
    return [k for k in beside if isinstance(s := steps[k], Convert) and not s.local]


def at_the_end(task: StageTask, program: Program) -> Program:
    """Return the program with its reductions after the backward, fused."""
    beside = beside_last(task.part, program)
    order = sorted(range(len(program.instructions)), key=lambda k: (k in beside, k))
    steps = [program.instructions[k] for k in order]
    kinds = {s.kind: (n, s.implementation) for n, s in enumerate(steps) if isinstance(s, Convert)}

    def place(step: Instruction) -> tuple[int, int]:
        sums = isinstance(step, Compute) and is_sum(task.part.by_name[step.node])
        return (0, 0) if sums else (1, kinds[step.kind][0] if isinstance(step, Convert) else 0)

    def fused(step: Instruction) -> Instruction:
        how = kinds[step.kind][1] if isinstance(step, Convert) else ""
        return unfused(step, how)

    most = len(steps) - len(beside)
    last = map(fused, sorted(steps[most:], key=place))
    return replace(program, instructions=(*steps[:most], *last))


def unfused(step: Instruction, how: str = "") -> Instruction:
    return replace(step, bucket=0, implementation=how) if isinstance(step, Convert) else step


@pytest.mark.parametrize("family", ["vit", "bert", "gpt2", "llama"])
def test_buckets_follow_their_last_gradient(family: str) -> None:
    task, program, _, _ = searched(family)
    steps, beside = program.instructions, beside_last(task.part, program)
    maker = {v: k for k, s in enumerate(steps) for v in s.writes(task.part)}
    backward = [k for k, s in enumerate(steps) if s.backward and k not in beside]
    assert min(reductions(task, program)) < max(backward)
    buckets: dict[int, list[int]] = {}
    for k in reductions(task, program):
        step = steps[k]
        assert isinstance(step, Convert)
        buckets.setdefault(step.bucket, []).append(k)
    for each in buckets.values():
        sums = {maker[v] for k in each for v in steps[k].reads(task.part)}
        terms = {maker[v] for k in sums for v in steps[k].reads(task.part)}
        between = range(max(terms) + 1, min(each))
        assert all(k in beside for k in between)  # nothing of the backward delays it


@pytest.mark.parametrize("family", ["vit", "bert", "gpt2", "llama"])
def test_what_buckets_hide_is_no_longer_seen(family: str) -> None:
    task, program, shares, cost = searched(family)
    part = task.part
    late = at_the_end(task, program)
    late.check(part)
    assert last_turn(TimedProgram(part, late, cost)).hidden_s == pytest.approx(0.0, abs=1e-12)
    for count in (1, 2, 7):
        again = with_buckets(part, late, cost, count)
        again.check(part)
        assert Counter(map(unfused, again.instructions)) == Counter(map(unfused, late.instructions))
        assert len({s.bucket for s in again.collectives if s.bucket}) >= min(count, 2)
    chosen = in_buckets(part, late, cost)
    found = figures(part, chosen, shares, HardwareModel(CLUSTER), 2, COUNT, 1)
    before = figures(part, late, shares, HardwareModel(CLUSTER), 2, COUNT, 1)
    assert 0 < found.hidden_s < found.after_s
    assert found.after_s - found.hidden_s < before.after_s


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_the_last_turn_issues_reductions_before_it_ends(family: str) -> None:
    task, program, shares, _ = searched(family)
    made = layout(task.part, program)
    beside = beside_last(task.part, program)
    assert beside <= set(made.numbers[TURN])
    assert not beside.intersection(*(made.numbers[s] for s in AFTER))
    calls = _calls(task, program, shares, made)
    first = calls.index("reduce")
    assert "compute" in calls[first:]
    assert "wait" not in calls[first:]  # whoever reads the results waits


def _calls(task: StageTask, program: Program, shares: Shares, made: SegmentLayout) -> Sequence[str]:
    """Return the calls of the last turn in order: computing, reductions of sums, waits for them."""
    emitter = Emitter(
        graph=task.part, program=program, shares=shares, rank=0,
        device=torch.device("cpu"), over_time=True,
    )  # fmt: skip
    code = emitted(emitter, made, last=True)[TURN]
    assert TURN not in emitted(emitter, made, last=False)
    found, reduced = [], set[object]()
    for node in code.nodes:
        if node.op == "call_function" and "aten" in str(node.target):
            found.append("compute")
        elif node.target == "issue":
            flat = torch.fx.node.map_arg  # arguments may be lists
            read: list[torch.fx.Node] = []
            flat(node.args, read.append)
            if any(n.target == "total" for n in read):
                reduced.add(node)
                found.append("reduce")
        elif node.target == "wait" and node.args[1] in reduced:
            found.append("wait")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("vit", 1), ("bert_moe", 3), ("bert", 24)])
def test_buckets_compute_what_one_device_does(family: str, count: int) -> None:
    case = benchmark_case(family, "tiny")
    task, program, shares, cost = searched(family)
    program = with_buckets(task.part, at_the_end(task, program), cost, count)
    time = divided(case)
    stage = Stage(ranks=task.ranks, program=program, shares=shares, in_flight=1)
    plan = replace(
        random_plan(case, CLUSTER.world_size, 0), program=time.program,
        shares=time.shares(COUNT) or {}, idle=(), stages=PipelineStages(cuts=(), stages=(stage,)),
    )  # fmt: skip
    found = verdict(case, plan)
    assert found.ok, found


@pytest.mark.slow
def test_sums_of_several_stages_wait_for_the_others() -> None:
    """The weight of BERT's embedding is also the head's: the last stage returns its sum."""
    time = divided(benchmark_case("bert", "tiny"))
    places = list(crossing(time.part(COUNT)))
    cuts = (places[len(places) // 2],)
    graphs, transfers = cut_stages(time.part(COUNT), cuts)
    shared = [t.tensor for t in transfers if t.once and t.backward]
    assert shared
    for number, graph in enumerate(graphs):
        task = StageTask(
            whole=cut_stages(time.whole(COUNT), cuts)[0][number], part=graph,
            ranks=(0, 1, 2, 3), count=COUNT, in_flight=1,
        )  # fmt: skip
        program, _ = StageSynthesizer(task, CLUSTER, 2).chosen()
        early, late = after_microbatches(graph, program)
        read = {v.tensor for k in late for v in program.instructions[k].reads(graph)}
        if number:  # it returns the sum, and does that first
            assert not beside_last(graph, program)
            assert set(shared) <= {o.tensor for o in graph.outputs if o.role == "returned"}
        else:
            assert set(shared) <= read
            assert beside_last(graph, program) == early
