"""Random programs compute what one device computes; broken ones are found and named."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.errors import ModelError
from hap.ir.placement import L, P, R, S
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert, Value
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm, Waiting
from hap.runtime.context import Context
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.launch import spawn
from hap.runtime.shards import cut
from hap.runtime.verify import TOLERANCE, Verdict, compare, prepared
from tests.random_plans import Case, benchmark_case, call, make_case, random_plan, verdict, widened

MODELS = (
    ("bert", "tiny"), ("bert_moe", "tiny"), ("gpt2", "tiny"), ("llama", "tiny"),
    ("llama", "tiny_gqa"), ("mlp", "tiny"), ("t5", "tiny"), ("vgg19", "tiny"), ("vit", "tiny"),
    ("wide_mlp", "tiny"),
)  # fmt: skip
DRAWN = ((2, 0), (3, 1), (4, 0), (5, 1))
"""Ranks and seeds of random plans."""


def story(found: Verdict) -> str:
    """Return the text to print on a failure."""
    worst = max(found.rows, key=lambda row: row.error)
    return f"first: {found.first_bad}; worst: {worst.what} of {worst.tensor}, {worst.error:.1e}"


# --- correct programs ----------------------------------------------------------------------


SMALL = ("mlp", "vgg19", "wide_mlp")
PLANS = [
    pytest.param(*model, world, seed, marks=[pytest.mark.slow] if model[0] not in SMALL else [])
    for k, model in enumerate(MODELS)
    for world, seed in DRAWN
    if model[0] in SMALL or world == 2 + k % 4
]


@pytest.mark.parametrize(("file", "variant", "world", "seed"), PLANS)
def test_random_programs_compute_what_one_device_computes(
    file: str, variant: str, world: int, seed: int
) -> None:
    case = benchmark_case(file, variant)
    plan = random_plan(case, world, seed)
    found = verdict(case, plan)
    assert found.ok, story(found)
    assert found.first_bad is None
    assert found.tolerance == 1e-9
    trained = {name for name, p in case.model.named_parameters() if p.requires_grad}
    assert {row.tensor for row in found.rows if row.what == "gradient"} == trained
    assert sum(row.what == "loss" for row in found.rows) == 3


VOCABULARY = {
    ("aten.embedding.default", (S(0), R), (P,)),
    ("aten.embedding_dense_backward.default", (R, R), (S(0),)),
    ("hap.cross_entropy.default", (S(1), R), (L, P)),
    ("hap.cross_entropy_backward.default", (R, R, S(1), R, R), (S(1),)),
}
"""Operators on shards of the vocabulary of 101 words."""


@pytest.mark.slow
def test_the_random_plans_reach_everything() -> None:
    """They use all implementations of all conversions, empty and odd shards, split vocabularies."""
    seen, parts, looked_up = set(), set(), set()
    for file, variant in (("vgg19", "tiny"), ("gpt2", "tiny"), ("llama", "tiny"), ("bert", "tiny")):
        for world, seed in DRAWN:
            case = benchmark_case(file, variant)
            plan = random_plan(case, world, seed)
            for step in plan.program.instructions:
                if isinstance(step, Convert):
                    seen.add((step.kind, step.implementation))
                    continue
                op = case.graph.by_name[step.node].op
                if (op, step.ins, step.outs) in VOCABULARY:
                    looked_up.add(op)
            parts.update(part for shares in plan.shares.values() for part in shares)
    assert seen == {
        ("all_gather", "padded"), ("all_gather", "grouped"), ("all_gather", "hierarchical"),
        ("reduce_scatter", "padded"), ("reduce_scatter", "grouped"),
        ("reduce_scatter", "hierarchical"),
        ("all_reduce", "one shot"), ("all_reduce", "two step"), ("all_reduce", "hierarchical"),
        ("all_to_all", "exact"), ("all_to_all", "gathered"), ("all_to_all", "hierarchical"),
        ("all_reduce_lse", "terms gathered"), ("all_reduce_lse", "two reductions"),
        ("slice", ""), ("mask", ""),
    }  # fmt: skip
    assert {0, 1, 5, 7} <= parts
    assert looked_up == {op for op, _, _ in VOCABULARY}


def test_a_random_plan_is_repeatable() -> None:
    case = benchmark_case("mlp", "tiny")
    first, second = (random_plan(case, 3, 7).to_json() for _ in range(2))
    assert first == second
    assert first != random_plan(case, 3, 8).to_json()


@pytest.mark.parametrize(
    ("file", "variant"), [("bert", "tiny"), ("vgg19", "tiny"), ("mlp", "tiny")]
)
def test_float32_programs_are_as_close_as_float32_allows(file: str, variant: str) -> None:
    case = benchmark_case(file, variant)
    found = verdict(case, random_plan(case, 3, 11), dtype="float32")
    assert found.ok, story(found)
    assert found.tolerance == TOLERANCE["float32"] == 1e-4
    assert max(row.error for row in found.rows) > 1e-9, "this ran in float64"


def on_gloo(world: int, target: Callable[[Comm], Any]) -> list[Any]:
    return spawn(_on_group, world, args=(target,), timeout_s=240)


def _on_group(target: Callable[[Comm], Any]) -> Any:
    return target(ProcessGroupComm())


@pytest.mark.slow
@pytest.mark.gloo
def test_real_processes_compute_what_one_device_computes() -> None:
    case = benchmark_case("bert_moe", "tiny")
    found = verdict(case, random_plan(case, 3, 3), run=on_gloo)
    assert found.ok, story(found)


# --- broken programs -----------------------------------------------------------------------


def dropped_all_reduce(plan: Plan, *, backward: bool) -> tuple[Plan, str]:
    """Return the plan with a partial result used as the whole, as under a wrong rule."""
    steps = list(plan.program.instructions)
    for k, step in enumerate(steps):
        if not isinstance(step, Compute) or step.backward != backward or step.outs.count(P) != 1:
            continue
        if not shared_by_all(plan, step):  # a rank that holds all of it loses nothing
            continue
        tensor = plan.graph.by_name[step.node].outputs[step.outs.index(P)]
        assert tensor is not None
        users = [other for other in steps if uses(plan, other, Value(tensor, P))]
        if len(users) == 1 and isinstance(users[0], Convert) and users[0].dst == R:
            steps[k] = replace(step, outs=tuple(R if p == P else p for p in step.outs))
            steps.remove(users[0])
            return replace(plan, program=replace(plan.program, instructions=tuple(steps))), tensor
    raise AssertionError("no lone all-reduce in this plan")


def shared_by_all(plan: Plan, step: Compute) -> bool:
    """Return whether every rank contributes to the sum of this instruction."""
    inputs = plan.graph.by_name[step.node].inputs
    cut = [Value(name, p) for name, p in zip(inputs, step.ins, strict=True) if p.sharded]
    return bool(cut) and all(0 not in plan.program.sizes(plan.graph, v, plan.shares) for v in cut)


def dropped_mask(plan: Plan) -> tuple[Plan, str]:
    """Return the plan with a bias added by every rank instead of by one."""
    steps = list(plan.program.instructions)
    for k, mask in enumerate(steps):
        if not isinstance(mask, Convert) or mask.kind != "mask":
            continue
        partial_value = Value(mask.tensor, P)
        users = [i for i, other in enumerate(steps) if uses(plan, other, partial_value)]
        if len(users) == 1 and isinstance(user := steps[users[0]], Compute):
            inputs = plan.graph.by_name[user.node].inputs
            ins = tuple(
                R if Value(name, p) == partial_value else p
                for name, p in zip(inputs, user.ins, strict=True)
            )
            steps[users[0]] = replace(user, ins=ins)
            del steps[k]
            output = plan.graph.by_name[user.node].outputs[0]
            assert output is not None
            return replace(plan, program=replace(plan.program, instructions=tuple(steps))), output
    raise AssertionError("no lone mask in this plan")


def uses(plan: Plan, step: Compute | Convert, value: Value) -> bool:
    if isinstance(step, Convert):
        return Value(step.tensor, step.src) == value
    inputs = plan.graph.by_name[step.node].inputs
    return value in map(Value, inputs, step.ins)


BROKEN = {
    "forward all-reduce": partial(dropped_all_reduce, backward=False),
    "backward all-reduce": partial(dropped_all_reduce, backward=True),
    "mask": dropped_mask,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "corrupt"),
    [*itertools.product(["mlp"], BROKEN.values()), ("bert", BROKEN["backward all-reduce"])],
    ids=[*BROKEN, "bert"],
)
def test_a_broken_program_is_found_and_the_first_wrong_tensor_named(
    file: str, corrupt: Callable[[Plan], tuple[Plan, str]]
) -> None:
    case = benchmark_case(file, "tiny")
    for seed in range(60):  # the first random plan that can be broken so
        plan = random_plan(case, 3, 100 + seed)
        try:
            broken, tensor = corrupt(plan)
        except AssertionError:
            continue
        break
    assert verdict(case, plan).ok
    broken.program.check(broken.graph)
    found = verdict(case, broken)
    assert not found.ok
    assert found.first_bad is not None
    assert Value.parse(found.first_bad).tensor == tensor
    assert any(row.error > 1e-6 for row in found.rows)


class Faulty(Comm):
    """A communicator that corrupts one collective's input on one rank."""

    def __init__(self, comm: Comm, fault: Callable[[Tensor], Tensor], at: int) -> None:
        self._comm, self._fault, self._left = comm, fault, at
        self.rank, self.world_size = comm.rank, comm.world_size

    def _spoilt(self, x: Tensor) -> Tensor:
        if self.rank != 1 or not x.numel():
            return x
        self._left -= 1
        return self._fault(x) if self._left == -1 else x

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], how: str) -> Tensor:
        return self._comm.all_gather(self._spoilt(x), dim, sizes, how)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int], how: str) -> Tensor:
        return self._comm.reduce_scatter(self._spoilt(x), dim, sizes, how)

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        return self._comm.all_reduce(self._spoilt(x), how)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce_max(self._spoilt(x))

    def all_to_all(self, x: Tensor, *rest: Any) -> Tensor:
        return self._comm.all_to_all(self._spoilt(x), *rest)

    def send(self, x: Tensor, rank: int) -> Waiting:
        return self._comm.send(self._spoilt(x), rank)

    def receive(self, into: Tensor, rank: int) -> Waiting:
        return self._comm.receive(into, rank)

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Comm:
        return self._comm.subgroup(parts)

    def texts(self, text: str) -> list[str]:
        return self._comm.texts(text)


