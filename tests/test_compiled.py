"""Compiled ranks compute the same as eager ones and keep the order of calls of the context."""

from __future__ import annotations

import copy
import operator
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

import hap
from benchmarks.models import mlp, vgg19
from hap.capture import torch_private
from hap.capture.torch_private import TorchDispatchMode
from hap.capture.tracing import Step, capture, flatten
from hap.errors import HapError, InputError
from hap.runtime.collectives import LocalComm, ProcessGroupComm
from hap.runtime.compiled import ContextCall, Library, Piece, Staged, describe
from hap.runtime.context import Context
from hap.runtime.hap_module import HapModule, emit
from hap.runtime.launch import spawn
from hap.synthesizer.search.program_space import build_space
from tests.random_plans import Case, adamw, benchmark_case, call, make_case, random_plan, verdict

CPU = torch.device("cpu")


def module_of(case: Case, **options: Any) -> HapModule:
    """Return the module of a plan for one rank."""
    return HapModule(one_rank(case), copy.deepcopy(case.model), LocalComm(), CPU, **options)


def one_rank(case: Case) -> hap.Plan:
    return hap.plan(case.model, case.batch, "local:1", loss=case.loss, optimizer=case.optimizer)


def gradients(module: HapModule, batch: Any) -> dict[str, Tensor]:
    call(module, batch).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


# --- the same numbers ----------------------------------------------------------------------


@pytest.mark.slow
def test_random_programs_compute_what_one_device_computes() -> None:
    """A VGG with a convolution before each of two poolings."""
    torch.manual_seed(0)
    model = vgg19.build(stages=((4,), (6,)), pooled=2, hidden=16, classes=5, dropout=0.0)
    case = make_case(model, vgg19.inputs(size=6, image=8, classes=5))
    found = verdict(case, random_plan(case, 1, 1), backend="inductor")
    worst = max(found.rows, key=lambda row: row.error)
    assert found.ok, f"{worst.what} of {worst.tensor}: {worst.error:.1e}"
    assert found.tolerance == 1e-9


def two_layers() -> Case:
    torch.manual_seed(0)
    model = mlp.build(features=21, hidden=48, layers=2, dropout=0.0)
    batch = mlp.tiny_batch()
    return Case(
        model=model, batch=batch, loss=mlp.loss, optimizer=adamw,
        captured=lambda: build_space(capture(model, batch, mlp.loss)),
    )  # fmt: skip


