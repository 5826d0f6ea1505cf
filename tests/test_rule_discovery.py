"""Rules discovered by running an operator, and rules registered by a user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import hap
from hap.capture.tracing import capture
from hap.cli.commands import main
from hap.cli.plan_screen import plan_screen
from hap.cli.terminal import console
from hap.errors import ModelError, UnsupportedOpError
from hap.ir.graph import Dtype, Graph, Input, Node, Output, Ref
from hap.ir.graph import Tensor as Described
from hap.ir.placement import P, R, S
from hap.ir.plan import Plan
from hap.rule_check import Sample, gives
from hap.rule_discovery import NoSampleError, calls_of, discovered
from hap.rule_sources import with_rules
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.rules import RULES, Call, Row, rows_of
from hap.synthesizer.rules.textual_rules import kind, written_flops, written_rows
from tests.random_plans import make_case, random_plan, two_machines, verdict
from tests.rule_samples import SAMPLES

ROWS, WIDTH = 7, 12


@torch.library.custom_op("fuzzed::gated", mutates_args=())
def gated(x: Tensor, w: Tensor, power: float) -> Tensor:
    if not (x.is_contiguous() and w.is_contiguous()):
        raise RuntimeError("this kernel takes contiguous tensors")
    return torch.tanh(x) * w.abs().pow(power)


@gated.register_fake
def _(x, w, power):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@torch.library.custom_op("fuzzed::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, w: Tensor, power: float) -> tuple[Tensor, Tensor]:
    scale = w.abs().pow(power)
    slope = power * w.abs().pow(power - 1) * w.sign()
    return grad * (1 - x.tanh() ** 2) * scale, (grad * x.tanh()).sum(0) * slope


@gated_backward.register_fake
def _(grad, x, w, power):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(w)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, w, ctx.power = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return *torch.ops.fuzzed.gated_backward(grad, *ctx.saved_tensors, ctx.power), None


gated.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("fuzzed::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("fuzzed::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]


@torch.library.custom_op("fuzzed::clamped", mutates_args=())
def clamped(x: Tensor) -> Tensor:
    return x.clamp(-50.0, 50.0)


@torch.library.custom_op("fuzzed::exploding", mutates_args=())
def exploding(x: Tensor, power: float) -> Tensor:
    if x.abs().max() < 0.01:
        raise RuntimeError("this kernel takes no small numbers")
    return x.exp() * power


@torch.library.custom_op("fuzzed::positive_above", mutates_args=())
def positive_above(x: Tensor) -> Tensor:
    return x[x > 0] if x.abs().max() > 100 else x.clone()


_calls: Iterator[int] = iter(range(10**9))


@torch.library.custom_op("fuzzed::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    return x * next(_calls)


@torch.library.custom_op("fuzzed::halved", mutates_args={"x"})
def halved(x: Tensor) -> Tensor:
    return x.mul_(0.5).clone()


@torch.library.custom_op("fuzzed::secretly_halved", mutates_args=())
def secretly_halved(x: Tensor) -> Tensor:
    return x.mul_(0.5).clone()


@torch.library.custom_op("fuzzed::told", mutates_args=())
def told(x: Tensor) -> None:
    return None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.ops.fuzzed.gated(self.inner(x), self.scale, 1.5)
        return self.outer(hidden).pow(2).mean()  # type: ignore[no-any-return]


BATCH = (torch.randn(ROWS, 5),)


@cache
def graph_of_net() -> Graph:
    return capture(Net(), BATCH)


RULES_OF_NET = {
    "fuzzed::gated": ["bd, d -> bd", "flops 6 b d"],
    "fuzzed.gated_backward": ["S0, S0, R -> S0, P", "S1, S1, S0 -> S1, S0", "P, R, R -> P, P"],
}


@pytest.mark.parametrize(
    "op",
    [
        "aten.mm.default", "aten.bmm.default", "aten.add.Tensor", "aten._softmax.default",
        "aten.embedding.default", "aten.tanh.default", "aten.t.default", "aten.neg.default",
    ],
)  # fmt: skip
def test_discovered_rows_are_those_of_the_table(op: str) -> None:
    for call in calls_of(op):
        table = RULES[op](call)
        found = discovered(call).rows
        for row in found:
            assert any(gives(r, row) for r in table), f"{row} is not in the table"
        for row in table:
            assert any(gives(r, row) for r in found), f"{row} was not found"


@pytest.mark.slow
def test_sample_calls_rediscover_their_rows() -> None:
    """All plain arguments, and sizes other than the samples'."""
    for sample in SAMPLES:
        if sample.op in ("aten.native_layer_norm.default", "aten.gelu_backward.default"):
            graph = sample.graph()
            (node,) = graph.nodes
            found = discovered(Call(node=node, tensors=graph.tensors)).rows
            assert all(any(gives(r, row) for r in found) for row in rows_of(node, graph))


