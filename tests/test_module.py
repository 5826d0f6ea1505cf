"""The module that users train: shards with the model's names, full state dicts, global norms."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from benchmarks.stopwatch import REST, WAIT, Stopwatch, watched
from hap.capture.checks import RESERVED
from hap.capture.tracing import capture
from hap.errors import ModelError, PlanError
from hap.ir.placement import S
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert
from hap.runtime.batch_sampler import RankBatchSampler
from hap.runtime.collectives import Comm, LocalComm
from hap.runtime.context import Context
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule, clip_grad_norm_
from hap.runtime.lanes import ThreadLane
from tests.random_plans import Case, benchmark_case, call, make_case, random_plan, verdict

T = TypeVar("T")
CPU = torch.device("cpu")
CASES = [("bert_moe", 3), ("gpt2", 2), ("mlp", 4), ("vgg19", 3)]


def on_ranks(case: Case, plan: Plan, act: Callable[[HapModule, Any], T]) -> list[T]:
    """Run ``act(module, local batch)`` on every rank of an emulated world."""

    def run(comm: Comm) -> T:
        module = HapModule(plan, case.model, comm, CPU)
        return act(module, plan.local_batch(case.batch, comm.rank))

    return run_ranks(plan.world_size, run)


class Tracked(nn.Module):
    """Two tied layers, a frozen one, an unused parameter, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(self.second(self.first(x)).tanh())
        self.running.mul_(0.9).add_(0.1 * y.detach().sum(0))
        return (y - self.running * self.hidden).square().mean()


def tracked() -> Case:
    torch.manual_seed(0)
    return make_case(Tracked(), torch.randn(10, 8))


# --- names and states ----------------------------------------------------------------------


@pytest.mark.parametrize(("file", "world"), CASES)
def test_parameters_keep_their_names_and_are_shards(file: str, world: int) -> None:
    case = benchmark_case(file, "tiny")
    plan = random_plan(case, world, 0)
    shapes = {name: p.shape for name, p in case.model.named_parameters()}
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
    assert any(plan.program.inputs[t].sharded for t in tensors.values())
    ranks = on_ranks(case, plan, lambda module, batch: dict(module.named_parameters()))
    for rank, parameters in enumerate(ranks):
        assert list(parameters) == list(shapes)
        for name, parameter in parameters.items():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.shape == plan.local_shape(tensors[name], rank)
    for name in shapes:
        placement = plan.program.inputs[tensors[name]]
        elements = sum(p[name].numel() for p in ranks)
        assert elements == shapes[name].numel() * (1 if placement.sharded else world)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "world"), CASES)
def test_the_full_state_dict_is_the_models(file: str, world: int) -> None:
    case = benchmark_case(file, "tiny")
    want = case.model.state_dict()
    full = on_ranks(case, random_plan(case, world, 1), lambda m, batch: m.full_state_dict())
    for state in full:
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name], want[name]) for name in want)
    copy.deepcopy(case.model).load_state_dict(full[0], strict=True)


def test_tied_frozen_and_unused_tensors_and_buffers() -> None:
    case = tracked()
    plan = random_plan(case, 3, 2)
    names = [name for name, _ in case.model.named_parameters()]

    def act(module: HapModule, batch: Tensor) -> dict[str, Tensor]:
        assert [name for name, _ in module.named_parameters()] == names
        assert not module.get_parameter("frozen.weight").requires_grad
        assert module.get_parameter("spare").shape == (3,)
        module(batch).backward()
        gradients = {n for n, p in module.named_parameters() if p.grad is not None}
        assert gradients == set(names) - {"frozen.weight", "spare"}
        return module.full_state_dict()

    reference = copy.deepcopy(case.model)
    reference(case.batch)
    want = reference.state_dict()
    assert "second.weight" in want and "hidden" not in want
    for state in on_ranks(case, plan, act):
        assert state.keys() == want.keys()
        for name in want:  # the step has updated "running"
            torch.testing.assert_close(state[name], want[name])