@pytest.mark.parametrize("at", [0, 5, 9])
def test_a_fault_of_one_rank_is_found(at: int) -> None:
    """The program itself is right, so the name is that of the first observed tensor."""
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 6)

    def run(world: int, target: Callable[[Comm], Any]) -> list[Any]:
        return run_ranks(world, lambda comm: target(Faulty(comm, lambda x: x + 1e-3, at)))

    assert len(plan.program.collectives) > at
    found = verdict(case, plan, run=run)
    assert not found.ok
    assert found.first_bad == next(row.tensor for row in found.rows if not row.ok)


def test_missing_nan_and_misshapen_parts_are_infinitely_wrong() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 0)
    name = "0.weight"
    whole = torch.ones(48, 21)
    tensor = next(i.tensor for i in plan.graph.inputs if i.target == name)
    good = [cut(plan, tensor, whole, rank) for rank in range(2)]
    expected: Any = {"loss": {}, "gradient": {}, "parameter": {name: whole}}

    def error(parts: list[Tensor | None]) -> float:
        ranks: Any = [
            {"loss": {}, "gradient": {}, "parameter": {} if p is None else {name: p}} for p in parts
        ]
        (row,) = compare(plan, expected, ranks, 1e-9)
        assert row.ok == (row.error <= 1e-9)
        return row.error

    assert error(list(good)) == 0
    assert error([good[0], None]) == float("inf")
    assert error([good[0] * float("nan"), good[1] * float("nan")]) == float("inf")
    assert error([torch.cat([p, p]) for p in good]) == float("inf")
    assert error([p + 0.5 for p in good]) == pytest.approx(0.5)


