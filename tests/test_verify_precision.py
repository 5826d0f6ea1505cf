"""Verification with the ranks' random numbers, in half precision, and of tiny gradients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hap.ir.plan import Plan, Recipe
from hap.runtime.context import Context
from hap.runtime.verify import FLOOR, ROOM, VANISHES, Verdict, tolerance_of
from tests.random_plans import Case, benchmark_case, make_case, random_plan, verdict
from tests.test_autocast import half_case
from tests.test_two_axes import random_mesh_plan
from tests.test_verify import dropped_all_reduce, dropped_mask

DRAWN = "the random numbers are those that the ranks drew"


def wrong(found: Verdict) -> set[str]:
    return {row.tensor for row in found.rows if not row.ok}


# --- random numbers ---


@pytest.mark.parametrize("file", ["bert", "vit", "mlp"])
def test_dropout_is_verified_with_the_masks_of_the_ranks(file: str) -> None:
    case = benchmark_case(file, "tiny_dropout")
    found = verdict(case, random_plan(case, 3, 9))
    assert found.ok, [row for row in found.rows if not row.ok][:3]
    assert found.random == DRAWN
    nodes = [n.name for n in case.graph.nodes if n.op == "aten.native_dropout.default"]
    assert [row.tensor for row in found.rows if row.what == "drawn"] == nodes != []


def test_models_without_random_operators_say_nothing_of_them() -> None:
    case = benchmark_case("mlp", "tiny")
    found = verdict(case, random_plan(case, 2, 1))
    assert found.random == "" and not any(row.what == "drawn" for row in found.rows)


def unscaled(self: Context, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * mask


def unmasked(self: Context, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * scale


@pytest.mark.parametrize("broken", [unscaled, unmasked])
def test_a_wrong_backward_of_dropout_is_found(
    broken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "dropout_backward", broken)
    case = benchmark_case("mlp", "tiny_dropout")
    assert not verdict(case, random_plan(case, 2, 1)).ok


def test_replicas_that_draw_unlike_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Context._generator

    def own(self: Context, device: torch.device, site: str, place: int | str) -> Any:
        return original(self, device, site, f"{place}/{self.comm.rank}")

    case = benchmark_case("mlp", "tiny_dropout")
    plan = random_plan(case, 2, 1)
    replicated = {
        s.node for s in plan.program.instructions
        if getattr(s, "ins", None) and s.ins[0].kind == "R"
        and case.graph.by_name[s.node].op == "aten.native_dropout.default"
    }  # fmt: skip
    assert replicated, "choose a plan in which a mask is replicated"
    monkeypatch.setattr(Context, "_generator", own)
    assert replicated <= wrong(verdict(case, plan))


class Noisy(nn.Module):
    """Draws by dropout, ``rand``, ``randn`` and ``bernoulli_``, some of it in a checkpoint."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(12, 12) for _ in range(3))
        self.also = also

    def block(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.second(x).tanh(), 0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.first(x), 0.25) + torch.rand_like(x)
        h = h * torch.empty_like(h).bernoulli_(0.7) + torch.randn(12)
        h = checkpoint(self.block, h, use_reentrant=False) + checkpoint(
            self.block, h.sin(), use_reentrant=False
        )
        if self.also == "unused":
            torch.rand(3)
        return self.last(h).square().mean()


@cache
def noisy_case() -> Case:
    torch.manual_seed(0)
    return make_case(Noisy(), torch.randn(8, 12))


@pytest.mark.parametrize("world", [2, 3])
def test_draws_of_all_kinds_are_replayed_also_in_checkpoints(world: int) -> None:
    case = noisy_case()
    found = verdict(case, random_plan(case, world, 4))
    assert found.ok, [row for row in found.rows if not row.ok][:3]
    assert found.random == DRAWN
    assert sum(row.what == "drawn" for row in found.rows) == 6


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_joined_over_two_mesh_axes(seed: int) -> None:
    case = noisy_case()
    found = verdict(case, random_mesh_plan(case, 2, 2, seed))
    assert found.ok, [row for row in found.rows if not row.ok][:3]
    assert found.random == DRAWN


@pytest.mark.slow
def test_a_module_that_draws_otherwise_is_compared_without_random_numbers_and_says_so() -> None:
    torch.manual_seed(0)
    case = make_case(Noisy("unused"), torch.randn(8, 12))
    found = verdict(case, random_plan(case, 2, 4))
    assert found.ok
    assert found.random.startswith("dropout is off") and "draws rand numbers" in found.random


# --- half precision ---