@pytest.mark.slow
def test_a_trained_state_moves_to_another_plan_and_back_to_the_model() -> None:
    """Train under one plan, load the full state dict under another, and train on."""
    case = benchmark_case("gpt2", "tiny")
    first, second = random_plan(case, 3, 3), random_plan(case, 2, 4)

    def train(module: HapModule, batch: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        call(module, batch).backward()
        optimizer.step()
        return module.full_state_dict()

    trained = on_ranks(case, first, train)[0]
    assert not torch.equal(
        trained["transformer.wte.weight"], case.model.state_dict()["transformer.wte.weight"]
    )

    def carry_on(module: HapModule, batch: Any) -> dict[str, Tensor]:
        module.load_full_state_dict(trained)
        before = module.full_state_dict()
        assert all(torch.equal(before[name], trained[name]) for name in trained)
        return train(module, batch)

    reference = copy.deepcopy(case.model)
    reference.load_state_dict(trained)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    case.loss_of(reference).backward()
    optimizer.step()
    want = reference.state_dict()
    for state in on_ranks(case, second, carry_on):
        for name in want:
            torch.testing.assert_close(state[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "0.weight"}, r"lacks \['0.weight'\]"),
        (lambda s: s | {"9.weight": torch.ones(2)}, r"unknown \['9.weight'\]"),
        (lambda s: s | {"0.weight": s["0.weight"][:, :20]}, "0.weight has shape"),
        (lambda s: s | {"0.weight": s["0.weight"][:24]}, "0.weight has shape"),
        (lambda s: s | {"0.bias": torch.ones(96)}, "0.bias has shape"),
    ],
    ids=["missing", "unknown", "narrow", "short", "long"],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_state_dict_of_another_model_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, seed: int
) -> None:
    case = benchmark_case("mlp", "tiny")
    state = change(dict(case.model.state_dict()))

    def act(module: HapModule, batch: Any) -> None:
        with pytest.raises(PlanError, match=message):
            module.load_full_state_dict(state)

    on_ranks(case, random_plan(case, 2, seed), act)


# --- steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "world"), CASES)
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_uses_the_norm_of_the_whole_model(file: str, world: int, max_norm: float) -> None:
    case = benchmark_case(file, "tiny")
    plan = random_plan(case, world, 5)

    def act(module: HapModule, batch: Any) -> tuple[float, float, dict[str, Tensor]]:
        call(module, batch).backward()
        norm = clip_grad_norm_(module, max_norm)
        return norm.item(), module.grad_norm().item(), grads(module)

    reference = copy.deepcopy(case.model)
    case.loss_of(reference).backward()
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm).item()
    clipped = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
    assert (clipped < want) == (max_norm == 0.01)
    ranks = on_ranks(case, plan, act)
    for norm, after, _ in ranks:
        assert norm == pytest.approx(want, rel=1e-4)
        assert after == pytest.approx(clipped, rel=1e-4)
    compare_gradients(plan, [g for _, _, g in ranks], grads(reference))


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def compare_gradients(plan: Plan, ranks: list[dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
    for name, reference in want.items():
        placement = plan.program.inputs[tensors[name]]
        parts = [seen[name] for seen in ranks]
        whole = torch.cat(parts, placement.dim) if placement.sharded else parts[0]
        scale = max(reference.abs().max().item(), 1e-6)
        torch.testing.assert_close(whole, reference, rtol=0, atol=1e-4 * scale + 1e-7, msg=name)


def test_gradients_accumulate() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 3, 6)

    def act(module: HapModule, batch: Any) -> dict[str, Tensor]:
        for scale in (1.0, 0.5, 2.0):
            (scale * call(module, batch)).backward()
        return grads(module)

    reference = copy.deepcopy(case.model)
    (3.5 * case.loss_of(reference)).backward()
    compare_gradients(plan, on_ranks(case, plan, act), grads(reference))


def test_a_forward_without_gradients() -> None:
    case = benchmark_case("mlp", "tiny")
    want = case.loss_of(case.model).item()

    def act(module: HapModule, batch: Any) -> float:
        with torch.no_grad():
            loss = call(module, batch)
        assert not loss.requires_grad
        return loss.item()

    assert on_ranks(case, random_plan(case, 3, 7), act) == pytest.approx([want] * 3)


# --- refusals ------------------------------------------------------------------------------


def test_another_world_size_is_refused() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 3, 0)
    with pytest.raises(PlanError, match="for 3 ranks, this run has 1"):
        HapModule(plan, case.model, LocalComm(), CPU)


