"""LSTM, GRU and RNN layers are one operator per layer and direction, equal to torch's."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture import recurrence
from hap.capture.torch_private import TorchDispatchMode
from hap.capture.tracing import capture
from hap.ir.placement import S
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule
from hap.synthesizer.cost.operator_work import STEP_LAUNCHES, node_work
from tests.random_plans import Case, make_case, random_plan, verdict
from tests.random_stages import random_staged_plan
from tests.test_two_axes import random_mesh_plan

CPU = torch.device("cpu")

MODULES: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
WAYS = [*itertools.product((False, True), repeat=3)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(("batch_first", "both", "bias"), WAYS)
def test_results_and_gradients_are_those_of_torch(
    kind: str, batch_first: bool, both: bool, bias: bool, device: str
) -> None:
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "bidirectional": both, "bias": bias}
    wide = {"dtype": torch.float64, "device": device}
    module = MODULES[kind](4, 3, 2, **options, **wide)
    x = torch.randn(2, 5, 4, requires_grad=True, **wide)
    rows = x.shape[not batch_first]
    state = [
        torch.randn(2 * (1 + both), rows, 3, requires_grad=True, **wide)
        for _ in range(recurrence.CELLS[kind].parts)
    ]
    given = tuple(state) if kind == "lstm" else state[0]
    leaves = [x, *state, *module.parameters()]
    out, last = module(x, given)
    wanted = [out, *(last if kind == "lstm" else [last])]
    found = recurrence.LAYERS[kind](
        x, given, module._flat_weights, bias, 2, 0.0, True, both, batch_first
    )
    weights = [torch.randn_like(w) for w in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    grads = [
        torch.autograd.grad(sum((w * t).sum() for w, t in zip(weights, each, strict=True)), leaves)
        for each in (found, wanted)
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


class Net(nn.Module):
    """Layers of a recurrence, two by default, between an embedding and a head."""

    def __init__(self, kind: str, count: int = 2, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.layers = MODULES[kind](4, 3, count, **options)
        self.head = nn.Linear(3 * (1 + bool(options.get("bidirectional"))), 11)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.layers(self.words(text))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text.flatten())


def case(kind: str, *, length: int = 4, **options: Any) -> Case:
    torch.manual_seed(0)
    return make_case(Net(kind, **options), torch.randint(11, (5, length)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lstm", {"batch_first": True, "bidirectional": True}),
        ("gru", {"batch_first": False, "dropout": 0.3}),
        ("rnn_tanh", {"batch_first": True, "bias": False}),
    ],
)
def test_random_plans_compute_what_one_device_does(kind: str, options: dict[str, Any]) -> None:
    made = case(kind, **options)
    for world in (2, 3):
        plan = random_plan(made, world, world)
        assert verdict(made, plan).ok


@pytest.mark.slow
def test_stages_and_a_mesh_compute_what_one_device_does() -> None:
    """A microbatch and a machine have some of the rows, for all steps."""
    lstm, gru = case("lstm", batch_first=True), case("gru", batch_first=False)
    staged = random_staged_plan(lstm, (1, 2), 3)
    assert staged.microbatches > 1
    assert verdict(lstm, staged).ok
    assert verdict(gru, random_mesh_plan(gru, 2, 2, 0)).ok


@pytest.mark.slow
def test_a_compiled_rank_calls_the_operator() -> None:
    made = case("lstm", count=1, batch_first=True)
    plan = hap.plan(made.model, made.batch, "local:1", optimizer=made.optimizer)
    found = []
    for backend in ("eager", "inductor"):
        module = HapModule(plan, copy.deepcopy(made.model), LocalComm(), CPU, backend=backend)
        module(made.batch).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "rnn_tanh"])
def test_the_graph_does_not_grow_with_the_steps(kind: str) -> None:
    cases = [case(kind, length=n, batch_first=True) for n in (3, 12)]
    short, long = (made.graph for made in cases)
    assert len(short.nodes) == len(long.nodes)
    ops = [n for n in long.nodes if n.op == "hap.recurrence.default"]
    assert len(ops) == 2
    per_step, all_steps = (
        next(node_work(n, g).launches for n in g.nodes if n.op == "hap.recurrence.default")
        for g in (short, long)
    )
    assert all_steps == 4 * per_step
    assert any(row.ins[0] == S(0) for row in cases[1].space.rows[ops[0].name])


class Kernels(TorchDispatchMode):
    """Counts the operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not views and func is not torch.ops.aten.split.Tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MODULES)
def test_a_step_has_as_many_kernels_as_it_is_priced_for(kind: str) -> None:
    cell, count = recurrence.CELLS[kind], {"lstm": 4, "gru": 3}.get(kind, 1)
    gates, weight = torch.randn(5, 2, count * 3), torch.randn(count * 3, 3)
    bias, state = (
        torch.randn(len(weight)) if kind == "gru" else None,
        torch.randn(5, cell.parts * 3),
    )
    states, saved = torch.ops.hap.recurrence(gates, weight, bias, state, kind, False)
    slopes = cell.slopes(states, states, saved)
    with torch.no_grad(), Kernels() as forward:
        products = torch.addmm(gates[:, 0] if bias is None else bias, state[:, :3], weight.t())
        cell.forward(products, gates[:, 0], state, states[:, 0], saved[:, 0])
    with torch.no_grad(), Kernels() as backward:
        now = (x[:, 0] for x in (saved, gates, *slopes))
        cell.backward(states[:, 0] + state, weight, *now)
    priced = (
        STEP_LAUNCHES["hap.recurrence.default"],
        STEP_LAUNCHES["hap.recurrence_backward.default"],
    )
    if kind == "lstm":
        assert (forward.count, backward.count) == priced
    assert forward.count <= priced[0]
    assert backward.count <= priced[1]


@pytest.mark.slow
def test_a_direct_call_is_the_operator_too() -> None:
    class Direct(Net):
        def forward(self, text: Tensor) -> Tensor:
            zeros = torch.zeros(2, text.shape[0], 3)
            weights = self.layers._flat_weights
            found = torch.gru(self.words(text), zeros, weights, True, 2, 0.0, True, False, True)
            return F.cross_entropy(self.head(found[0]).flatten(0, 1), text.flatten())

    torch.manual_seed(0)
    graph = capture(Direct("gru", batch_first=True), torch.randint(11, (5, 4)))
    assert [n.op for n in graph.nodes].count("hap.recurrence.default") == 2


@pytest.mark.slow
def test_projections_are_unrolled() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True, proj_size=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0].square().mean()

    torch.manual_seed(0)
    made = make_case(Projected(), torch.randn(5, 2, 4))
    assert "hap.recurrence.default" not in {n.op for n in made.graph.nodes}
    assert verdict(made, random_plan(made, 2, 1)).ok


@pytest.mark.slow
def test_autocast_lowers_weights_and_states() -> None:
    torch.manual_seed(0)
    graph = capture(Net("lstm"), torch.randint(11, (5, 4)), autocast="bfloat16")
    (first, *_) = (n for n in graph.nodes if n.op == "hap.recurrence.default")
    assert {graph.tensors[name].dtype for name in (*first.inputs, *first.outputs)} == {"bfloat16"}
