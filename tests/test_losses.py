"""Cross-entropy as a logical operator equals torch's own, whole and with its classes split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture import cross_entropy
from hap.capture.tracing import capture
from hap.ir.placement import L, P, R, S
from hap.ir.plan import Plan
from hap.ir.program import Compute
from hap.runtime import sharded_lookup
from tests.random_plans import make_case, random_plan, verdict
from tests.test_verify import on_gloo

_random = torch.Generator().manual_seed(23)


def floats(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(shape, dtype=torch.float64, generator=_random)).to(dtype)


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_random)


TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check(x: Tensor, target: Tensor, **options: Any) -> None:
    """Check the loss and the gradient, and their dtypes and shapes."""
    found: list[Tensor] = []
    for function in (F.cross_entropy, cross_entropy.cross_entropy):
        given = x.clone().requires_grad_()
        loss = function(given, target, **options)
        (gradient,) = torch.autograd.grad(loss.double().mean(), given)
        found += [loss.detach(), gradient]
    tolerance = TOLERANCE[x.dtype]
    for ours, theirs in ((found[2], found[0]), (found[3], found[1])):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_equals_torchs(reduction: str, dtype: torch.dtype) -> None:
    for shape, weighted, ignore, smoothing in itertools.product(
        ((7, 5), (5,), (3, 5, 2, 4)), (False, True), (-100, 1), (0.0, 0.1)
    ):
        x = floats(*shape, dtype=dtype)
        target = numbers(5, *shape[:1], *shape[2:]) if len(shape) > 1 else numbers(5)
        target.view(-1)[:1] = 1
        weight = torch.rand(5, generator=_random).to(dtype) if weighted else None
        check(
            x, target, weight=weight, reduction=reduction, ignore_index=ignore,
            label_smoothing=smoothing,
        )  # fmt: skip


def test_many_rows_are_worked_on_in_chunks() -> None:
    rows = 3 * cross_entropy.CHUNK["cpu"] // 1000 + 1
    assert sum(1 for _ in cross_entropy._chunks(torch.empty(rows, 1000))) >= 3
    check(floats(rows, 1000, dtype=torch.float32), numbers(1000, rows))


def test_logits_of_minus_infinity_are_classes_that_cannot_be() -> None:
    x = floats(6, 5)
    x[:, 3:] = -torch.inf
    check(x, numbers(3, 6))
    lse, picked = torch.ops.hap.cross_entropy(torch.full((2, 3), -torch.inf), numbers(3, 2), -1)
    assert (lse == -torch.inf).all() and (picked == -torch.inf).all()  # a shard of padding


def test_a_mean_of_no_targets_is_nan_as_in_torch() -> None:
    check(floats(4, 5), torch.full((4,), -100))


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(RuntimeError):
        cross_entropy.cross_entropy(floats(4, 5), torch.tensor([0, 1, 5, 2]))


class Classifier(nn.Module):
    """A padded table, a linear layer and a cross-entropy."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6, padding_idx=4)
        self.out = nn.Linear(6, 11)
        self.register_buffer("weight", torch.rand(11, generator=_random))
        self.options = options

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.table(tokens)), target, **self.options)


BATCH = (numbers(13, 8), numbers(11, 8))
BATCH[0][:2] = 4
BATCH[1][:3] = 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 7}, {"reduction": "sum"}, {"label_smoothing": 0.2, "ignore_index": 7}],
    ids=str,
)
def test_random_programs_split_the_classes_and_the_table(options: dict[str, Any]) -> None:
    """On 2 to 4 ranks. The numbers of classes and words are primes; some ranks have none."""
    case = make_case(Classifier(**options), BATCH)
    placed = set()
    for world, seed in itertools.product((2, 3, 4), range(2)):
        plan = random_plan(case, world, seed)
        found = verdict(case, plan)
        assert found.ok, (world, seed, found.first_bad)
        placed |= {
            (case.graph.by_name[s.node].op, s.ins, s.outs)
            for s in plan.program.instructions if isinstance(s, Compute)
        }  # fmt: skip
    assert ("hap.cross_entropy.default", (S(1), R), (L, P)) in placed
    assert ("hap.cross_entropy_backward.default", (R, R, S(1), R, R), (S(1),)) in placed


def test_capture_under_a_default_device_is_the_same() -> None:
    """There, ``torch.where`` with a number loses its gradient."""
    batch = tuple(t.to("meta") for t in BATCH)
    with torch.device("meta"):
        found = capture(Classifier().to("meta"), batch)
    assert found.digest == capture(Classifier(), BATCH).digest


def test_an_index_that_no_rank_holds_is_refused() -> None:
    """Each rank would leave it to another, and the loss would be wrong."""
    span = (3, 6, 9)
    assert sharded_lookup.own_or_first(torch.tensor([0, 3, 5, 8]), span).tolist() == [0, 0, 2, 0]
    passed = sharded_lookup.own_or_ignored(torch.tensor([0, 4, -100, 5]), span, -100)
    assert passed.tolist() == [-1, 1, -1, 2]
    for wrong in (9, -1):
        with pytest.raises(RuntimeError, match="a number to look up"):
            sharded_lookup.own_or_first(torch.tensor([0, wrong]), span)


@pytest.mark.slow
@pytest.mark.gloo
def test_real_processes_split_the_classes_and_the_table() -> None:
    case = make_case(Classifier(ignore_index=7), BATCH)

    def splits(plan: Plan) -> set[str]:
        return {
            case.graph.by_name[s.node].op
            for s in plan.program.instructions if isinstance(s, Compute) and {L, P} & set(s.outs)
        } & {"hap.cross_entropy.default", "aten.embedding.default"}  # fmt: skip

    plan = next(
        p for p in (random_plan(case, 3, seed) for seed in range(30)) if len(splits(p)) == 2
    )
    assert any(c.kind == "all_reduce_lse" for c in plan.program.collectives)
    found = verdict(case, plan, run=on_gloo)
    assert found.ok, found.first_bad