@pytest.mark.parametrize(
    ("op", "rest", "rows"),
    [
        ("fuzzed.clamped.default", (), {"{R} -> {R}", "{S0} -> {S0}", "{S1} -> {S1}"}),
        ("aten.renorm.default", (2, 0, 60.0), {"{R} -> {R}", "{S0} -> {S0}"}),
        ("aten.renorm.default", (2, 0, 1e5), {"{R} -> {R}", "{S0} -> {S0}"}),
        ("fuzzed.exploding.default", (1e5,), {"{R} -> {R}", "{S0} -> {S0}", "{S1} -> {S1}"}),
    ],
)  # fmt: skip
def test_rows_hold_on_both_sides_of_thresholds(
    op: str, rest: tuple[float, ...], rows: set[str]
) -> None:
    """Of the magnitudes that are tried, those at which an operator fails or overflows say nothing."""
    tensors = {t: Described(name=t, shape=(8, 6), dtype="float32") for t in "xy"}
    node = Node(name="n", op=op, args=(Ref("x"), *rest), outputs=("y",))
    assert {str(row) for row in discovered(Call(node=node, tensors=tensors)).rows} == rows


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("aten.nonzero.default", "shapes of its results depend on the data"),
        ("aten.bernoulli.default", "random numbers"),
        ("aten.add_.Tensor", "writes into its inputs"),
        ("aten.item.default", "depend"),
        ("fuzzed.noise.default", "random numbers"),
        ("fuzzed.positive.default", "shapes of its results depend on the data"),
        ("fuzzed.positive_above.default", "shapes of its results depend on the data"),
        ("fuzzed.counted.default", "keeps a state"),
        ("fuzzed.halved.default", "writes into its inputs"),
        ("fuzzed.secretly_halved.default", "writes into its inputs"),
        ("fuzzed.told.default", "side effect"),
        ("fuzzed.unheard_of.default", "there is no operator"),
    ],
)
def test_operators_without_valid_rows_are_refused_with_a_reason(op: str, reason: str) -> None:
    with pytest.raises(UnsupportedOpError, match=reason) as error:
        discovered(calls_of(op)[0])
    assert error.value.hint


@torch.library.custom_op("fuzzed::angles", mutates_args=())
def angles(points: Tensor) -> Tensor:
    if points.shape[-1] != 2:
        raise RuntimeError("this kernel takes points of a plane")
    return torch.atan2(points[..., 0], points[..., 1])


def test_dims_that_must_have_their_size_are_kept() -> None:
    graph = Sample("fuzzed.angles.default", (torch.randn(999, 1200, 2),), {}).graph()
    found = discovered(Call(node=graph.nodes[0], tensors=graph.tensors))
    assert {str(row) for row in found.rows} == {"{R} -> {R}", "{S0} -> {S0}", "{S1} -> {S1}"}
    assert all("999" not in shapes for shapes in found.shapes)


