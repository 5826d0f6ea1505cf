"""Training steps: batch norm, checkpoints, buffers, batches and outputs of any structure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hap
from hap.capture.fake_batch import fake_batch
from hap.capture.recompute import PRODUCTS, WAYS
from hap.capture.tracing import capture
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, InputError, ModelError
from hap.ir.batch import call, flatten, form_of, rebuild
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm, LocalComm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule, emit
from hap.synthesizer.cost.operator_work import FLOPS
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.recompute_modes import least_bytes, on_each_kind
from hap.synthesizer.search.program_space import build_space
from tests.random_plans import Case, adamw, make_case, random_plan, two_machines, verdict
from tests.test_training_losses import PLANS, holds, plans_hold

CPU = torch.device("cpu")
ROWS = 7


class Images(nn.Module):
    """Convolution, batch norm over images, batch norm over rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, **options)
        self.linear, self.last = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        return F.cross_entropy(self.last(self.linear(h)), y)


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 3, 6, 6) * 3 + 1, torch.randint(4, (ROWS,))


def on_ranks(case: Case, plan: Plan, act: Callable[[HapModule, Any], Any]) -> list[Any]:
    def run(comm: Comm) -> Any:
        module = HapModule(plan, case.model, comm, CPU)
        return act(module, plan.local_batch(case.batch, comm.rank))

    return run_ranks(plan.world_size, run)


# --- batch norm ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.4, "eps": 0.1}],
    ids=["no weights", "no running", "momentum"],
)
def test_batch_norm_has_the_statistics_of_the_global_batch(options: dict[str, Any]) -> None:
    """Compare losses, gradients, and the running buffers after three steps.

    The second batch norm of the model has the usual options.
    """
    holds(Images(**options), images())


@pytest.mark.slow
def test_vanishing_gradients_count_as_rounding() -> None:
    """A bias before a batch norm has none; from rounding, Adam makes a whole step in float32."""
    torch.manual_seed(
        0
    )  # with one seed in eight the rounding of float32 exceeds what counts as such
    case = make_case(Images(), images())
    for world, seed in PLANS:
        found = verdict(case, random_plan(case, world, seed), dtype="float32")
        assert found.ok, [(row.what, row.tensor, row.error) for row in found.rows if not row.ok]


@pytest.mark.slow
def test_batch_norm_in_eval_mode_uses_the_running_statistics() -> None:
    """Of the whole model, and of a frozen part of a model that trains."""
    model = Images()
    model(*images())  # running statistics other than those of a batch
    holds(copy.deepcopy(model).eval(), images())
    model.norm.eval()
    holds(model, images())


@pytest.mark.slow
def test_eval_of_a_module_planned_in_training() -> None:
    """The loss is that of ``model.eval()`` and nothing is updated, under any plan."""
    case = make_case(Images(), images())
    reference = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    case.loss_of(reference).backward()
    optimizer.step()
    want = case.loss_of(reference.eval())
    want.backward()
    assert want.item() != pytest.approx(case.loss_of(reference.train()).item(), rel=1e-3)

    def act(module: HapModule, batch: Any) -> float:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        call(module, batch).backward()
        optimizer.step()
        module.eval()
        before = module.full_state_dict()
        loss: Tensor = call(module, batch)
        after = module.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert int(before["norm.num_batches_tracked"]) == 1
        return loss.item()

    for world, seed in PLANS:
        losses = on_ranks(case, random_plan(case, world, seed), act)
        assert losses == pytest.approx([want.item()] * world, rel=1e-4)


def test_one_value_per_channel_is_refused_as_torch_does() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        capture(model, torch.randn(1, 3), lambda out, batch: out.sum())


# --- buffers -------------------------------------------------------------------------------