def split_batch(case: Case, world: int) -> Plan:
    """Return a random plan that gives each rank some rows of the batch."""
    for seed in range(50):
        plan = random_plan(case, world, seed)
        inputs = [plan.program.inputs[i.tensor] for i in plan.graph.role("input")]
        rows = [plan.local_batch(case.batch, rank).shape[0] for rank in range(world)]
        if inputs == [S(0)] and all(rows):
            return plan
    raise AssertionError("no such plan")


def test_a_batch_that_is_not_this_ranks_part_is_refused() -> None:
    case = benchmark_case("mlp", "tiny")

    def whole(module: HapModule, batch: Tensor) -> None:
        with pytest.raises(PlanError, match=r"the batch has shape .*part is") as error:
            module(case.batch)
        assert "plan.local_batch" in error.value.hint

    on_ranks(case, split_batch(case, 2), whole)


def test_a_missing_batch_entry_is_named() -> None:
    case = benchmark_case("gpt2", "tiny")

    def act(module: HapModule, batch: dict[str, Tensor]) -> None:
        with pytest.raises(PlanError, match="'labels' is missing"):
            module(input_ids=batch["input_ids"])

    on_ranks(case, random_plan(case, 2, 0), act)


def test_a_starred_lone_tensor_is_explained() -> None:
    case = benchmark_case("mlp", "tiny")

    def act(module: HapModule, batch: Tensor) -> None:
        with pytest.raises(PlanError) as error:
            module(*batch)
        assert "call model(x), not model(*x)" in error.value.hint

    on_ranks(case, split_batch(case, 2), act)


def test_a_rank_without_rows_ignores_the_one_that_its_loader_gives() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = next(
        plan
        for plan in (random_plan(case, 3, seed) for seed in range(200))
        if any(start == stop for start, stop in map(plan.batch_rows, range(3)))
    )
    rows = [list(RankBatchSampler(plan, plan.batch_size, rank)) for rank in range(3)]
    assert all(batches and all(batches) for batches in rows)
    losses = []

    def act(module: HapModule, batch: Tensor) -> None:
        losses.append(module(batch).item())
        losses.append(module(batch if len(batch) else case.batch[:1]).item())

    on_ranks(case, plan, act)
    assert losses == pytest.approx([losses[0]] * 6)


@pytest.mark.parametrize("difference", ["program", "shares", "model"])
def test_ranks_with_different_plans_are_refused(difference: str) -> None:
    case = benchmark_case("mlp", "tiny")
    plan = split_batch(case, 2)
    if difference == "program":
        other = random_plan(case, 2, 60)
    elif difference == "model":
        case_of = benchmark_case("wide_mlp", "tiny")
        other = random_plan(case_of, 2, 0)
    else:
        name = plan.program.axis(plan.graph.role("input")[0].tensor, 0)[0]
        first, second = plan.shares[name]
        other = replace(plan, shares={**plan.shares, name: (first - 1, second + 1)})

    def run(comm: Comm) -> None:
        mine = other if comm.rank else plan
        with pytest.raises(PlanError, match="different programs"):
            HapModule(mine, case.model, comm, CPU)

    run_ranks(2, run)


def test_ranks_with_different_seeds_are_refused() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = split_batch(case, 2)

    def run(comm: Comm) -> None:
        with pytest.raises(PlanError, match=f"seeds, rank {comm.rank} has {7 + comm.rank}"):
            HapModule(plan, case.model, comm, CPU, seed=7 + comm.rank)

    run_ranks(2, run)


