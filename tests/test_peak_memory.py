"""Peak memory: against its definition moment by moment, buffers by hand, and sums by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.racing.memory import traced
from hap.ir.axes import Axes, Axis
from hap.ir.graph import FREE, Graph, Input, Node, Ref, Tensor
from hap.ir.placement import P, R, S
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert, Instruction, Value
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.liveness import storages
from hap.synthesizer.cost.peak_memory import (
    KINDS,
    at_peak,
    communication_buffers,
    memory,
    update_bytes,
    while_updating,
    workspace,
)
from hap.synthesizer.cost.serial_cost import simulate
from hap.synthesizer.recompute_modes import least_bytes, on_each_kind
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.schedule.list_scheduler import orders
from hap.synthesizer.shares.storage_sharding import program_axes
from tests.random_plans import benchmark_case, random_plan, two_machines
from tests.small_plan import small_graph

STATES = 2


def price(plan: Plan, axes: Axes) -> CostModel:
    """Return the costs on a cluster whose first device is a GPU; the others are CPUs."""
    first, *others = plan.cluster.devices
    devices = (replace(first, kind="A100-40"), *others)
    hardware = HardwareModel(replace(plan.cluster, devices=devices))
    return CostModel(plan.graph, program_axes(axes, plan.program), hardware, plan.shares, STATES)


def touched(graph: Graph, step: Instruction) -> tuple[list[Value], list[Value], bool]:
    if isinstance(step, Convert):
        return [Value(step.tensor, step.src)], [Value(step.tensor, step.dst)], step.kind == "slice"
    node = graph.by_name[step.node]
    outs = zip(node.outputs, step.outs, strict=True)
    ins = [Value(n, p) for n, p in zip(node.inputs, step.ins, strict=True)]
    return ins, [Value(o, p) for o, p in outs if o and p], node.op in FREE


def by_definition(plan: Plan, cost: CostModel, until: Sequence[int]) -> np.ndarray:
    """Return the peak, by checking at every instruction which storages are alive."""
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

    def workspace(group: Sequence[Instruction]) -> np.ndarray:
        """Return the workspace of the loss: one copy of the logits, or two in the backward."""
        found = np.zeros(plan.world_size)
        for step in group:
            if isinstance(step, Compute) and "cross_entropy" in step.node:
                ins, _, _ = touched(graph, step)
                logits = max(ins, key=lambda v: graph.tensors[v.tensor].nbytes)
                found = found + (2 if step.backward else 1) * nbytes(logits)
        return found

    peak = always
    for at in range(len(groups)):
        made = [nbytes(v) for v in born if v not in given and lives(v, at)]
        under_way = [
            communication_buffers(groups[k], cost) for k in range(at + 1) if until[k] >= at
        ]
        beside = np.max(under_way, axis=0) + workspace(groups[at])
        peak = np.maximum(peak, always + np.sum(made, axis=0) + beside)
    kept = [nbytes(v) for v in ends & born.keys() - given]
    return np.maximum(peak, always + np.sum(kept, axis=0) + update_by_definition(plan, cost))


def update_by_definition(plan: Plan, cost: CostModel) -> np.ndarray:
    """Return the bytes of one tensor per trained parameter on the GPU."""
    found = np.zeros(plan.world_size)
    for i in plan.graph.inputs:
        if i.role == "parameter" and i.target in plan.graph.gradients:
            placed = plan.program.inputs[i.tensor]
            found = found + cost.local_bytes(plan.graph.tensors[i.tensor], placed)
    return np.array([found[0], *np.zeros(plan.world_size - 1)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "world", "seed"),
    [*(("mlp", world, seed) for world in (2, 3) for seed in range(4)), ("vit", 2, 0)],
)
def test_the_peak_is_that_of_the_definition(file: str, seed: int, world: int) -> None:
    case = benchmark_case(file, "tiny")
    plan = random_plan(case, world, seed)
    cost = price(plan, case.space.axes)
    moments = range(len(list(plan.program.groups(plan.graph))))
    peak = memory(plan.graph, plan.program, cost)[1]
    assert peak == pytest.approx(by_definition(plan, cost, moments))
    *_, order = orders(plan.graph, simulate(plan.graph, plan.program, cost), cost)
    plan = replace(plan, program=order.program)
    peak = memory(plan.graph, plan.program, cost, until=order.until)[1]
    assert peak == pytest.approx(by_definition(plan, cost, order.until))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["mlp", "gpt2", "bert_moe"])
def test_no_program_keeps_less_for_the_backward_than_its_graph_says(file: str) -> None:
    case = benchmark_case(file, "tiny")
    assert case.graph.saved_bytes > 0
    for seed in range(3):
        plan = random_plan(case, 3, seed)
        cost = price(plan, case.space.axes)
        kept = 0.0
        last = max(k for k, s in enumerate(plan.program.instructions) if not s.backward)
        for storage in storages(plan.graph, plan.program):
            if storage.born <= last < storage.last:
                tensor = plan.graph.tensors[storage.value.tensor]
                kept += float(cost.local_bytes(tensor, storage.value.placement).sum())
        assert kept >= plan.graph.saved_bytes
        peaks = memory(plan.graph, plan.program, cost)[1]
        least = least_bytes(on_each_kind(case.space, plan.cluster, STATES))
        assert peaks.sum() >= least >= plan.graph.least_bytes(STATES) > plan.graph.saved_bytes


def test_adam_on_gpus_holds_another_tensor_per_parameter_unless_it_is_fused() -> None:
    """On CPUs, and with fewer states, torch updates in place, one parameter after the other."""
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 0)
    held: dict[tuple[str, int], np.ndarray] = {}
    for kind in ("A100-40", "cpu"):
        devices = tuple(replace(d, kind=kind) for d in plan.cluster.devices)
        hardware = HardwareModel(replace(plan.cluster, devices=devices))
        for states in (0, 1, 2):
            cost = CostModel(plan.graph, program_axes(case.space.axes, plan.program), hardware,
                             plan.shares, states)  # fmt: skip
            held[kind, states] = update_bytes(plan.graph, plan.program, cost)
            fused = replace(plan.graph, fused_update=True)
            cost_fused = CostModel(fused, program_axes(case.space.axes, plan.program), hardware,
                                   plan.shares, states)  # fmt: skip
            assert not update_bytes(fused, plan.program, cost_fused).any()
            during = while_updating(plan.graph, plan.program, cost)
            assert (memory(plan.graph, plan.program, cost)[1] >= sum(during.values())).all()
    assert held.pop(("A100-40", 2)).all()
    assert all(each.tolist() == [0, 0] for each in held.values())


@pytest.mark.slow
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
    if file == "bert_moe":  # an MLP's are freed before the last gradient
        wanted |= {"saved activations"}
    assert wanted <= seen <= set(KINDS)


@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [
        (40, 1000, "float32"),  # one piece of all rows
        (900, 1000, "float32"),  # several pieces, the last one shorter
        (3, 400_000, "float32"),  # one row per piece
        (900, 1000, "float64"),
        (900, 1000, "bfloat16"),
    ],
)
def test_the_workspace_of_a_loss_is_what_torch_allocates(
    rows: int, classes: int, dtype: str
) -> None:
    x = torch.randn(rows, classes).to(getattr(torch, dtype))
    target = torch.randint(classes, (rows,))
    lse, picked = torch.ops.hap.cross_entropy(x, target, -100)
    given = {"x": x, "target": target, "lse": lse, "g": lse, "h": picked}
    shapes = {k: Tensor(name=k, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
              for k, t in given.items()}  # fmt: skip
    for op, names in (("cross_entropy", ("x", "target")),
                      ("cross_entropy_backward", ("g", "h", "x", "target", "lse"))):  # fmt: skip
        with traced() as trace:
            trace.mark()
            made = getattr(torch.ops.hap, op)(*(given[k] for k in names), -100)
        made = made if isinstance(made, tuple) else (made,)
        own = trace.peak_bytes - sum(t.nbytes for t in made)
        node = Node(name="n", op=f"hap.{op}.default", args=(*map(Ref, names), -100), kwargs=(),
                    outputs=(), source="", module="")  # fmt: skip
        inputs = tuple(Input(tensor=k, role="input", target=k) for k in given)
        graph = Graph(inputs=inputs, nodes=(node,), outputs=(), tensors=shapes)
        cost = CostModel(graph, Axes(axes={}, of={}), HardwareModel(two_machines(1)), {}, 0)
        said = workspace(node, Row((), (R,) * len(names)), cost)
        small = 40 * rows  # a few numbers per row
        assert said[0] - small <= own <= said[0] + small, op


def test_buffers_of_collectives() -> None:
    """w0 and w1 are 4 x 6 float32, 96 bytes, with their first dim split 3 : 1."""
    graph = small_graph()
    axes = Axes(axes={"a": Axis(name="a", units=4)}, of={("w0", 0): "a", ("w1", 0): "a", ("w0", 1): "a"})  # fmt: skip
    cost = CostModel(graph, axes, HardwareModel(two_machines(2)), {"a": (3, 1)}, STATES)

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
    assert buffers("grouped gather", 2) == [192, 192]  # concatenated, then separated
    assert buffers("padded scatter", 1) == [144, 144]
    assert buffers("padded scatter", 2) == [288, 288]  # joined in place
    assert buffers("grouped scatter", 1) == [96, 96]
    assert buffers("one shot", 1) == [0, 0]
    assert buffers("one shot", 2) == [0, 0]  # the results are the joined tensor
    assert buffers("two step", 1) == [48, 48]  # one of two parts is received
    assert buffers("exact", 1) == [144, 48]  # sent and received
    assert buffers("slice", 1) == [0, 0]
    compute = Compute(node="y0", ins=(S(0), R), outs=(S(0),), backward=False)
    assert not communication_buffers([compute], cost).any()