class Averages(nn.Module):
    """Counts its steps, and keeps moving averages of activations and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("slow", torch.zeros(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.steps += 1
        with torch.no_grad():
            self.seen.copy_(0.9 * self.seen + 0.1 * h.mean(0))
            self.slow.lerp_(self.linear.weight, 0.25)
        return ((h - self.seen) @ self.slow).square().mean() + self.steps


@pytest.mark.slow
def test_buffers_that_the_forward_updates() -> None:
    holds(Averages(), torch.randn(ROWS, 5))


def test_counters_agree_on_all_ranks() -> None:
    case = make_case(Averages(), torch.randn(ROWS, 5))

    def act(module: HapModule, batch: Any) -> int:
        for _ in range(3):
            call(module, batch)
        return int(module.full_state_dict()["steps"])

    assert on_ranks(case, random_plan(case, 3, 1), act) == [3, 3, 3]


class Tied(nn.Module):
    """Tied weights, a frozen layer, an unused parameter, and an unused output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen, self.spare = nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.mix(self.embed(x)).tanh())
        self.spare(h)
        return F.cross_entropy(self.head(h), x)


def test_tied_frozen_and_unused_parameters() -> None:
    holds(Tied(), torch.randint(11, (ROWS,)))


# --- checkpoints ---------------------------------------------------------------------------


class Blocks(nn.Module):
    """Three blocks; those in ``again`` are checkpointed."""

    def __init__(self, again: tuple[int, ...], reentrant: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(p), nn.Linear(24, 6))
            for _ in range(3)
        )
        self.again, self.reentrant = again, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            if k in self.again:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = x + block(x)
        return x.square().mean()


X = torch.randn(ROWS, 6)


@cache
def blocks_case(again: tuple[int, ...], reentrant: bool = False) -> Case:
    return make_case(Blocks(again, reentrant), X)


@pytest.mark.slow
@pytest.mark.parametrize(("again", "reentrant"), [((0, 1, 2), False), ((1,), True)])
def test_checkpointed_blocks_train_like_others(again: tuple[int, ...], reentrant: bool) -> None:
    """A model of which some blocks are checkpointed without ``reentrant`` is tested with dropout."""
    plans_hold(blocks_case(again, reentrant))


def test_checkpointed_activations_are_recomputed_and_not_saved() -> None:
    """A block's wide activations (rows by 24) are saved, or recomputed by copies of operators."""
    for again in ((), (1,), (0, 1, 2)):
        graph = blocks_case(again).graph
        wide = [t for t in graph.saved if graph.tensors[t].shape == (ROWS, 24)]
        per_block = 2  # of the product and of the nonlinearity
        assert len(wide) == per_block * (3 - len(again)), wide
        copies = [n for n in graph.nodes if n.name.endswith("_redone")]
        products = [n for n in copies if n.op == "aten.addmm.default"]
        assert len(products) == len(again)
        assert {n.name for n in copies} <= graph.backward


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()


@pytest.mark.slow
def test_a_checkpoint_may_say_what_to_keep() -> None:
    case = make_case(Selective(()), X)
    graph = case.graph
    wide = [t for t in graph.saved if graph.tensors[t].shape == (ROWS, 24)]
    assert len(wide) == 3 and all(graph.producer[t].op == "aten.addmm.default" for t in wide)
    assert {n.op for n in graph.nodes if n.name.endswith("_redone")} == {"aten.gelu.default"}
    plans_hold(case)


def test_a_checkpoint_lowers_what_the_emitted_forward_hands_to_the_backward() -> None:
    def handed_over(again: tuple[int, ...]) -> int:
        plan = random_plan(blocks_case(again), 1, 0)
        given = {i.tensor for i in plan.graph.inputs}
        saved = emit(plan, 0, CPU).saved
        return sum(plan.graph.tensors[v.tensor].nbytes for v in saved if v.tensor not in given)

    everything, nothing = handed_over(()), handed_over((0, 1, 2))
    assert 0 < nothing < 0.5 * everything


@pytest.mark.slow
def test_a_dropout_in_a_checkpoint_keeps_its_mask() -> None:
    """With equal masks, the gradients are those without the checkpoint."""
    found = []
    for again in ((), (0, 2)):
        torch.manual_seed(0)
        case = make_case(Blocks(again, p=0.4), X)
        module = HapModule(random_plan(case, 1, 0), case.model, LocalComm(), CPU, seed=5)
        loss = module(X)
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters()}
        found.append((loss.item(), gradients))
    (first, slopes), (second, others) = found
    assert first == pytest.approx(second, rel=1e-6)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, others[name])
    plans_hold(case)


