"""What a training step may hold: batch norm, checkpoints, buffers, batches and outputs of any form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hap.batch import call, flatten, form_of, rebuild
from hap.capture import capture
from hap.errors import ModelError
from hap.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.module import HapModule
from tests.random_plans import Case, make_case, random_plan
from tests.test_training_losses import PLANS, holds

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


@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.4, "eps": 0.1}],
    ids=["usual", "no weights", "no running", "momentum"],
)
def test_batch_norm_has_the_statistics_of_the_global_batch(options: dict[str, Any]) -> None:
    """Losses, gradients, and the running buffers after three steps."""
    holds(Images(**options), images())


def test_batch_norm_in_eval_mode_uses_the_running_statistics() -> None:
    """Of the whole model, and of a frozen part of a model that trains."""
    model = Images()
    model(*images())  # running statistics that are none of the first batch's
    holds(copy.deepcopy(model).eval(), images())
    model.norm.eval()
    holds(model, images())


def test_eval_of_a_module_planned_in_training() -> None:
    """The loss is that of ``model.eval()``, and nothing is updated, whatever the plan."""
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
    """Counts its steps, keeps moving averages of activations and of a parameter."""

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
    """Three blocks; those of ``again`` are checkpointed."""

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


@pytest.mark.parametrize(("again", "reentrant"), [((1,), False), ((0, 1, 2), False), ((1,), True)])
def test_checkpointed_blocks_train_like_others(again: tuple[int, ...], reentrant: bool) -> None:
    holds(Blocks(again, reentrant), X)


def test_what_is_checkpointed_is_made_again_and_not_kept() -> None:
    """The wide activations (rows by 24) of a block are kept, or made by copies of its operators."""
    for again in ((), (1,), (0, 1, 2)):
        graph = capture(Blocks(again), X)
        wide = [t for t in graph.saved if graph.tensors[t].shape == (ROWS, 24)]
        per_block = 2  # the product and what the nonlinearity makes of it
        assert len(wide) == per_block * (3 - len(again)), wide
        copies = [n for n in graph.nodes if n.name.endswith("_redone")]
        products = [n for n in copies if n.op == "aten.addmm.default"]
        assert len(products) == len(again)
        assert {n.name for n in copies} <= graph.backward


def test_a_checkpoint_lowers_the_peak_that_is_run() -> None:
    """Bytes that the emitted forward hands to the backward."""

    def saved(again: tuple[int, ...]) -> int:
        case = make_case(Blocks(again), X)
        module = HapModule(random_plan(case, 1, 0), case.model, _alone(), CPU)
        kept = {t.data_ptr(): t for t in module(X).grad_fn.saved_tensors}
        known = {p.data_ptr() for p in module.parameters()} | {X.data_ptr()}
        return sum(t.numel() for at, t in kept.items() if at not in known)

    everything, nothing = saved(()), saved((0, 1, 2))
    assert nothing < 0.5 * everything


def _alone() -> Comm:
    from hap.runtime.collectives import LocalComm

    return LocalComm()


def test_a_dropout_in_a_checkpoint_keeps_its_mask() -> None:
    """With the same masks, the gradients are those without the checkpoint."""
    found = []
    for again in ((), (0, 2)):
        torch.manual_seed(0)
        case = make_case(Blocks(again, p=0.4), X)
        module = HapModule(random_plan(case, 1, 0), case.model, _alone(), CPU, seed=5)
        loss = module(X)
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters()}
        found.append((loss.item(), gradients))
    (first, slopes), (second, others) = found
    assert first == pytest.approx(second, rel=1e-6)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, others[name])
    holds(Blocks((0, 2), p=0.4), X)


# --- what goes in and what comes out -------------------------------------------------------


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
    assert capture(Returns(wrap), X).digest == capture(Returns(lambda loss, out: loss), X).digest
    holds(Returns(wrap), X)


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