def test_an_overflow_of_the_module_itself_allows_no_other_result() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 0)

    def seen(*loss: float) -> Any:
        return {"loss": {"loss": torch.tensor(loss)}, "gradient": {}, "parameter": {}}

    def ok(*loss: float) -> bool:
        own = seen(float("inf"), 2.0)  # in a lower precision
        (row,) = compare(plan, seen(1e30, 2.0), [seen(*loss)] * 2, 1e-3, [own])
        return row.ok

    assert ok(1e30, 2.0) and ok(float("inf"), 2.0)
    assert not ok(float("inf"), -7.0)
    assert not ok(float("nan"), 2.0)


class Counted(nn.Module):
    """A linear layer that counts its steps and the elements above zero, and remembers which."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(12), nn.Linear(12, 16)
        self.register_buffer("counts", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("above", torch.zeros(16, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(self.norm(x))
        active = h.detach().mean(0) > 0
        self.counts += active
        self.above.copy_(active)
        return h.square().mean()


@pytest.mark.slow
def test_integer_and_boolean_buffers_are_compared_exactly() -> None:
    torch.manual_seed(0)
    case = make_case(Counted(), torch.randn(8, 12))
    plan = random_plan(case, 3, 1)
    found = verdict(case, plan)
    assert found.ok, story(found)
    exact = {"norm.num_batches_tracked", "counts", "above"}
    assert exact <= {row.tensor for row in found.rows}
    assert {row.error for row in found.rows if row.tensor in exact} == {0}
    for name in exact:

        def wrong(world: int, target: Callable[[Comm], Any], name: str = name) -> list[Any]:
            ranks = run_ranks(world, target)
            state = ranks[1]["parameter"]
            state[name] = ~state[name] if name == "above" else state[name] + 1
            return ranks

        found = verdict(case, plan, run=wrong)
        assert [row.tensor for row in found.rows if not row.ok] == [name]
        assert found.first_bad == name


# --- dropout -------------------------------------------------------------------------------

DROPOUT = [("bert", "tiny_dropout"), ("vit", "tiny_dropout"), ("mlp", "tiny_dropout")]


def emulated_losses(
    case: Case, plan: Plan, *, seed: int = 0, steps: int = 3, train: bool = True, lr: float = 0.0
) -> list[float]:
    """Return the losses of some steps on one batch; all ranks must agree."""

    def run(comm: Comm) -> list[float]:
        module = HapModule(plan, case.model, comm, torch.device("cpu"), seed=seed)
        module.train(train)
        batch = plan.local_batch(case.batch, comm.rank)
        optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = call(module, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    first, *others = run_ranks(plan.world_size, run)
    assert all(other == pytest.approx(first, rel=1e-6) for other in others)
    return first


@pytest.mark.slow
@pytest.mark.parametrize(("file", "variant"), DROPOUT)
def test_a_program_with_dropout_verifies_with_dropout_off(file: str, variant: str) -> None:
    case = benchmark_case(file, variant)
    found = verdict(case, random_plan(case, 3, 9))
    assert found.ok, story(found)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "variant"), DROPOUT)
def test_a_program_with_dropout_trains(file: str, variant: str) -> None:
    case = benchmark_case(file, variant)
    losses = emulated_losses(case, random_plan(case, 3, 1), steps=12, lr=3e-3)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.01, losses


@pytest.mark.slow
def test_the_seed_decides_the_masks() -> None:
    case = benchmark_case("bert", "tiny_dropout")
    plan = random_plan(case, 2, 1)
    first, again, other = (emulated_losses(case, plan, seed=seed) for seed in (4, 4, 5))
    assert first == again
    assert first != other
    assert len(set(first)) == 3, "each step has masks of its own"


@pytest.mark.slow
@pytest.mark.parametrize(("file", "variant"), DROPOUT)
def test_eval_mode_switches_dropout_off(file: str, variant: str) -> None:
    case = benchmark_case(file, variant)
    first, second = emulated_losses(case, random_plan(case, 3, 2), steps=2, train=False)
    assert first == second
    model = copy.deepcopy(case.model).eval()
    with torch.no_grad():
        expected = case.loss_of(model)
    assert first == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_masks_agree_between_replicas_and_differ_between_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, dict[int, Tensor]] = {}
    original = Context.dropout

    def recording(self: Context, x: Tensor, p: float, site: str, place: int) -> Any:
        out, mask = original(self, x, p, site, place)
        seen.setdefault(site, {})[self.comm.rank] = mask.flatten()
        return out, mask

    monkeypatch.setattr(Context, "dropout", recording)
    case = benchmark_case("vit", "tiny_dropout")
    replicas = shards = 0
    for seed in range(3):
        plan = random_plan(case, 3, seed)
        seen.clear()
        emulated_losses(case, plan, steps=1)
        assert len(seen) == 7  # one after the embedding, three in each of two blocks
        for step in plan.program.instructions:
            if not isinstance(step, Compute) or step.node not in seen:
                continue
            masks = seen[step.node]
            kept = [m.double().mean().item() for m in masks.values() if m.numel() > 400]
            assert all(0.7 < fraction < 0.98 for fraction in kept), step
            if step.ins == (R,):
                replicas += 1
                assert len(masks) == 3 and all(torch.equal(masks[0], masks[r]) for r in (1, 2))
                continue
            large = [mask for mask in masks.values() if mask.numel() >= 64]
            for one, other in itertools.combinations(large, 2):
                shards += 1
                n = min(len(one), len(other))
                assert not torch.equal(one[:n], other[:n]), step
    assert replicas >= 2 and shards >= 5


def test_dropout_keeps_the_right_part_and_the_mean() -> None:
    p, x = 0.3, torch.full((200, 500), 2.0)
    context = Context(LocalComm(), seed=3)
    out, mask = context.dropout(x, p, "site", 0)
    kept = mask.double().mean().item()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    torch.testing.assert_close(out, torch.where(mask, x / (1 - p), 0.0))
    assert torch.equal(context.dropout(x, p, "site", 0)[1], mask)
    for site, place, step in (("other", 0, 0), ("site", 7, 0), ("site", 0, 1)):
        context.step = step
        assert not torch.equal(context.dropout(x, p, site, place)[1], mask)
    out, mask = context.dropout(x, 1.0, "site", 0)
    assert not out.any() and not mask.any()
    context.training = False
    out, mask = context.dropout(x, p, "site", 0)
    assert torch.equal(out, x) and mask.all()


@pytest.mark.slow
@pytest.mark.parametrize(("file", "variant"), DROPOUT)
def test_gradients_go_through_the_masks(
    file: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks depend on values alone, so that every plan must train the same."""

    def by_value(self: Context, x: Tensor, p: float, site: str, place: int) -> Any:
        mask = (x.double() * 1e3).frac().abs() >= p
        return x * mask / (1 - p), mask

    monkeypatch.setattr(Context, "dropout", by_value)
    case = benchmark_case(file, variant)
    single = random_plan(case, 1, 0)
    rng = random.Random(file)
    expected = gradients(case, single)
    for world in (2, 3):
        found = gradients(case, random_plan(case, world, rng.randrange(100)))
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-7, atol=1e-9, msg=name)