# --- random numbers ------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout of channels, stochastic depth, noise, and random times per row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.linear = nn.Conv2d(3, 40, 3), nn.Dropout2d(0.3), nn.Linear(40, 6)
        self.times = nn.Embedding(9, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(self.drop(self.conv(x)).mean((2, 3)))
        h = h + h.tanh() * (0.8 + torch.rand(h.shape[0], 1)).floor() / 0.8
        h = h + 0.1 * torch.randn_like(h) + self.times(torch.randint(9, (h.shape[0],)))
        return F.cross_entropy(h, y)


@pytest.mark.slow
def test_noise_of_every_kind_verifies() -> None:
    holds(Noisy(), images())


def test_noise_is_decided_by_the_seed_and_the_step() -> None:
    """The loss is also the same on all ranks."""
    case = make_case(Noisy(), images())
    plan = random_plan(case, 3, 1)

    def losses(seed: int) -> list[list[float]]:
        def run(comm: Comm) -> list[float]:
            module = HapModule(plan, case.model, comm, CPU, seed=seed)
            batch = plan.local_batch(case.batch, comm.rank)
            return [call(module, batch).item() for _ in range(3)]

        return run_ranks(3, run)

    first, again, other = losses(4), losses(4), losses(5)
    assert first == again != other
    assert all(seen == pytest.approx(first[0], rel=1e-5) for seen in first)
    assert len(set(first[0])) == 3


def test_dropped_channels_are_dropped_whole_and_as_often_as_asked() -> None:
    class Lone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (F.dropout2d(x * self.scale, 0.3) * x).sum()

    x = torch.randn(40, 50, 3, 2)
    case = make_case(Lone(), x)
    module = HapModule(random_plan(case, 1, 0), case.model, LocalComm(), CPU)
    energy = x.square().sum().item()
    kept = [module(x).item() / energy for _ in range(5)]
    assert all(abs(share - 1) < 0.1 for share in kept) and len(set(kept)) == 5
    module.eval()
    assert module(x).item() == pytest.approx(energy, rel=1e-5)


# --- inputs and outputs --------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, inputs: Any, pair: Any = None, scale: float = 1.0, flag: Any = None) -> Any:
        out = self.linear(inputs["x"]) * scale
        if pair is not None:
            out = out + pair[0] * pair[1][0]
        assert flag in (None, "on")
        return F.cross_entropy(out, inputs["deep"]["y"])


def inside() -> dict[str, Any]:
    return {"x": torch.randn(ROWS, 5), "deep": {"y": torch.randint(4, (ROWS,))}}


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": inside()},
        (inside(),),
        [inside(), (torch.randn(ROWS, 4), [2.5, None])],
        {"inputs": inside(), "pair": [torch.randn(4), (torch.randn(ROWS, 1),)], "scale": 0.5,
         "flag": "on"},
    ],
    ids=["keyword", "tuple", "list", "all"],
)  # fmt: skip
def test_batches_may_be_nested(batch: Any) -> None:
    holds(Nested(), batch)
    again = rebuild(form_of(batch), flatten(batch))
    assert type(again) is type(batch)
    assert form_of(again) == form_of(batch)
    assert all(
        a is b for a, b in zip(flatten(again).values(), flatten(batch).values(), strict=True)
    )


def test_parts_of_a_nested_batch_are_checked() -> None:
    case = make_case(Nested(), {"inputs": inside()})

    def act(module: HapModule, batch: Any) -> None:
        del batch["inputs"]["deep"]["y"]
        with pytest.raises(Exception, match=r"'inputs\.deep\.y' is missing"):
            call(module, batch)

    on_ranks(case, random_plan(case, 2, 0), act)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": {1, 2}}, "batch entry 'x' is set"),
        (Pair(X, X), "batch.. returned Pair"),
        ({"a": {"b": X}, "a.b": X}, "two tensors of the batch are called 'a.b'"),
        (3, "batch.. returned int"),
    ],
)
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        capture(nn.Linear(6, 1), batch, lambda out, batch: out.sum())


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(6, 1), wrap

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        return self.wrap(out.square().mean(), out)


