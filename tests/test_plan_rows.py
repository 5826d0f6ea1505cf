"""A plan's instructions are rows of rules; others are refused by name before anything runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hap
from hap.errors import PlanError
from hap.ir.placement import P, R
from hap.ir.plan import Plan
from hap.ir.program import Compute
from hap.plan_rows import check_rows
from hap.synthesizer.rules import Call
from hap.synthesizer.rules.textual_rules import kind
from tests.random_plans import benchmark_case, random_plan, two_machines
from tests.test_autocast import half_case
from tests.test_two_axes import random_mesh_plan
from tests.test_verify import dropped_all_reduce, dropped_mask

MODELS = [("bert", "tiny"), ("bert_moe", "tiny"), ("llama", "tiny_gqa"), ("vgg19", "tiny"),
          ("vit", "tiny_dropout"), ("mlp", "tiny")]  # fmt: skip


@pytest.mark.parametrize(("file", "variant"), MODELS)
def test_all_instructions_of_plans_are_rows(file: str, variant: str) -> None:
    case = benchmark_case(file, variant)
    for world, seed in ((2, 0), (5, 1)):
        check_rows(random_plan(case, world, seed))


def test_also_over_two_mesh_axes() -> None:
    check_rows(random_mesh_plan(benchmark_case("mlp", "tiny"), 2, 2, 0))


def test_the_check_takes_less_than_a_second_on_bert() -> None:
    plan = random_plan(benchmark_case("bert", "tiny"), 4, 0)
    start = time.perf_counter()
    check_rows(plan)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    "corrupt", [partial(dropped_all_reduce, backward=False),
                partial(dropped_all_reduce, backward=True), dropped_mask],
)  # fmt: skip
def test_wrong_rows_are_refused_by_name(corrupt: Callable[[Plan], tuple[Plan, str]]) -> None:
    case = benchmark_case("mlp", "tiny")
    for seed in range(60):  # the first random plan that can be broken so
        plan = random_plan(case, 3, 100 + seed)
        try:
            broken, tensor = corrupt(plan)
        except AssertionError:
            continue
        break
    check_rows(plan)
    name = case.graph.producer[tensor].name
    with pytest.raises(PlanError, match=f"instruction '{name}' .* which no rule gives") as error:
        check_rows(broken)
    assert "\n" not in error.value.what and error.value.hint


@pytest.mark.slow
def test_a_row_that_is_wrong_in_evaluation_alone_is_refused() -> None:
    """Three training steps do not show it: a bias of the running statistics."""
    case = half_case("", "float16")
    plans = (random_plan(case, 3, seed) for seed in range(20))
    broken = next(b for b, tensor in map(dropped_mask, plans) if tensor == "by_mode")
    with pytest.raises(PlanError, match="instruction 'by_mode'"):
        check_rows(broken)


def test_dims_of_one_instruction_lie_on_one_axis() -> None:
    plan = random_plan(benchmark_case("mlp", "tiny"), 2, 0)
    graph = plan.graph
    step = next(
        s for s in plan.program.instructions
        if isinstance(s, Compute) and sum(p.sharded for p in s.ins) and s.outs[0] and s.outs[0].sharded
    )  # fmt: skip
    name, placed = graph.by_name[step.node].outputs[0], step.outs[0]
    assert name is not None and placed is not None
    dim = f"{name}:{placed.dim}"
    other = ("another", plan.program.axes[dim][1])
    program = replace(plan.program, axes={**plan.program.axes, dim: other})
    shares = {**plan.shares, "another": plan.shares[plan.program.axes[dim][0]]}
    with pytest.raises(PlanError, match=r"cut along different axes: .*'another'"):
        check_rows(replace(plan, program=program, shares=shares))


FILE = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))


def batch():
    return torch.randn(8, 12)


def loss(output, batch):
    return output.square().mean()
"""


def summed_on_each_rank(plan: Plan) -> Plan:
    """Return the plan whose first whole result of a product is said to be a term of a sum."""
    steps = list(plan.program.instructions)
    for k, step in enumerate(steps):
        if isinstance(step, Compute) and step.ins and all(p == R for p in step.ins):
            steps[k] = replace(step, outs=tuple(p and P for p in step.outs))
            return replace(plan, program=replace(plan.program, instructions=tuple(steps)))
        if isinstance(step, Compute) and step.outs[0] is not None and step.outs[0].sharded:
            steps[k] = replace(step, outs=(P, *step.outs[1:]))
            return replace(plan, program=replace(plan.program, instructions=tuple(steps)))
    raise AssertionError("no such instruction")


def test_verify_and_compile_refuse_such_a_plan(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE)
    plan = hap.api.plan_file(str(tmp_path / "model.py"), two_machines(2))
    broken = summed_on_each_rank(plan)
    with pytest.raises(PlanError, match="which no rule gives"):
        hap.verify(broken)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
    with pytest.raises(PlanError, match="which no rule gives"):
        hap.compile(model, broken, loss=lambda output, batch: output.square().mean())
    assert hap.verify(plan).ok


def test_rules_that_the_plan_declares_count() -> None:
    """A row that the table lacks is refused, unless the plan holds a rule with it."""
    torch.manual_seed(0)
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 0)
    ops = Counter(node.op for node in plan.graph.nodes)
    step = next(
        s for s in plan.program.instructions
        if isinstance(s, Compute) and len(s.ins) == 1 and s.ins[0].sharded
        and ops[plan.graph.by_name[s.node].op] == 1
    )  # fmt: skip
    node = plan.graph.by_name[step.node]
    wrong = replace(step, outs=(P, *step.outs[1:]))
    steps = tuple(wrong if s is step else s for s in plan.program.instructions)
    broken = replace(plan, program=replace(plan.program, instructions=steps))
    with pytest.raises(PlanError, match="which no rule gives"):
        check_rows(broken)
    own = {kind(Call(node=node, tensors=plan.graph.tensors)): (f"{step.ins[0]} -> P",)}
    check_rows(replace(broken, graph=replace(plan.graph, rules=own)))
