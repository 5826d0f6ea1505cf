"""Ranks with unequal weights or batches, and uses of a module that its plan does not compute."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.tracing import capture
from hap.errors import HapError, InputError, ModelError, PlanError
from hap.ir.batch import form_of
from hap.ir.plan import Plan, Recipe
from hap.runtime.agreement import check_batch, check_weights
from hap.runtime.batch_sampler import RankBatchSampler
from hap.runtime.collectives import Comm, LocalComm
from hap.runtime.context import Context
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from tests.random_plans import make_case, random_plan, verdict

CPU = torch.device("cpu")


class Net(nn.Module):
    """A frozen layer, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.body(x)).tanh()), y)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 8), torch.randint(5, (12,))


def module_of(model: nn.Module) -> HapModule:
    plan = random_plan(make_case(model, batch()), 1, 0)
    plan = replace(plan, recipe=Recipe(training=model.training))
    return HapModule(plan, model, LocalComm(), CPU)


def raised_on_all(world: int, act: Callable[[Comm], None]) -> list[str]:
    """Return the message of the error that each rank raises."""

    def run(comm: Comm) -> str:
        with pytest.raises(HapError) as error:
            act(comm)
        return error.value.what

    return run_ranks(world, run)


def test_unequal_weights_and_batches_are_found() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))

    models, same = [model(0), model(0), model(1)], batch()
    run_ranks(2, lambda comm: check_weights(models[comm.rank], comm))
    run_ranks(2, lambda comm: check_batch({"x": same[0], "y": same[1]}, comm))
    found = raised_on_all(3, lambda comm: check_weights(models[comm.rank], comm))
    assert found == ["the ranks hold models with different weights"] * 3
    found = raised_on_all(2, lambda comm: check_batch((same[0] + comm.rank,), comm))
    assert found == ["the ranks have made different global batches"] * 2