class Distances(nn.Module):
    """The backward finds the largest difference by the distance, which random numbers never equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.linear(x), x.roll(1, 0), p=float("inf")).square().mean()


def test_results_that_are_zero_for_random_inputs_show_no_row() -> None:
    torch.manual_seed(0)
    net, x = Distances(), torch.randn(6, 5, 4)
    said: list[str] = []
    graph = with_rules(capture(net, x), {}, progress=said.append)
    backward = next(n for n in graph.nodes if n.op == "aten._cdist_backward.default")
    call = Call(node=backward, tensors=graph.tensors)
    with pytest.raises(NoSampleError, match="makes one number alone of random inputs"):
        discovered(call)
    assert "origin replicated" in graph.rules[kind(call)]
    case = make_case(net, x, graph=graph)
    for seed in range(3):
        assert verdict(case, random_plan(case, 2 + seed % 2, seed)).ok


def test_under_strict_rules_the_message_names_the_command() -> None:
    with pytest.raises(UnsupportedOpError, match=r"fuzzed\.gated\.default") as error:
        hap.plan(Net(), BATCH, two_machines(2), options=hap.PlanOptions(strict_rules=True))
    assert "without --strict-rules" in error.value.hint
    assert "hap rules discover fuzzed.gated.default" in error.value.hint
    assert "test_rule_discovery.py:" in error.value.where


@pytest.mark.slow
@pytest.mark.parametrize("how", ["discovered", "written"])
def test_a_model_with_an_operator_of_its_own_trains_as_on_one_device(
    how: str, tmp_path: Path
) -> None:
    rules = RULES_OF_NET if how == "written" else None
    strict = hap.PlanOptions(strict_rules=rules is not None)
    plan = hap.plan(Net(), BATCH, two_machines(3), rules=rules, options=strict)
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    torch.manual_seed(0)
    case = make_case(Net(), BATCH, graph=plan.graph)
    rows = case.space.rows[next(n.name for n in plan.graph.nodes if n.op == "fuzzed.gated.default")]
    assert {str(row) for row in rows} >= {"{R, R} -> {R}", "{S0, R} -> {S0}", "{S1, S0} -> {S1}"}
    assert verdict(case, plan).ok
    for seed in range(3):
        found = verdict(case, random_plan(case, 2 + seed % 3, seed))
        assert found.ok, found.first_bad


@pytest.mark.slow
def test_the_plan_says_where_its_rows_are_from() -> None:
    assert "rules discovered" not in _told(
        hap.plan(Net(), BATCH, two_machines(2), rules=RULES_OF_NET)
    )
    found = hap.plan(Net(), BATCH, two_machines(2))
    assert "rules discovered by running" in _told(found)
    assert "fuzzed.gated.default (1x," in _told(found)
    assert {(o.op, o.origin) for o in found.unruled} == {
        ("fuzzed.gated.default", "discovered"), ("fuzzed.gated_backward.default", "discovered")
    }  # fmt: skip
    ((key, lines), *_) = found.graph.rules.items()
    assert key.startswith("fuzzed.gated.default(float32#0[a b]")
    assert lines[0] == "origin discovered"
    assert "trials" in lines[1]


def _told(plan: Plan) -> str:
    shown = console()
    with shown.capture() as captured:
        shown.print(plan_screen(plan))
    return captured.get()


@pytest.mark.slow
def test_rules_are_no_part_of_what_a_plan_is_bound_to() -> None:
    """A model is captured without them when it is compared with its plan."""
    plan = hap.plan(Net(), BATCH, two_machines(1))
    again = Graph.from_json(json.loads(json.dumps(plan.graph.to_json())))
    assert again.rules == plan.graph.rules
    assert plan.graph.rules
    hap.compile(Net(), plan)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (["bd, d -> b"], "no line of its rule fits"),
        (["bd, d, d -> bd"], "no line of its rule fits"),
        (["mk * kn"], "neither an equation"),
        (["bd, d -> bd", "flops two b"], "flops are numbers and single letters"),
        (["bd, d -> bd", "S1, R -> S1"], "does not hold"),
    ],
)
def test_a_rule_that_is_wrong_is_told_before_planning(lines: list[str], what: str) -> None:
    rules = {**RULES_OF_NET, "fuzzed::gated": lines}
    with pytest.raises(ModelError, match=what):
        with_rules(graph_of_net(), rules)


def test_a_plan_with_a_rule_that_is_wrong_is_refused() -> None:
    rules = {**RULES_OF_NET, "fuzzed::gated": ["P, R -> P"]}
    with pytest.raises(ModelError, match="does not hold"):
        hap.plan(Net(), BATCH, two_machines(2), rules=rules)


def _call(*shapes: tuple[int, ...], out: tuple[int, ...]) -> Call:
    tensors = {
        name: Described(name=name, shape=shape, dtype="float32")
        for name, shape in zip("xyz", (*shapes, out), strict=False)
    }
    *ins, made = tensors
    node = Node(name="n", op="a.b.c", args=(*map(Ref, ins), Dtype("float32")), outputs=(made,))
    return Call(node=node, tensors=tensors)


def test_lines_give_the_rows_that_the_table_would() -> None:
    call = _call((5, 3), (3, 7), out=(5, 7))
    lines = ["mk, kn -> mn", "P, R -> P", "R, P -> P", "# a remark"]
    assert set(written_rows(call, lines)) == set(RULES["aten.mm.default"](call))
    assert written_flops(call, [*lines, "flops 2 m k n"]) == 2 * 5 * 3 * 7
    assert written_flops(call, lines) is None


def test_lines_never_cut_a_dim_of_size_1_and_cut_unlike_dims_in_common_blocks() -> None:
    narrow = written_rows(_call((5, 1), (1, 7), out=(5, 7)), ["mk, kn -> mn", "S1, S0 -> P"])
    assert {str(r) for r in narrow} == {"{R, R} -> {R}", "{S0, R} -> {S0}", "{R, S1} -> {S1}"}
    halves = written_rows(_call((12,), out=(8,)), ["S0 -> S0"])
    assert Row((S(0),), (S(0),), 4) in halves
    assert written_rows(_call((12,), out=(7,)), ["S0 -> S0"]) == [Row((R,), (R,))]


def test_kinds_of_calls_are_told_apart_by_what_rows_depend_on() -> None:
    kinds = {
        kind(_call((5, 3), (3, 7), out=(5, 7))), kind(_call((4, 4), (4, 4), out=(4, 4))),
        kind(_call((5, 1), (1, 7), out=(5, 7))), kind(_call((5, 3), out=(5, 3))),
    }  # fmt: skip
    assert len(kinds) == 4
    assert kind(_call((6, 2), (2, 9), out=(6, 9))) in kinds


def test_discovered_rows_hold_for_their_kind_of_call_alone() -> None:
    def graph(rows: int) -> Graph:
        call = _call((rows, 3), (3, 7), out=(rows, 7))
        return Graph(
            inputs=tuple(Input(tensor=t, role="input", target=t) for t in "xy"),
            nodes=(call.node,), outputs=(Output(tensor="z", role="loss", target="loss"),),
            tensors=dict(call.tensors), rules={kind(_call((5, 3), (3, 7), out=(5, 7))): lines},
        )  # fmt: skip

    lines = ("S1, S0 -> P", "S0, R -> S0")
    assert Row((P,), (S(1), S(0)), 3) in rows_of(graph(9).nodes[0], graph(9))
    assert rows_of(graph(7).nodes[0], graph(7)) == [Row((R,), (R, R))]
    assert node_work(graph(9).nodes[0], graph(9)).kind == "memory"


def test_the_command_line_finds_shows_and_lists_rules() -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(main, ["rules", *words])
        assert result.exit_code == 0, result.output
        return result.output

    assert "aten.mm.default" in run("list")
    assert "{S1, S0} -> {P}   in 3 blocks" in run("show", "aten.mm.default")
    found = run("discover", "fuzzed::gated")
    assert "{S1, S0} -> {S1}" in found
    assert '"S0, R -> S0",' in found
    assert "trials" in found
    refused = CliRunner().invoke(main, ["rules", "discover", "aten.nonzero.default"])
    assert refused.exit_code == 2
    assert "depend on the data" in refused.output


MODEL = """
import torch
from torch import nn

