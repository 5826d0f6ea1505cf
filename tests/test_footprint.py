"""Memory: a definition written out moment by moment, buffers by hand, and sums by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hap.axes import Axes, Axis
from hap.graph import Graph
from hap.placement import P, R, S
from hap.plan import Plan
from hap.program import Compute, Convert, Instruction, Value
from hap.synthesizer.cost import CostModel, Machine
from hap.synthesizer.footprint import KINDS, at_peak, communication_buffers, memory
from hap.synthesizer.overlap import orders
from hap.synthesizer.storage import program_axes
from hap.synthesizer.work import FREE
from tests.random_plans import benchmark_case, random_plan, two_machines
from tests.small_plan import small_graph

STATES = 2


def price(plan: Plan, axes: Axes) -> CostModel:
    machine = Machine(plan.cluster)
    return CostModel(plan.graph, program_axes(axes, plan.program), machine, plan.shares, STATES)


def touched(graph: Graph, step: Instruction) -> tuple[list[Value], list[Value], bool]:
    if isinstance(step, Convert):
        return [Value(step.tensor, step.src)], [Value(step.tensor, step.dst)], step.kind == "slice"
    node = graph.by_name[step.node]
    outs = zip(node.outputs, step.outs, strict=True)
    ins = [Value(n, p) for n, p in zip(node.inputs, step.ins, strict=True)]
    return ins, [Value(o, p) for o, p in outs if o and p], node.op in FREE


def by_definition(plan: Plan, cost: CostModel, until: Sequence[int]) -> np.ndarray:
    """The peak, asking at every moment of every storage whether it still lives."""
    graph, program = plan.graph, plan.program
    groups = list(program.groups(graph))
    storage = {Value(t, p): Value(t, p) for t, p in program.inputs.items()}
    given = set(storage)
    born: dict[Value, int] = {}
    for at, group in enumerate(groups):
        for step in group:
            ins, outs, view = touched(graph, step)
            for value in outs:
                storage[value] = storage[ins[0]] if view and ins else value
                born.setdefault(storage[value], at)
    uses = [
        (storage[v], until[at])
        for at, group in enumerate(groups)
        for step in group
        for side in touched(graph, step)[:2]
        for v in side
    ]
    ends = {
        storage[Value(o.tensor, p)]
        for o, p in zip(graph.outputs, program.outputs, strict=True)
    }  # fmt: skip

    def lives(value: Value, at: int) -> bool:
        if born[value] > at:
            return False
        return value in ends or max(k for v, k in uses if v == value) >= at

    def nbytes(value: Value) -> np.ndarray:
        return cost.local_bytes(graph.tensors[value.tensor], value.placement)

    always = np.zeros(plan.world_size)
    for i in graph.inputs:
        trained = i.role == "parameter" and i.target in graph.gradients
        always = always + (1 + STATES * trained) * nbytes(Value(i.tensor, program.inputs[i.tensor]))
    peak = always
    for at in range(len(groups)):
        made = [nbytes(v) for v in born if v not in given and lives(v, at)]
        under_way = [
            communication_buffers(groups[k], cost) for k in range(at + 1) if until[k] >= at
        ]
        peak = np.maximum(peak, always + np.sum(made, axis=0) + np.max(under_way, axis=0))
    return peak


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [2, 3])
def test_the_peak_is_that_of_the_definition(seed: int, world: int) -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, world, seed)
    cost = price(plan, case.space.axes)
    moments = range(len(list(plan.program.groups(plan.graph))))
    peak = memory(plan.graph, plan.program, cost)[1]
    assert peak == pytest.approx(by_definition(plan, cost, moments))
    *_, order = orders(plan.graph, plan.program, cost)
    plan = replace(plan, program=order.program)
    peak = memory(plan.graph, plan.program, cost, until=order.until)[1]
    assert peak == pytest.approx(by_definition(plan, cost, order.until))


@pytest.mark.parametrize("file", ["mlp", "bert_moe"])
def test_kinds_add_up_to_the_peak(file: str) -> None:
    case = benchmark_case(file, "tiny")
    seen = set()
    for seed in range(3):
        plan = random_plan(case, 3, seed)
        cost = price(plan, case.space.axes)
        kinds = at_peak(plan.graph, plan.program, cost)
        peak = memory(plan.graph, plan.program, cost)[1]
        assert sum(kinds.values()) == pytest.approx(peak)
        seen |= {kind for kind, nbytes in kinds.items() if nbytes.any()}
    wanted = {"parameters", "optimizer states", "gradients"}
    if file == "bert_moe":  # an MLP's are gone when the gradients are all there
        wanted |= {"saved activations"}
    assert wanted <= seen <= set(KINDS)


def test_buffers_of_collectives() -> None:
    """w0 and w1 are 4 x 6 float32, 96 bytes, their first dim cut 3 : 1."""
    graph = small_graph()
    axes = Axes(axes={"a": Axis(name="a", units=4)}, of={("w0", 0): "a", ("w1", 0): "a", ("w0", 1): "a"})  # fmt: skip
    cost = CostModel(graph, axes, Machine(two_machines(2)), {"a": (3, 1)}, STATES)

    def buffers(kind: str, count: int) -> list[float]:
        src, dst, how = {
            "padded gather": (S(0), R, "padded"), "grouped gather": (S(0), R, "grouped"),
            "padded scatter": (P, S(0), "padded"), "grouped scatter": (P, S(0), "grouped"),
            "one shot": (P, R, "one shot"), "two step": (P, R, "two step"),
            "exact": (S(0), S(1), "exact"), "slice": (R, S(0), ""),
        }[kind]  # fmt: skip
        group = [
            Convert(tensor=f"w{k}", src=src, dst=dst, implementation=how, backward=False)
            for k in range(count)
        ]
        return communication_buffers(group, cost).tolist()

    assert buffers("padded gather", 1) == [144, 144]  # two of the larger shard
    assert buffers("padded gather", 2) == [288, 288]
    assert buffers("grouped gather", 1) == [0, 0]
    assert buffers("grouped gather", 2) == [192, 192]  # end to end, then apart
    assert buffers("padded scatter", 1) == [144, 144]
    assert buffers("padded scatter", 2) == [192 + 288, 192 + 288]
    assert buffers("grouped scatter", 1) == [96, 96]
    assert buffers("one shot", 1) == [0, 0]
    assert buffers("one shot", 2) == [192, 192]
    assert buffers("two step", 1) == [96, 96]
    assert buffers("exact", 1) == [144, 48]  # what is sent and what is received
    assert buffers("slice", 1) == [0, 0]
    compute = Compute(node="y0", ins=(S(0), R), outs=(S(0),), backward=False)
    assert not communication_buffers([compute], cost).any()