def half_plan(dtype: str, inside: bool, world: int, seed: int) -> tuple[Any, Plan]:
    """Return a case in autocast, of the plan or inside of the forward, and a plan of it."""
    case = half_case("cpu" if inside else "", dtype)
    plan = random_plan(case, world, seed)
    return case, replace(plan, recipe=Recipe(autocast="" if inside else dtype))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_plans_in_half_precision_pass(dtype: str, inside: bool) -> None:
    for world, seed in ((2, 0), (5, 2), (3, 7)):
        case, plan = half_plan(dtype, inside, world, seed)
        found = verdict(case, plan, dtype="float32")
        assert found.ok, [row for row in found.rows if not row.ok]
        assert found.tolerance == 2 * torch.finfo(getattr(torch, dtype)).eps
        assert max(row.error for row in found.rows) > 1e-4, "this did not run in half precision"


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wrong_plans_in_half_precision_fail(dtype: str, inside: bool) -> None:
    tried = set()
    for world, seed in ((2, 0), (4, 4), (5, 2), (3, 7)):
        case, plan = half_plan(dtype, inside, world, seed)
        for corrupt in (partial(dropped_all_reduce, backward=False), dropped_mask):
            try:
                broken, tensor = corrupt(plan)
            except AssertionError:
                continue  # nothing of the kind in this plan
            tried.add(tensor)
            assert not verdict(case, broken, dtype="float32").ok, tensor
    assert len(tried) >= 3


@pytest.mark.slow
def test_the_tolerance_is_that_of_the_lowest_precision_of_an_operator() -> None:
    case, plan = half_plan("float16", False, 2, 0)
    assert tolerance_of(plan, "float64") == 1e-9
    assert tolerance_of(plan, "float32") == 2 * torch.finfo(torch.float16).eps
    case = benchmark_case("mlp", "tiny")
    assert tolerance_of(random_plan(case, 2, 0), "float32") == 1e-4
    assert ROOM <= 4


# --- tiny gradients ---


class Tiny(nn.Module):
    """Two branches; the gradients of the second are ``factor`` times smaller."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.large, self.small, self.factor = nn.Linear(12, 16), nn.Linear(12, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x).square().mean() + self.factor * self.small(x).square().mean()


def scaled_gradient(name: str, factor: float) -> Callable[..., list[Any]]:
    """Return a way to run the ranks in which one gradient of all ranks is multiplied."""
    from hap.runtime.emulate import run_ranks

    def run(world: int, target: Callable[[Any], Any]) -> Sequence[Any]:
        ranks = run_ranks(world, target)
        for seen in ranks:
            seen["gradient"][name] = seen["gradient"][name] * factor
        return ranks

    return run  # type: ignore[return-value]


@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e-12])
def test_a_wrong_gradient_is_found_however_small_it_is_beside_the_others(factor: float) -> None:
    torch.manual_seed(0)
    case = make_case(Tiny(factor), torch.randn(8, 12))
    plan = random_plan(case, 3, 1)
    assert verdict(case, plan).ok
    for name in ("small.weight", "small.bias"):
        found = verdict(case, plan, run=scaled_gradient(name, 3.0))
        assert name in wrong(found), (name, [r for r in found.rows if r.what == "gradient"])
        slightly = verdict(case, plan, run=scaled_gradient(name, 1 + max(1e-7, 1e-12 / factor)))
        assert name in wrong(slightly)


class Packed(nn.Module):
    """One bias of queries, keys and values; the gradient of the keys' part is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 2, 3, 4).permute(3, 0, 2, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


@pytest.mark.slow
def test_rounding_in_a_part_of_a_gradient_is_no_difference() -> None:
    case = make_case(Packed().double(), torch.zeros(4, 6, 8, dtype=torch.float64))
    for seed in range(3):
        torch.manual_seed(seed)
        batch = 3 * torch.randn(4, 6, 8, dtype=torch.float64)
        case = replace(case, model=Packed().double(), batch=batch)
        found = verdict(case, random_plan(case, 3, 1))
        assert found.ok, (seed, [r for r in found.rows if not r.ok])


def test_the_floor_of_a_comparison_is_the_rounding_of_the_largest_gradient() -> None:
    """A gradient below it is zero in exact arithmetic, for all that float64 can tell."""
    floor = VANISHES * torch.finfo(torch.float64).eps
    assert 1e-13 < floor < 1.2e-13 < FLOOR * 1e-9


FRESH = """
import torch
from hap.runtime.one_device import reference_mode
with reference_mode(widen=True):
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
from torch._dynamo.utils import common_constant_types
assert torch.finfo in common_constant_types
"""


@pytest.mark.slow
def test_the_tracer_is_not_imported_among_replaced_functions() -> None:
    """It would keep the ``finfo`` of the reference, and refuse models that ask for the real one."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