def compiled_losses(data: dict[str, Any]) -> list[float]:
    """Return the losses of two steps of a compiled rank, in a real process."""
    case = two_layers()
    plan, comm = hap.Plan.from_json(data), ProcessGroupComm()
    module = HapModule(plan, case.model, comm, CPU, backend="inductor")
    optimizer = case.optimizer(module.parameters())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(module, plan.local_batch(case.batch, comm.rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.gloo
def test_compiled_ranks_in_real_processes() -> None:
    case = two_layers()
    plan = random_plan(case, 2, 5, least=1)
    model = copy.deepcopy(case.model)
    optimizer = case.optimizer(model.parameters())
    want = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = case.loss_of(model)
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    for losses in spawn(compiled_losses, 2, args=(plan.to_json(),)):
        assert losses == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_dropout_draws_the_masks_that_eager_draws() -> None:
    case = benchmark_case("mlp", "tiny_dropout")
    eager, inductor = (module_of(case, seed=3, backend=b) for b in ("eager", "inductor"))
    for _ in range(2):
        want, found = gradients(eager, case.batch), gradients(inductor, case.batch)
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-7)
    first = call(inductor, case.batch)
    assert first != call(inductor, case.batch)  # the next step draws other masks
    inductor.eval(), eager.eval()
    assert call(inductor, case.batch) == call(inductor, case.batch)
    torch.testing.assert_close(call(inductor, case.batch), call(eager, case.batch))


# --- how a graph is cut --------------------------------------------------------------------


class Asking(Context):
    """A context that doubles the tensors it exchanges and logs its calls."""

    def __init__(self) -> None:
        super().__init__(LocalComm())
        self.log: list[str] = []

    def issue(self, x: Tensor, name: str) -> list[Any]:
        self.log.append(f"issue {name}")
        return [name, x]

    def wait(self, handle: list[Any]) -> Tensor:
        self.log.append(f"wait {handle[0]}")
        return 2 * handle[1]

    def both(self, xs: list[Tensor], by: dict[str, float]) -> list[Tensor]:
        self.log.append("both")
        return [by["a"] * x for x in xs]


def overlapped() -> fx.Graph:
    """Return two collectives that are issued early and awaited late, and one with two results."""
    graph = fx.Graph()
    ctx, x, y = (graph.placeholder(name) for name in ("ctx", "x", "y"))
    a = graph.call_function(torch.sin, (x,))
    a = graph.call_function(torch.exp, (a,))
    first = graph.call_method("issue", (ctx, a, "first"))
    b = graph.call_function(torch.cos, (y,))
    b = graph.call_function(torch.exp, (b,))
    second = graph.call_method("issue", (ctx, b, "second"))
    c = graph.call_function(torch.mul, (x, y))
    c = graph.call_function(torch.neg, (c,))
    a = graph.call_method("wait", (ctx, first))
    c = graph.call_function(torch.add, (c, a))
    c = graph.call_function(torch.tanh, (c,))
    b = graph.call_method("wait", (ctx, second))
    two = graph.call_method("both", (ctx, [b, c]), {"by": {"a": 3.0}})
    left = graph.call_function(operator.getitem, (two, 0))
    right = graph.call_function(operator.getitem, (two, 1))
    total = graph.call_function(torch.add, (left, right))
    total = graph.call_function(torch.sin, (total,))
    graph.output((total, x, right))
    return graph


def uncompiled(piece: fx.GraphModule, args: list[Tensor], known: Any = None) -> Any:
    """Replaces inductor in tests of the cutting."""
    return lambda given: piece(*[given.pop(0) for _ in range(len(given))])


def test_calls_of_the_context_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "inductor", uncompiled)
    x, y = torch.randn(5), torch.randn(5)
    plain, staged = Asking(), Asking()
    want = fx.GraphModule(torch.nn.Module(), overlapped())(plain, x, y)
    args = [x, y]
    found = Staged(overlapped(), Library(), CPU)(staged, args)
    assert staged.log == plain.log
    assert staged.log == ["issue first", "issue second", "wait first", "wait second", "both"]
    assert not args
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_pieces_keep_their_place_between_the_calls() -> None:
    staged = Staged(overlapped(), Library(), CPU)
    kinds = [s.run.method if isinstance(s.run, ContextCall) else type(s.run).__name__
             for s in staged.stages]  # fmt: skip
    assert kinds == ["Piece", "issue", "Piece", "issue", "Piece", "wait", "Piece", "wait", "both",
                     "ResultAt", "ResultAt", "Piece"]  # fmt: skip


@pytest.mark.slow
def test_a_mask_cuts_nothing() -> None:
    case = benchmark_case("mlp", "tiny_dropout")
    emitted = emit(one_rank(case), 0, CPU)
    for graph, draws in ((emitted.forward, True), (emitted.backward, False)):
        stages = Staged(graph, Library(), CPU).stages
        asked = [s.run.method for s in stages if isinstance(s.run, ContextCall)]
        assert set(asked) == ({"mask", "kept_factor"} if draws else {"kept_factor"})
        assert sum(isinstance(s.run, Piece) for s in stages) == 1


