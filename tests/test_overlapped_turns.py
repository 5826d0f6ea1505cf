"""Collectives beside the computing of a microbatch: the order of instructions, waits, seconds, memory."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hap.ir.graph import Graph
from hap.ir.last_turn import all_after
from hap.ir.pipeline_order import PENDING
from hap.ir.program import Convert, Instruction, Program, Value
from hap.ir.stages import Stage
from hap.ir.weight_gathers import before_microbatches, forward_gathers
from hap.runtime.emit import Emitter
from hap.runtime.pipeline.segments import StageSegment, emitted, layout
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.stages.overlapped_turns import overlapped, with_depth
from hap.synthesizer.stages.stage_memory import last_groups
from hap.synthesizer.stages.stage_times import stage_cost
from hap.synthesizer.stages.turn_seconds import TimedProgram
from tests.random_plans import benchmark_case, two_machines
from tests.random_stages import FAMILIES, random_groups, random_staged_plan

DEPTHS = (1, 2, 4)
TURNS = (StageSegment.FORWARD, StageSegment.BACKWARD)


def stages(family: str, seed: int) -> Iterator[tuple[Graph, Stage, CostModel]]:
    """Yield random stages of several ranks: the graph of a microbatch, the stage, its prices."""
    groups = random_groups(random.Random(f"turns/{family}/{seed}"))
    plan = random_staged_plan(benchmark_case(family, "tiny"), groups, seed)
    assert plan.stages is not None
    for part, stage in zip(plan.cut[0], plan.stages.stages, strict=True):
        world = len(stage.ranks)
        if world > 1:
            hardware = HardwareModel(two_machines(world))
            yield part, stage, stage_cost(part, stage.program, stage.shares, hardware, 2)


def unfused(step: Instruction) -> Instruction:
    return replace(step, bucket=0) if isinstance(step, Convert) else step


def steps_of(part: Graph, program: Program) -> dict[StageSegment, Counter[Instruction]]:
    """Return the instructions of each segment that gathers weights in each microbatch."""
    made = layout(part, program, gather_each=True).numbers
    return {s: Counter(unfused(program.instructions[k]) for k in own) for s, own in made.items()}


def microbatch(part: Graph, program: Program, *, backward: bool) -> frozenset[int]:
    """Return the instructions of a microbatch's forward or backward."""
    once = before_microbatches(part, program, forward_gathers(part, program))
    once |= all_after(part, program)
    steps = program.instructions
    return frozenset(
        k for k in range(len(steps)) if steps[k].backward is backward and k not in once
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), itertools.product(FAMILIES, range(3)))
def test_an_order_has_the_same_instructions(family: str, seed: int) -> None:
    for part, stage, cost in stages(family, seed):
        program = stage.program
        for depth in DEPTHS:
            moved = with_depth(TimedProgram(part, program, cost), depth)
            moved.check(part)
            assert steps_of(part, moved) == steps_of(part, program)
            again = with_depth(TimedProgram(part, moved, cost), depth)
            assert Counter(map(unfused, again.instructions)) == Counter(
                map(unfused, program.instructions)
            )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_waits_are_where_the_memory_assumes_them(family: str) -> None:
    """The emitted code has waited for what the memory regards as ended, and issues few beside.

    A rank without rows of an operator does not read what it would read, and so does not wait for it.
    """
    seen = 0
    for part, stage, _ in itertools.chain.from_iterable(stages(family, seed) for seed in range(6)):
        ranks = range(len(stage.ranks))
        busy = [r for r in ranks if all(share[r] for share in stage.shares.values())]
        if not busy:
            continue
        made = layout(part, stage.program, gather_each=stage.gather_each)
        emitter = Emitter(
            graph=part, program=stage.program, shares=stage.shares, rank=busy[0],
            device=torch.device("cpu"), over_time=True,
        )  # fmt: skip
        each = forward_gathers(part, stage.program) if stage.gather_each else frozenset[int]()
        early = before_microbatches(part, stage.program, each)
        bounds, last = stage.program.bounds(part), last_groups(part, stage.program, early)
        for segment, code in emitted(emitter, made, last=False).items():
            if segment not in TURNS:
                continue
            own = [
                at for at, (first, end) in enumerate(bounds)
                if not {*range(first, end)}.isdisjoint(made.numbers[segment])
                and isinstance(step := stage.program.instructions[first], Convert) and not step.local
            ]  # fmt: skip
            issued: list[torch.fx.Node] = []
            waited = set[torch.fx.Node]()
            for node in code.nodes:
                if node.target == "issue":
                    under_way = [at for at, n in zip(own, issued, strict=False) if n not in waited]
                    assert len(under_way) <= PENDING
                    assert all(last[at] >= own[len(issued)] for at in under_way)
                    issued.append(node)
                elif node.target == "wait":
                    result = node.args[1]
                    assert isinstance(result, torch.fx.Node)
                    waited.add(result if result.target == "issue" else result.all_input_nodes[0])
            assert len(issued) == len(own)
            seen += len(issued)
    assert seen


def weights_in_use(part: Graph, program: Program, *, backward: bool) -> int:
    """Return how many weights are gathered at most before the first reader of the first of them."""
    turn, waiting, most = microbatch(part, program, backward=backward), set[Value](), 0
    weights = {i.tensor for i in part.role("parameter")}
    for k in sorted(turn):
        step = program.instructions[k]
        waiting.difference_update(step.reads(part))
        if isinstance(step, Convert) and not step.local and step.tensor in weights:
            waiting.update(step.writes(part))
            most = max(most, len(waiting))
    return most


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2"])
def test_gathers_are_issued_early_and_reductions_are_read_late(family: str) -> None:
    """Of random programs some get faster, and the depth bounds how many weights are gathered ahead."""
    faster = 0
    for part, stage, cost in itertools.chain.from_iterable(stages(family, s) for s in range(4)):
        program = stage.program
        for backward in (False, True):
            plain = weights_in_use(part, program, backward=backward)
            for depth in DEPTHS:
                found = weights_in_use(
                    part, with_depth(TimedProgram(part, program, cost), depth), backward=backward
                )
                assert found <= plain + depth
        chosen = overlapped(part, program, cost)
        for backward in (False, True):
            before, after = (
                TimedProgram(part, p, cost).turn_s(microbatch(part, p, backward=backward))
                for p in (program, chosen)
            )
            faster += after < 0.99 * before
    assert faster


@pytest.mark.parametrize("family", ["vit", "llama"])
def test_a_turn_takes_no_less_than_its_parts(family: str) -> None:
    for part, stage, cost in stages(family, 0):
        timed = TimedProgram(part, stage.program, cost)
        for backward in (False, True):
            turn = microbatch(part, stage.program, backward=backward)
            own = [g for g in timed.groups if turn.issuperset(range(g.first, g.end))]
            computing = sum(g.seconds for g in own if not g.messages)
            communicating = sum(float(g.seconds.max()) for g in own if g.messages)
            serial_s, seconds = (timed.turn_s(turn, overlap=given) for given in (False, True))
            assert max(float(computing.max()), communicating) <= seconds * (1 + 1e-9)
            assert seconds <= serial_s * (1 + 1e-9)
