"""Products of matrices with odd rows have the values of torch's, in rows of whole 16 bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.cross_entropy import cross_entropy_backward, cross_entropy_terms
from hap.runtime import aligned_rows
from hap.runtime.aligned_rows import FEWEST, STEP
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule, emit
from hap.runtime.native_calls import ODD_ROWS
from tests.random_plans import benchmark_case
from tests.test_compiled import one_rank

CLASSES = 5003
HALVES = (torch.bfloat16, torch.float16)


def x(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def step(matrix: Tensor) -> int:
    return matrix.stride(0) * matrix.element_size() % STEP


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
def test_products_have_the_values_of_torch(dtype: torch.dtype, turned: bool) -> None:
    a, b = x(257, 301, dtype=dtype), x(301, 403, dtype=dtype, seed=1)
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    bias = x(403, dtype=dtype, seed=2)
    for found, want in (
        (aligned_rows.mm(a, b), torch.mm(a, b)),
        (aligned_rows.addmm(bias, a, b), torch.addmm(bias, a, b)),
        (aligned_rows.linear(a, b.t(), bias), torch.addmm(bias, a, b)),
        (aligned_rows.matmul(a, b), torch.mm(a, b)),
        (aligned_rows.tensordot(a.t(), b, [0], [0]), torch.mm(a, b)),
    ):
        assert step(found) == 0
        torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-1)


def test_products_with_leading_dims_have_the_values_of_torch() -> None:
    a, weight = x(3, 86, 301, dtype=torch.bfloat16), x(403, 301, dtype=torch.bfloat16, seed=1)
    made = aligned_rows.linear(a, weight, weight[:, 0])
    torch.testing.assert_close(made, F.linear(a, weight, weight[:, 0]), rtol=1e-2, atol=1e-1)
    assert made.stride(1) * 2 % STEP == 0
    assert torch.equal(aligned_rows.matmul(a, weight.t()), aligned_rows.linear(a, weight))
    over = torch.tensordot(made, a, ([0, 1], [0, 1]))
    found = aligned_rows.tensordot(made, a, [0, 1], [0, 1])
    torch.testing.assert_close(found, over, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("rows", [1, 2, 257])
def test_the_gradient_of_logits_is_a_factor(rows: int) -> None:
    """The gap after its last row is in its storage, too; one row has none."""
    logits, target = x(rows, 301, dtype=torch.bfloat16), torch.arange(rows) % 301
    stored, terms = aligned_rows.to(logits), torch.ones(rows)
    gradient = cross_entropy_backward(terms, -terms, stored, target, terms, -100)
    states = x(rows, 304, dtype=torch.bfloat16, seed=1)
    want = torch.mm(states.t(), gradient.contiguous())
    for found in (
        aligned_rows.mm(states.t(), gradient),
        aligned_rows.tensordot(states, gradient, [0], [0]),
    ):
        torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-1)


def test_a_shifted_slice_is_a_factor() -> None:
    """Its last row ends where its storage does, without a gap."""
    states = x(257, 304, dtype=torch.bfloat16)
    a, b = x(257, 64, dtype=torch.bfloat16, seed=1), states[:, 1:]
    found = aligned_rows.tensordot(a, b, [0], [0])
    torch.testing.assert_close(found, torch.mm(a.t(), b.contiguous()), rtol=1e-2, atol=1e-1)


def test_only_odd_and_large_matrices_are_copied() -> None:
    even, odd = x(257, 304, dtype=torch.bfloat16), x(257, 301, dtype=torch.bfloat16)
    assert aligned_rows.aligned(even) is even
    assert aligned_rows.aligned(even.t()).data_ptr() == even.data_ptr()
    for matrix in (odd, odd.t()):
        found = aligned_rows.aligned(matrix)
        assert torch.equal(found, matrix)
        assert STEP == 16 and max(found.stride()) == 304
    small = odd[: FEWEST // 301 - 1]
    assert aligned_rows.aligned(small) is small
    assert torch.equal(aligned_rows.to(odd), odd) and step(aligned_rows.to(odd)) == 0
    wide = aligned_rows.to(odd, dtype=torch.float32)
    assert torch.equal(wide, odd.float()) and step(wide) == 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_gradient_of_aligned_logits_is_aligned(dtype: torch.dtype) -> None:
    logits, target = x(64, 301, dtype=dtype), torch.arange(64) * 3
    stored = aligned_rows.to(logits, dtype=dtype)
    target[5] = -100
    results = []
    for given in (logits, stored):
        lse, picked = cross_entropy_terms(given, target, -100)
        one = torch.ones_like(lse)
        results.append((lse, picked, cross_entropy_backward(one, -one, given, target, lse, -100)))
    for want, found in zip(*results, strict=True):
        assert torch.equal(found, want)
    assert step(results[1][2]) == 0


class Words(nn.Module):
    """A classifier of many classes, whose number is odd, after a layer of even sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 64)
        self.layer = nn.Linear(64, FEWEST // 128)
        self.head = nn.Linear(FEWEST // 128, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(self.table(words))), words.roll(1))


def words() -> tuple[hap.Plan, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, batch = Words(), torch.arange(128) * 7
    return hap.plan(model, (batch,), "local:1", autocast="bfloat16"), model, batch


def marked(plan: hap.Plan, device: str) -> list[str]:
    """Return the operators of the emitted code whose rows are marked."""
    code = emit(plan, 0, torch.device(device))
    both = (*code.forward.nodes, *code.backward.nodes)
    return [str(node.target) for node in both if ODD_ROWS in node.meta]


@pytest.mark.slow
def test_only_large_products_in_half_precision_on_cuda_are_marked() -> None:
    plan, _, _ = words()
    found = marked(plan, "cuda")
    assert found.count("aten.addmm.default") == 1
    assert found.count("aten.mm.default") == 2
    assert not marked(plan, "cpu")
    assert not marked(one_rank(benchmark_case("mlp", "tiny")), "cuda")  # in float32


@pytest.mark.gpu
def test_a_step_with_an_odd_number_of_classes_on_cuda() -> None:
    plan, model, batch = words()
    device = torch.device("cuda")
    module = HapModule(plan, copy.deepcopy(model), LocalComm(), device)
    model, batch = model.to(device), batch.to(device)
    with torch.autocast("cuda", torch.bfloat16):
        want = model(batch)
    found = module(batch)
    found.backward(), want.backward()
    torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)
    for (name, mine), plain in zip(module.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and plain.grad is not None
        error = (mine.grad - plain.grad).norm() / plain.grad.norm()
        assert error < 0.02, name
