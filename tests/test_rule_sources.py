"""Rules of operators that the table lacks: derived, discovered, kept on disk, replicated."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hap
from hap import rule_process, rule_sources
from hap.cli.plan_screen import plan_screen
from hap.cli.stoppable import stoppable
from hap.cli.terminal import console
from hap.errors import PlanningStopped, UnsupportedOpError
from hap.ir.graph import Graph, Input, Node, Output, Ref
from hap.ir.graph import Tensor as Described
from hap.ir.placement import R
from hap.ir.plan import Plan
from hap.rule_cache import RuleCache, folder
from hap.rule_check import Case, Sample
from hap.rule_derivation import derived
from hap.rule_discovery import NoSampleError, calls_of, discovered
from hap.synthesizer.rules import RULES, Call, rows_of
from hap.synthesizer.rules.textual_rules import kind, read, rule_origin, written_rows
from tests.random_plans import make_case, random_plan, two_machines, verdict
from tests.small_plan import small_plan

ROWS, WIDTH = 9, 6


def _tagged(tag: torch.Tag) -> list[str]:
    """Operators of a tag that the table lacks and that a row can describe."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            tensors = sum(str(a.type) == "Tensor" for a in op._schema.arguments)
            plain = not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags
            named = str(op).replace("::", ".")
            if tag in op.tags and plain and tensors and named not in RULES:
                found.append(named)
    return found


def _wrong(lines: tuple[str, ...], sample: Sample) -> str:
    """Where a rule fails on real tensors."""
    case = Case(sample)
    for row in written_rows(Call(node=case.node, tensors=case.graph.tensors), lines):
        if wrong := case.wrong(row):
            return wrong
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("tag", [torch.Tag.pointwise, torch.Tag.reduction], ids=str)
def test_what_the_tags_say_holds_where_it_is_run(tag: torch.Tag) -> None:
    """Every derived row of every tagged operator whose arguments can be made up."""
    tried = cut = 0
    for op in _tagged(tag):
        try:
            calls = calls_of(op)
        except UnsupportedOpError:
            continue  # no arguments were found that it takes
        for call in calls:
            lines = derived(call)
            if lines is None:
                continue
            tried += 1
            rows = written_rows(call, lines)
            cut += len(rows) > 1
            random = torch.Generator().manual_seed(0)
            given = {
                name: torch.rand(call.tensors[name].shape, dtype=torch.float64, generator=random)
                if "float" in call.tensors[name].dtype
                else torch.randint(1, 3, call.tensors[name].shape, generator=random)
                for name in call.node.inputs
            }

            def arg(value: object, given: dict[str, Tensor] = given) -> object:
                if isinstance(value, tuple) and hasattr(value, "name"):
                    return given[value.name]
                return [arg(v) for v in value] if isinstance(value, tuple) else value

            args = tuple(arg(a) for a in call.node.args)
            named = {key: arg(a) for key, a in call.node.kwargs}
            assert not _wrong(lines, Sample(op, args, named)), op
    assert tried > 10 and cut > 5, "operators of this tag are derived, and can be split"