def test_in_turn_runs_collectives_in_the_callers_thread() -> None:
    lane = ThreadLane()
    ctx = Context(LocalComm(), lane=lane)

    def thread(x: torch.Tensor, how: str) -> torch.Tensor:
        return torch.tensor(threading.get_ident() == threading.main_thread().ident)

    ctx.all_reduce = thread  # type: ignore[method-assign]
    assert not ctx.wait(ctx.issue("all_reduce", torch.ones(1), "one shot"))
    with ctx.in_turn():
        assert ctx.wait(ctx.issue("all_reduce", torch.ones(1), "one shot"))
    assert not ctx.wait(ctx.issue("all_reduce", torch.ones(1), "one shot"))


# --- the stopwatch --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_watched_step_is_the_same_and_every_operator_has_its_seconds(in_turn: bool) -> None:
    case = benchmark_case("gpt2", "tiny")
    plan = random_plan(case, 2, 1)
    collectives = sum(
        not step.local for step in plan.program.instructions if isinstance(step, Convert)
    )
    assert collectives

    def act(module: HapModule, batch: Any) -> Stopwatch:
        module.without_dropout()
        plain = call(module, batch)
        plain.backward()
        want = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        module.zero_grad()
        module._ctx._lane = ThreadLane()  # as between real processes
        watch = watched(module, in_turn=in_turn)
        ran_in = module._ctx._lane.issue(threading.get_ident).tensor()
        assert (ran_in == threading.get_ident()) == in_turn
        watch.start()
        loss = call(module, batch)
        loss.backward()
        watch.look(REST)
        assert torch.equal(loss, plain)
        assert all(torch.equal(module.get_parameter(n).grad, g) for n, g in want.items())  # type: ignore[arg-type]
        return watch

    made = {
        o for step in plan.program.instructions if isinstance(step, Compute)
        for o, p in zip(plan.graph.by_name[step.node].outputs, step.outs, strict=True) if o and p
    }  # fmt: skip
    watches = on_ranks(case, plan, act)
    for watch in watches:
        timed = set(watch.wall_s) - {WAIT, REST}
        assert timed <= set(plan.graph.tensors)
        makers = {plan.graph.producer[o].name for o in made}
        found = {plan.graph.producer[t].name for t in timed if t in plan.graph.producer}
        assert found <= makers, "and what a rank has no share of, it need not make"
        assert len(found) > 0.9 * len(makers)
        assert watch.wall_s.keys() == watch.processor_s.keys()
        assert min(watch.wall_s.values()) >= 0
        assert len(watch.collectives) == len(watches[0].collectives) > 0
        assert all(begun <= ended for begun, ended in watch.collectives)


def test_the_users_attributes_of_parameters_reach_the_optimizer() -> None:
    case = make_case(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), torch.randn(8, 8), mean)
    case.model[0].weight.no_decay = True  # type: ignore[index]
    seen: list[list[bool]] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        seen.append([getattr(p, "no_decay", False) for p in params])
        return torch.optim.SGD(params, lr=0.1)

    verdict(replace(case, optimizer=optimizer), random_plan(case, 2, 1), dtype="float32")
    assert len(seen) == 4, "two ranks, and the reference in two precisions"
    assert all(flags == [True, False, False, False] for flags in seen)


def mean(output: Tensor, batch: Tensor) -> Tensor:
    return output.mean()


def test_the_reserved_names_are_the_modules_attributes() -> None:
    case = make_case(nn.Linear(8, 1), torch.randn(8, 8), mean)
    (own,) = on_ranks(case, random_plan(case, 1, 1), lambda module, batch: set(dir(module)))
    assert own - set(dir(nn.Linear(8, 1))) == RESERVED


@pytest.mark.parametrize("name", ["_order", "_state", "in_turn"])
def test_a_tensor_named_like_an_attribute_of_the_module_is_refused(name: str) -> None:
    case = make_case(nn.Linear(8, 1), torch.randn(8, 8), mean)
    plan = random_plan(case, 1, 1)
    case.model.register_buffer(name, torch.ones(1))
    with pytest.raises(ModelError, match=f"the tensor '{name}'"):
        capture(case.model, case.batch, mean)
    with pytest.raises(ModelError, match=f"the tensor '{name}'"):
        HapModule(plan, case.model, LocalComm(), CPU)