@torch.library.custom_op("filed::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@doubled.register_fake
def _(x):
    return torch.empty_like(x)

doubled.register_autograd(lambda ctx, grad: 2 * grad, setup_context=lambda ctx, inputs, output: None)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x):
        return torch.ops.filed.doubled(self.layer(x)).square().mean()

def model():
    return Net()

def batch():
    return torch.randn(10, 8)
"""


@pytest.mark.slow
def test_a_model_file_discovers_registers_and_verifies(tmp_path: Path) -> None:
    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(words))
        assert result.exit_code == code, result.output
        return result.output

    file, plan = tmp_path / "model.py", str(tmp_path / "plan.json")
    file.write_text(MODEL)
    planned = ("plan", str(file), "--cluster", "local:2", "-o", plan)
    assert "without --strict-rules" in run(*planned, "--strict-rules", code=2)
    assert '"S0 -> S0",' in run("rules", "discover", "filed.doubled", "--model", str(file))
    assert "filed.doubled.default (1x," in run(*planned)
    assert "as on one device" in run("verify", plan)
    file.write_text(MODEL + 'rules = {"filed.doubled": ["ab -> ab", "P -> P"]}\n')
    assert "rules of the model file: filed.doubled.default" in run(*planned)
    assert "as on one device" in run("verify", plan)
    file.write_text(MODEL + "rules = [1]\n")
    assert "must be a dict" in run(*planned, code=2)


def test_tensors_among_the_keywords_are_inputs() -> None:
    sample = Sample("aten.clamp.Tensor", (torch.randn(5, 3),), {"min": torch.randn(5, 3)})
    graph = sample.graph()
    (node,) = graph.nodes
    assert node.inputs == tuple(sample.tensors) == ("t0", "t1")
    found = discovered(Call(node=node, tensors=graph.tensors)).rows
    assert any(row.ins == (S(0), S(0)) and row.outs == (S(0),) for row in found)