@cache
def digest_of_a_bare_loss() -> str:
    return capture(Returns(lambda loss, out: loss), X).digest


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor


def model_output(loss: Tensor, out: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(loss=loss, logits=out)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss, out: (loss, out),
        lambda loss, out: [loss, {"logits": out}],
        lambda loss, out: {"logits": out, "loss": loss},
        lambda loss, out: Named(out, loss),
        model_output,
    ],
    ids=["tuple", "list", "dict", "named tuple", "ModelOutput"],
)
def test_the_loss_may_come_in_company(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    case = make_case(Returns(wrap), X)
    assert case.graph.digest == digest_of_a_bare_loss()
    plans_hold(case)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda loss, out: (out, loss), r"has shape \(7, 1\), not a scalar"),
        (lambda loss, out: {"logits": out}, "returns no loss"),
        (lambda loss, out: None, "returns no loss"),
    ],
)
def test_an_output_without_a_loss_says_what_to_return(
    wrap: Callable[[Tensor, Tensor], Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as error:
        capture(Returns(wrap), X)
    assert "a tuple that begins with it" in error.value.hint


# --- recomputation chosen by the plan ------------------------------------------------------


def rows_of_blocks() -> Tensor:
    return torch.randn(4096, 6)


def with_memory(nbytes: int) -> Cluster:
    cluster = two_machines(2)
    devices = tuple(replace(d, memory_bytes=nbytes) for d in cluster.devices)
    return replace(cluster, devices=devices)


@pytest.mark.slow
def test_the_plan_makes_activations_again_where_they_do_not_fit() -> None:
    peaks = {}
    for way in ("", *WAYS):
        plan = hap.plan(
            Blocks(()), rows_of_blocks(), two_machines(2), options=PlanOptions(recompute=way)
        )
        peaks[way] = max(rank.peak_bytes for rank in plan.prediction.ranks)
        assert plan.recipe.recompute == way
    space = build_space(capture(Blocks(()), rows_of_blocks()))
    least = least_bytes(on_each_kind(space, plan.cluster, plan.optimizer.states))
    assert peaks["blocks"] < 0.9 * peaks["cheap"] < 0.81 * peaks[""]
    for way, larger in (("cheap", ""), ("blocks", "cheap")):
        cluster = with_memory((peaks[way] + peaks[larger]) // 2)
        said: list[str] = []
        plan = hap.plan(Blocks(()), rows_of_blocks(), cluster, progress=said.append)
        assert plan.recipe.recompute == way
        assert f"memory is short: recomputing in the backward ({way})" in said
        # A way is not searched if its bound exceeds the memory of all devices.
        room = sum(d.memory_bytes for d in cluster.devices)
        rows = [a for a in plan.prediction.alternatives if a.name == "without recomputation"]
        assert bool(rows) == (least <= room)
        assert not any(a.fits for a in rows)
        plan.check_model(capture(Blocks(()), fake_batch(plan), recompute=plan.recipe.recompute))
        assert Plan.from_json(plan.to_json()).recipe == plan.recipe
    with pytest.raises(InfeasibleError):
        hap.plan(
            Blocks(()),
            rows_of_blocks(),
            with_memory(peaks["cheap"]),
            options=PlanOptions(recompute="", accumulate=False),
        )
    with pytest.raises(InfeasibleError):
        hap.plan(
            Blocks(()),
            rows_of_blocks(),
            with_memory(peaks["blocks"] // 4),
            options=PlanOptions(accumulate=False),
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_chosen_recomputation_trains_the_same(way: str) -> None:
    model = Blocks((1,), p=0.3)
    space = build_space(capture(model, X, recompute=way))
    case = Case(model=model, batch=X, loss=None, optimizer=adamw, captured=lambda: space)
    for world, seed in PLANS:
        assert verdict(case, random_plan(case, world, seed)).ok


def test_products_are_those_that_are_priced_as_products() -> None:
    assert {op for op in FLOPS if "backward" not in op} == PRODUCTS


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InputError, match="recompute 'all'"):
        hap.plan(Blocks(()), X, two_machines(2), options=PlanOptions(recompute="all"))