def gradients(case: Case, plan: Plan) -> dict[str, Tensor]:
    """Return the whole gradient of every parameter, in float64."""
    model, batch = prepared(case.model, widen=True), widened(case.batch)

    def run(comm: Comm) -> dict[str, Tensor]:
        module = HapModule(plan, model, comm, torch.device("cpu"), widen=True)
        call(module, plan.local_batch(batch, comm.rank)).backward()
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    ranks = run_ranks(plan.world_size, run)
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
    whole = {}
    for name in ranks[0]:
        placement = plan.program.inputs[tensors[name]]
        parts = [seen[name] for seen in ranks]
        whole[name] = torch.cat(parts, placement.dim) if placement.sharded else parts[0]
    return whole


SCALES, SQUARE = torch.arange(1.0, 9.0), torch.diag(torch.arange(2.0, 10.0))


def scaled_loss(output: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(0.1 * SCALES + output @ SQUARE, batch.argmax(1), weight=SCALES)


def test_globals_are_as_precise_as_the_module() -> None:
    torch.manual_seed(0)
    case = make_case(nn.Linear(8, 8), torch.randn(8, 8), scaled_loss)
    for dtype in ("float64", "float32"):
        seen = verdict(case, random_plan(case, 2, 1), dtype=dtype)
        assert seen.ok, story(seen)


def test_a_model_that_fails_on_one_device_is_told_in_one_paragraph() -> None:
    case = make_case(nn.Linear(8, 8), torch.randn(8, 8), scaled_loss)

    def fails(output: Tensor, batch: Tensor) -> Tensor:
        raise ValueError("no float64")

    with pytest.raises(ModelError, match="fails on one device in float64: ValueError: no float64"):
        verdict(replace(case, loss=fails), random_plan(case, 2, 1))