@pytest.mark.slow
def test_batch_norm_cuts_nothing_and_knows_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "inductor", uncompiled)
    case = benchmark_case("segmenter", "tiny")
    plan = one_rank(case)
    eager, compiled = (
        HapModule(plan, copy.deepcopy(case.model), LocalComm(), CPU, backend=backend)
        for backend in ("eager", "inductor")
    )
    emitted = emit(plan, 0, CPU)
    for graph in (emitted.forward, emitted.backward):
        stages = Staged(graph, Library(), CPU).stages
        assert sum(isinstance(s.run, Piece) for s in stages) == 1
    for training in (True, False):
        losses = [call(module.train(training), case.batch) for module in (eager, compiled)]
        torch.testing.assert_close(*losses)
        one, other = (gradients(module, case.batch) for module in (eager, compiled))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(eager.buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_equal_pieces_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(piece: fx.GraphModule, args: list[Tensor], known: Any) -> Any:
        made.append(piece)
        return uncompiled(piece, args)

    monkeypatch.setattr(torch_private, "inductor", counted)
    graph = fx.Graph()
    ctx, x = graph.placeholder("ctx"), graph.placeholder("x")
    for _ in range(4):
        x = graph.call_function(torch.mul, (graph.call_function(torch.sin, (x,)), 2.0))
        x = graph.call_method("wait", (ctx, graph.call_method("issue", (ctx, x, ""))))
    graph.output((x,))
    staged = Staged(graph, Library(), CPU)
    staged(Asking(), [torch.randn(3)])
    assert len(made) == 1
    staged(Asking(), [torch.randn(3)])
    assert len(made) == 1
    staged(Asking(), [torch.randn(6)[::2]])  # new strides, which only the first piece sees
    assert len(made) == 2


@pytest.mark.parametrize("change", ["target", "constant", "argument", "type"])
def test_a_description_tells_graphs_apart(change: str) -> None:
    def graph(target: Any = torch.add, constant: Any = 1, swap: bool = False) -> fx.Graph:
        made = fx.Graph()
        x, y = made.placeholder("x"), made.placeholder("y")
        z = made.call_function(target, (y, x) if swap else (x, y), {"alpha": constant})
        made.output((z,))
        return made

    other = {
        "target": {"target": torch.sub}, "constant": {"constant": 2}, "argument": {"swap": True},
        "type": {"constant": 1.0},
    }[change]  # fmt: skip
    assert describe(graph()) == describe(graph())
    assert describe(graph()) != describe(graph(**other))


# --- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_backward_frees_what_was_saved_as_it_goes(backend: str) -> None:
    case = benchmark_case("mlp", "tiny")
    module = module_of(case, backend=backend)
    saved: list[weakref.ref[Tensor]] = []
    left: list[int] = []
    code = module._code

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            left.append(sum(ref() is not None for ref in saved))
            return func(*args, **(kwargs or {}))

    def forward(ctx: Context, args: list[Any]) -> Any:
        known = {id(x) for x in args}
        results = code.forward(ctx, args)
        made = [x for x in results[1:] if id(x) not in known and id(x._base) not in known]
        saved.extend(map(weakref.ref, made))
        return results

    def backward(ctx: Context, args: list[Any]) -> Any:
        with Watch():
            return code.backward(ctx, args)

    module._code = replace(code, forward=forward, backward=backward)
    call(module, case.batch).backward()
    assert left[0] == len(saved) >= 3
    assert left == sorted(left, reverse=True)
    assert left[-1] <= 1


def test_a_second_backward_needs_to_be_announced() -> None:
    case = benchmark_case("mlp", "tiny")
    module = module_of(case)
    loss = call(module, case.batch)
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    loss.backward()
    for name, grad in first.items():
        torch.testing.assert_close(module.get_parameter(name).grad, 2 * grad)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# --- errors ----------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match="'nvfuser'") as error:
        module_of(benchmark_case("mlp", "tiny"), backend="nvfuser")
    assert "inductor" in error.value.hint


def test_without_a_compiler_it_says_what_to_install() -> None:
    from torch._inductor import config

    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(InputError, match=r"no C\+\+ compiler") as error:
        module_of(benchmark_case("mlp", "tiny"), backend="inductor")
    assert "apt install g++" in error.value.hint


def test_an_error_of_the_compiler_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(piece: fx.GraphModule, args: list[Tensor], known: Any) -> Any:
        raise ArithmeticError("no code for this")

    monkeypatch.setattr(torch_private, "inductor", failing)
    case = benchmark_case("mlp", "tiny")
    module = module_of(case, backend="inductor")
    with pytest.raises(HapError, match="no code for this") as error:
        call(module, case.batch)
    assert "eager" in error.value.hint


# --- CUDA ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["mlp", "bert"])
def test_on_cuda_a_compiled_step_is_that_of_torch_compile(file: str) -> None:
    case, device = benchmark_case(file, "tiny"), torch.device("cuda")
    module = HapModule(
        one_rank(case), case.model, LocalComm(), device, backend="inductor"
    )  # fmt: skip
    found = gradients(module, case.batch)
    model = copy.deepcopy(case.model).to(device)
    batch = tree_map(lambda x: x.to(device), case.batch)
    compiled_step = torch.compile(Step(model, batch, case.loss), dynamic=False)
    compiled_step(*flatten(batch).values()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