@pytest.mark.parametrize(
    ("op", "shape", "args", "rule"),
    [
        ("aten.unfold.default", (6, 8, 5), (1, 2, 2), "a_c -> a_c_"),
        ("aten.diagonal.default", (6, 5, 4), (0, 0, 1), "__c -> c_"),
        ("aten.narrow.default", (6, 5), (0, 1, 3), "_b -> _b"),
        ("aten.movedim.int", (6, 5, 4), (0, 2), "abc -> bca"),
    ],
)
def test_views_relate_dims_by_their_strides(
    op: str, shape: tuple[int, ...], args: tuple[int, ...], rule: str
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    sample = Sample(op, (x, *args), {})
    graph = sample.graph()
    (node,) = graph.nodes
    call = Call(node=node, tensors=graph.tensors)
    lines = derived(call)
    assert lines == ("origin derived", rule)
    assert not _wrong(lines, sample)


class Odd(nn.Module):
    """Layers around operators that the table lacks."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        match self.middle:
            case "pointwise":
                hidden = torch.special.log_ndtr(hidden) + (hidden.tanh() / 2).erfinv()
            case "reduction":
                hidden = hidden * torch.linalg.vector_norm(hidden, dim=1, keepdim=True)
            case "no input":
                hidden = hidden * torch.logspace(-1, 0, WIDTH)
            case "discovered":
                hidden = hidden.renorm(2, 0, 1.0) + hidden.cummax(1).values
            case "replicated":
                hidden = torch.ops.sourced.coded(hidden)
            case "random":
                hidden = torch.poisson(hidden.exp())
        return self.down(hidden).square().mean()  # type: ignore[no-any-return]


RUNS: list[bool] = []
"""Not empty while the kernels below can run."""


@torch.library.custom_op("sourced::coded", mutates_args=())
def coded(x: Tensor) -> Tensor:
    """A kernel that does not run where plans are made."""
    if not RUNS:
        raise RuntimeError("no device for this kernel")
    return x.cumsum(0) * 2


@coded.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@torch.library.custom_op("sourced::coded_backward", mutates_args=())
def coded_backward(grad: Tensor) -> Tensor:
    if not RUNS:
        raise RuntimeError("no device for this kernel")
    return grad.flip(0).cumsum(0).flip(0) * 2


@coded_backward.register_fake
def _(grad):  # type: ignore[no-untyped-def]
    return torch.empty_like(grad)


coded.register_autograd(
    lambda ctx, grad: torch.ops.sourced.coded_backward(grad),
    setup_context=lambda ctx, inputs, output: None,
)

BATCH = (torch.linspace(-1, 1, ROWS * 5).view(ROWS, 5).sin(),)


def _told(plan: Plan) -> str:
    shown = console()
    with shown.capture() as captured:
        shown.print(plan_screen(plan))
    return " ".join(captured.get().split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("middle", "origins", "says"),
    [
        ("pointwise", {"derived"}, "rules derived from tags and schema: aten.erfinv.default (1x, "),
        ("reduction", {"derived"}, "aten.linalg_vector_norm.default (1x, "),
        ("no input", {"derived"}, "aten.logspace.default (1x, "),
        ("discovered", {"discovered"}, "aten.cummax.default (1x, "),
        ("replicated", {"replicated"}, "run in full by every rank: sourced.coded.default (1x, "),
    ],
)
def test_a_model_is_planned_whatever_its_operators(
    middle: str, origins: set[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = hap.plan(Odd(middle), BATCH, two_machines(3))
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert says in _told(plan)
    assert origins <= {o.origin for o in plan.unruled}
    assert all(o.seconds > 0 for o in plan.unruled)
    monkeypatch.setattr("tests.test_rule_sources.RUNS", [True])
    torch.manual_seed(0)
    case = make_case(Odd(middle), BATCH, graph=plan.graph)
    for p in (plan, *(random_plan(case, 2 + seed, seed) for seed in range(2))):
        found = verdict(case, p)
        assert found.ok, found.first_bad


def test_a_replicated_operator_has_one_row() -> None:
    plan = hap.plan(Odd("replicated"), BATCH, two_machines(2))
    assert any(
        "no device for this kernel" in line for rule in plan.graph.rules.values() for line in rule
    )
    node = next(n for n in plan.graph.nodes if n.op == "sourced.coded.default")
    assert [(r.ins, r.outs) for r in rows_of(node, plan.graph)] == [((R,), (R,))]


def test_strict_rules_refuse_what_is_not_derived() -> None:
    strict = hap.PlanOptions(strict_rules=True)
    for middle in ("discovered", "replicated"):
        with pytest.raises(UnsupportedOpError, match="no rule says how operator"):
            hap.plan(Odd(middle), BATCH, two_machines(2), options=strict)
    assert hap.plan(Odd("pointwise"), BATCH, two_machines(2), options=strict).unruled


def test_a_random_operator_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOpError, match=r"aten\.poisson\.default.*random numbers"):
        hap.plan(Odd("random"), BATCH, two_machines(2))


def test_a_covered_model_has_no_rules_beside_the_table() -> None:
    plan = hap.plan(Odd(""), BATCH, two_machines(2))
    assert not plan.graph.rules
    assert "unruled" not in plan.to_json()


@pytest.mark.slow
def test_discovered_rows_are_kept_and_damaged_files_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = hap.plan(Odd("discovered"), BATCH, two_machines(2))
    kept = {file.name for file in folder().iterdir()}
    assert "aten.cummax.default.json" in kept

    def never(call: Call) -> None:
        raise AssertionError(f"{call.node.op} is discovered again")

    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(rule_sources, "discovered_apart", never)
        again = hap.plan(Odd("discovered"), BATCH, two_machines(2), progress=said.append)
    assert again.to_json() == first.to_json()
    rows = (folder() / "aten.cummax.default.json").read_bytes()
    for name in kept:
        (folder() / name).write_text("{")
    anew = hap.plan(Odd("discovered"), BATCH, two_machines(2), progress=said.append)
    assert anew.to_json() == first.to_json()
    assert any("aten.cummax.default are damaged" in text for text in said)
    assert (folder() / "aten.cummax.default.json").read_bytes() == rows


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[]", b"[" * 100_000, b'{"kind": 3}', b'{"kind": ["a line of nothing"]}']
)  # fmt: skip
def test_rows_that_cannot_be_read_are_written_anew(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder().mkdir(parents=True)
    (folder() / "aten.mm.default.json").write_bytes(content)
    said: list[str] = []
    cache = RuleCache(said.append)
    assert cache.get("aten.mm.default", "kind") is None
    assert len(said) == 1 and "damaged" in said[0]
    cache.put("aten.mm.default", "kind", ("origin replicated",))
    assert RuleCache(said.append).get("aten.mm.default", "kind") == ("origin replicated",)


def test_rules_of_other_libraries_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their operators may change while their names stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hap.plan(Odd("replicated"), BATCH, two_machines(2))
    assert not list(tmp_path.rglob("sourced*"))


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hap").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    cache = RuleCache(said.append)
    for name in ("a", "b"):
        assert cache.get("aten.mm.default", name) is None
        cache.put("aten.mm.default", name, ("origin replicated",))
    assert len(said) == 1 and "cannot be cached" in said[0]


def test_the_search_for_rows_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little work allowed fewer rows are found, and those that are hold."""
    (call, *_) = calls_of("aten.addcmul.default")
    every = set(discovered(call).rows)
    monkeypatch.setattr("hap.rule_discovery.WORK", 9.0)
    some = discovered(call)
    assert set(some.rows) < every
    assert some == discovered(call)
    assert rule_origin(("origin discovered", *some.lines)) == "discovered"
    assert kind(call) == some.kind


@torch.library.custom_op("sourced::crashes", mutates_args=())
def crashes(x: Tensor) -> Tensor:
    if x.shape[0] < 3:  # a part of a sample
        os.kill(os.getpid(), signal.SIGKILL)
    return x.cumsum(0)


@torch.library.custom_op("sourced::hangs", mutates_args=())
def hangs(x: Tensor) -> Tensor:
    time.sleep(1000)
    return x.clone()


@pytest.mark.parametrize(
    ("op", "says"), [("sourced.crashes", "ended the process"), ("sourced.hangs", "did not end")]
)
def test_an_operator_that_crashes_or_hangs_in_parts_is_replicated(
    op: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_process, "LIMIT_S", 20.0 if op == "sourced.crashes" else 1.0)
    x = Described(name="x", shape=(6, 4), dtype="float32")
    made = Described(name="y", shape=(6, 4), dtype="float32")
    node = Node(name="n", op=f"{op}.default", args=(Ref("x"),), outputs=("y",))
    with pytest.raises(NoSampleError, match=says):
        rule_process.discovered_apart(Call(node=node, tensors={"x": x, "y": made}))


@pytest.mark.parametrize("error", [NoSampleError, rule_process.InterruptedRunError])
def test_an_interrupted_run_is_tried_again(
    error: type[NoSampleError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have been busy; an operator that fails on every sample is kept."""

    def fails(call: Call) -> tuple[str, ...]:
        tried.append(call.node.op)
        raise error("it failed")

    tried: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rule_sources, "discovered_apart", fails)
    (call, *_) = calls_of("aten.addcmul.default")
    for _ in range(2):
        monkeypatch.setattr(rule_sources, "_interrupted", {})  # another process
        lines = rule_sources._found(call, RuleCache(pytest.fail), lambda text: None)
        assert lines == ("origin replicated", "# it failed")
    assert len(tried) == (1 if error is NoSampleError else 2)


def test_a_rule_of_no_operator_is_said() -> None:
    said: list[str] = []
    graph = small_plan().graph
    assert (
        rule_sources.with_rules(graph, {"mine.scael": ("a -> a",)}, progress=said.append) is graph
    )
    assert said == ["the rule of mine.scael.default is not used: the step has no such operator"]


def test_an_origin_is_one_of_those_known() -> None:
    assert rule_origin(("origin derived  # by its tags",)) == "derived"
    with pytest.raises(ValueError, match="derived, discovered, replicated"):
        read(("origin derivd",))


def test_a_stop_ends_the_process_of_an_operator_that_hangs() -> None:
    x = Described(name="x", shape=(6, 4), dtype="float32")
    made = Described(name="y", shape=(6, 4), dtype="float32")
    node = Node(name="n", op="sourced.hangs.default", args=(Ref("x"),), outputs=("y",))
    start = time.perf_counter()
    with pytest.raises(PlanningStopped), stoppable(0.5):
        rule_process.discovered_apart(Call(node=node, tensors={"x": x, "y": made}))
    assert time.perf_counter() - start < 15
    assert not multiprocessing.active_children()


def test_without_forks_an_operator_is_replicated_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rule_process.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    monkeypatch.setattr(
        rule_process.multiprocessing,
        "get_context",
        lambda kind: pytest.fail("a process is started"),
    )
    x = Described(name="x", shape=(6, 4), dtype="float32")
    node = Node(name="n", op="sourced.crashes.default", args=(Ref("x"),), outputs=("y",))
    graph = Graph(
        inputs=(Input(tensor="x", role="input", target="*"),), nodes=(node,),
        outputs=(Output(tensor="y", role="buffer", target="y"),),
        tensors={"x": x, "y": Described(name="y", shape=(6, 4), dtype="float32")},
    )  # fmt: skip
    said: list[str] = []
    made = rule_sources.with_rules(graph, {}, progress=said.append)
    (lines,) = made.rules.values()
    assert lines[0] == "origin replicated" and "can't fork" in lines[1]
    assert any("can't fork" in text and "every rank runs all of it" in text for text in said)