class Weighted(nn.Module):
    """A loss of rows, of which a mask chooses some, and of a number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        return (self.layer(x).square() * mask).sum() / count


def weighted() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 8), "mask": torch.rand(12, 8) > 0.5, "count": torch.tensor(7.0)}


def weighted_plan(world: int) -> tuple[nn.Module, Plan, dict[str, Tensor]]:
    """Return a model, its plan, in which some entries are whole on all ranks, and a batch."""
    torch.manual_seed(0)
    model, given = Weighted(), weighted()
    case = make_case(model, given)
    for seed in range(100):
        plan = random_plan(case, world, seed)
        cut = [i.target for i in plan.graph.role("input") if any(plan.levels(i.tensor, 0))]
        if "x" in cut or world == 1:
            return model, replace(plan, recipe=Recipe(batch=form_of(given))), given
    raise AssertionError("no such plan")


def test_the_first_call_compares_what_all_ranks_read_whole() -> None:
    model, plan, given = weighted_plan(2)

    def run(comm: Comm, checked: bool, counts: tuple[int, ...]) -> str:
        module = HapModule(plan, model, comm, CPU)
        module._compares = checked
        for count in counts:
            try:
                mine = {**given, "count": torch.tensor(7.0 + count * comm.rank)}
                module(**plan.local_batch(mine, comm.rank))
            except InputError as error:
                assert "RankBatchSampler" in error.hint
                return error.what
        return ""

    wrong = "the ranks have made different global batches"
    assert run_ranks(2, partial(run, checked=True, counts=(1,))) == [wrong] * 2
    assert run_ranks(2, partial(run, checked=True, counts=(0, 1))) == [""] * 2
    assert run_ranks(2, partial(run, checked=False, counts=(1,))) == [""] * 2
    assert hap.compile(model, weighted_plan(1)[1], check=False)._compares is False


@pytest.mark.parametrize(
    ("call", "what", "hint"),
    [
        (lambda m, b: m(b), "is missing", "call model(**batch)"),
        (lambda m, b: m(*b.values()), "is missing", "call model(**batch)"),
        (lambda m, b: m(b["x"], mask=b["mask"]), "is missing", "call model(**batch)"),
        (lambda m, b: m(x=b["x"]), "is missing", "plan.local_batch"),
        (lambda m, b: m(**{**b, "count": 7}), "batch entry 'count' is 7, the plan has a tensor", "torch.tensor(7)"),
        (lambda m, b: m(**{**b, "mask": b["mask"].long()}), "batch entry 'mask' is int64, the plan is for bool", "x.bool()"),
        (lambda m, b: m(**{**b, "x": b["x"][:, :5]}), r"batch entry 'x' has shape \(12, 5\)", 'padding="max_length"'),
        (lambda m, b: m(**{**b, "x": b["x"][:5]}), r"batch entry 'x' has shape \(5, 8\)", "plan.local_batch"),
        (lambda m, b: m._plan.local_batch({**b, "x": b["x"][:, :5]}, 0), r"the plan \(12, 8\)", 'padding="max_length"'),
        (lambda m, b: m._plan.local_batch({**b, "x": b["x"][:5]}, 0), r"the plan \(12, 8\)", "drop_last=True"),
        (lambda m, b: m._plan.local_batch({**b, "x": b["x"][:5, :5]}, 0), r"the plan \(12, 8\)", "the global batch"),
    ],
)  # fmt: skip
def test_another_batch_than_the_planned_one_is_explained(call: Any, what: str, hint: str) -> None:
    model, plan, given = weighted_plan(1)
    module = HapModule(plan, model, LocalComm(), CPU)
    with pytest.raises(PlanError, match=what) as error:
        call(module, given)
    assert hint in error.value.hint


def test_a_tuple_that_is_not_starred_is_explained() -> None:
    model, given = Net(), batch()
    plan = replace(random_plan(make_case(model, given), 1, 0), recipe=Recipe(batch=form_of(given)))
    with pytest.raises(PlanError) as error:
        HapModule(plan, model, LocalComm(), CPU)(given)
    assert "call model(*batch)" in error.value.hint


def test_other_dtypes_of_one_kind_are_taken() -> None:
    model, plan, given = weighted_plan(1)
    module = HapModule(plan, model, LocalComm(), CPU)
    want = module(**given)
    for other in ({"count": torch.tensor(7)}, {"count": torch.tensor(7.0).double()}):
        torch.testing.assert_close(module(**{**given, **other}), want, check_dtype=False)


def test_tensors_of_every_dtype_are_compared() -> None:
    def check_one(batches: list[dict[str, Tensor]], comm: Comm) -> None:
        check_batch(batches[comm.rank], comm)

    kinds = [torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float64]
    held = {str(kind): torch.ones(3, 5).to(kind) for kind in kinds} | {"empty": torch.empty(0, 2)}
    for name in held:
        other = {**held, name: torch.empty(1, 0) if name == "empty" else ~held[name].bool()}
        run_ranks(2, lambda comm: check_batch(held, comm))
        raised_on_all(2, partial(check_one, [held, other]))


WEIGHT = nn.Parameter(torch.randn(5))


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, model: out + 0.1 * sum(p.square().sum() for p in model.parameters()),
        lambda out, model: out * WEIGHT.exp().sum(),
    ],
)
def test_a_loss_that_reads_parameters_from_outside_is_refused(loss: Any) -> None:
    """They would be constants of the step, and never be trained."""
    model = nn.Sequential(nn.Linear(8, 5))
    with pytest.raises(ModelError, match="requires grad, and is no parameter") as error:
        capture(model, torch.randn(12, 8), lambda out, x: loss(out.square().mean(), model))
    assert "parameter of the model" in error.value.hint


def test_an_input_that_requires_grad_is_refused() -> None:
    module, (x, y) = module_of(Net()), batch()
    with pytest.raises(PlanError, match=r"batch entry '0' requires grad"):
        module(x.requires_grad_(), y)
    with torch.no_grad():
        module(x, y)


def test_parameters_that_were_frozen_stay_so() -> None:
    module = module_of(Net())
    module(*batch()).backward()
    module.requires_grad_(True)
    with pytest.raises(PlanError, match=r"no gradient for 'body.weight'"):
        module(*batch())


def test_modes_are_those_of_the_plan() -> None:
    module = module_of(Net())
    module.norm.eval()
    with pytest.raises(PlanError, match="a submodule is in another mode"):
        module(*batch())
    module.eval()(*batch())
    module.train()(*batch())
    planned_in_eval = module_of(Net().eval())
    planned_in_eval.eval()(*batch())
    with pytest.raises(PlanError, match="in eval") as error:
        planned_in_eval.train()
    assert "model.train() before hap.plan" in error.value.hint


def test_what_torch_allows_of_a_module_is_refused_by_name() -> None:
    module = module_of(Net())
    parameters: Any = module.parameters()
    for act in (copy.deepcopy, copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(PlanError, match="can't be copied or pickled") as error:
            act(module)
        assert "full_state_dict" in error.value.hint
    for part in (module, module.body):
        assert not hasattr(part, "config") and getattr(part, "save_pretrained", None) is None
        with pytest.raises(AttributeError, match=r"no attribute 'generate'.*given to hap.compile"):
            _ = part.generate
    with pytest.raises(InputError, match="clip_grad_norm_ of a generator"):
        hap.clip_grad_norm_(parameters, 1.0)


def test_a_sampler_goes_on_where_a_plan_of_another_batch_size_ended() -> None:
    """Twice: after each change the samples of the epoch that were read are not read again."""
    length, read = 60, list[int]()

    def sampler(rows: int) -> RankBatchSampler:
        case = make_case(nn.Linear(8, 5), torch.randn(rows, 8), lambda out, x: out.square().mean())
        return RankBatchSampler(random_plan(case, 1, 0), length, 0, seed=3)

    state, done = None, 0
    for rows, batches in ((6, 2), (3, 4), (4, 9)):
        now = sampler(rows)
        if state is not None:
            now.load_state_dict(state)
        taken = [ids for ids, _ in zip(now, range(batches), strict=False)]
        read += [n for ids in taken for n in ids]
        done += len(taken)
        state = now.state_dict(done)
    assert len(read) == length and sorted(read) == [*range(length)]
    assert state is not None and (state["epoch"], state["offset"]) == (1, 0)


def test_parts_of_random_tensors_fill_them() -> None:
    """As unlike GPUs draw them: the same numbers for the same parts, and no part twice."""
    context = Context(LocalComm(), seed=3)
    for at_once in (7, 64):
        context.at_once = at_once
        masks = [context.mask((9, 11), CPU, 0.5, "site", 0) for _ in range(2)]
        assert torch.equal(*masks) and 20 < int(masks[0].sum()) < 80
        for kind, numbers in (
            ("rand", ()),
            ("randn", ()),
            ("bernoulli", (0.5,)),
            ("randint", (1, 9)),
        ):
            x = context.draw(kind, numbers, (9, 11), "site", 0, dtype=torch.float32, device=CPU)
            assert x.isfinite().all() and not torch.equal(x.view(-1)[:7], x.view(-1)[7:14])


def test_a_module_that_trains_to_other_results_the_second_time_is_not_verified() -> None:
    """Its state is outside of the model, and begins to count after the capture."""

    class Loss:
        def __init__(self) -> None:
            self.calls, self.counts = 1, False

        def __call__(self, out: Tensor, x: Tensor) -> Tensor:
            self.calls += self.counts
            return out.square().mean() * self.calls

    model, loss = nn.Sequential(nn.Linear(8, 5)), Loss()
    case = make_case(model, torch.randn(12, 8), loss)
    loss.counts = True
    with pytest.raises(ModelError, match="something else each time that it is trained"):
        verdict(case, random_plan(case, 2, 0))


def test_numbers_and_flags_of_the_model_are_constants_of_the_plan() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.temperature, self.squares = nn.Linear(8, 5), 2.0, False

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.square() if self.squares else x
            return F.cross_entropy(self.layer(x) / self.temperature, y)

    module = module_of(Scaled())
    for name, value in (("temperature", 1.0), ("squares", True)):
        with pytest.raises(PlanError, match=f"'{name}' is a number or a text of the planned model"):
            setattr(module, name, value)
    module.comment = 1.0  # is none of the model's
    with pytest.raises(PlanError, match="'in_features' is a number"):
        module.layer.in_features = 3
    module.layer.comment, module.layer.training = 1.0, True


def test_changes_of_a_submodule_are_refused() -> None:
    """The plan would compute as before."""
    module = module_of(Net())
    for act in (
        lambda: module.head.register_forward_hook(print),
        lambda: module.head.register_full_backward_hook(print),
        lambda: module.body.register_forward_pre_hook(print),
        lambda: module.head(torch.randn(12, 8)),
    ):
        with pytest.raises(PlanError, match="no forward of its own"):
            act()
    with pytest.raises(PlanError, match="the submodule 'head' is a part of the plan") as error:
        module.head = nn.Linear(8, 5)
    assert "load_full_state_dict" in error.value.hint
    with pytest.raises(PlanError, match=r"with tensors in float32, .* in bfloat16"):
        module.bfloat16()
    module.head, module.extra = module.head, nn.Linear(2, 2)  # neither changes the step
    before = module.eval()(*batch())
    module.register_forward_hook(lambda module, args, loss: 2 * loss)
    assert torch.equal(module.float()(*batch()), 2 * before)
    nn.utils.parametrizations.weight_norm(module.head)  # by another class of the submodule
    with pytest.raises(PlanError, match=r"'head.weight' was removed"):
        module(*batch())


def test_a_refused_capture_leaves_gradients_on() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = 2.0 if self.layer(x).sum() > 0 else 1.0
            return self.layer(x).sum() * scale

    with pytest.raises(ModelError):
        capture(Broken(), torch.randn(12, 8))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("recompute", ["blocks", "cheap"])
def test_batch_norm_trains_with_recomputation(recompute: str) -> None:
    """Its running statistics are written before the backward, which does not read them again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)).relu()

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 5))

    def loss(out: Tensor, batch: Any) -> Tensor:
        return out.square().mean()

    x = torch.randn(12, 8)
    case = make_case(model, x, loss, graph=capture(model, x, loss, recompute=recompute))
    assert any(node.name.endswith("_redone") for node in case.graph.nodes)
    for seed in range(3):
        assert verdict(case, random_plan(case, 2, seed)).ok
