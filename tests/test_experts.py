"""Mixtures of experts: products by each row's expert, and the modules of transformers that call them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import hap
from benchmarks.coverage import entries
from hap.capture.experts import expert_mm, expert_mm_backward
from hap.ir.program import Compute
from hap.runtime.one_device import reference_mode
from tests.random_plans import make_case, random_plan, verdict
from tests.test_coverage import ONE_LAYER, configured

PRODUCTS = ("hap.expert_mm.default", "hap.expert_mm_backward.default")

TWO = """
nodes: [{name: box, gpus: 2, type: V100-16, host: 0 us}]
links:
  inside: {bandwidth: 25 GB/s, latency: 10 us}
"""


def given(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return rows, weights and numbers of experts: one expert has no row, two rows have no expert."""
    torch.manual_seed(0)
    x, weight = torch.randn(21, 16, dtype=dtype), torch.randn(5, 16, 24, dtype=dtype)
    expert = torch.randint(4, (21,))
    expert[3] = expert[20] = -1
    return x.to(device), weight.to(device), expert.to(device)


def by_row(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Return the products by the definition."""
    rows = [
        r @ weight[int(e)] if e >= 0 else r.new_zeros(24) for r, e in zip(x, expert, strict=True)
    ]
    return torch.stack(rows)


def test_products_and_gradients_are_those_of_the_definition() -> None:
    x, weight, expert = given()
    grad = torch.randn(21, 24, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    wanted = by_row(*leaves, expert)
    wanted.backward(grad)
    of_x, of_weight = (leaf.grad for leaf in leaves)
    torch.testing.assert_close(expert_mm(x, weight, expert, -1), wanted)
    torch.testing.assert_close(expert_mm(grad, weight.transpose(1, 2), expert, -1), of_x)
    torch.testing.assert_close(expert_mm_backward(x, grad, expert, 5, -1), of_weight)


@pytest.mark.gpu
def test_the_kernel_computes_what_the_loop_does() -> None:
    """The kernel leaves rows without an expert, and experts without a row, to its caller."""
    x, weight, expert = given(dtype=torch.bfloat16)
    grad = torch.randn(21, 24, dtype=torch.bfloat16)
    on_gpu = [t.cuda() for t in (x, weight, expert, grad)]
    found = expert_mm(*on_gpu[:3], -1), expert_mm_backward(on_gpu[0], on_gpu[3], on_gpu[2], 5, -1)
    wanted = expert_mm(x, weight, expert, -1), expert_mm_backward(x, grad, expert, 5, -1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0.02, atol=0.1)


def test_the_reference_multiplies_groups_in_float64() -> None:
    """torch has no such product: that in float32 is the nearest one."""
    x, weight, _ = given()
    ends = torch.tensor([5, 5, 9, 20, 21], dtype=torch.int32)
    for a, b in ((x, weight), (x.t(), torch.randn(21, 24, dtype=torch.float64))):
        wanted = torch.nn.functional.grouped_mm(a.float(), b.float(), offs=ends)
        with reference_mode(widen=True):
            found = torch.nn.functional.grouped_mm(a, b, offs=ends)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), wanted)


def sgd(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grouped_mm", "eager"])
def test_modules_of_experts_need_no_option(way: str) -> None:
    """gpt-oss has transposed weights with biases, and a gate of its own."""
    transformers = pytest.importorskip("transformers")
    one = ONE_LAYER | {"layer_types": ["sliding_attention"]}
    model, batch = configured(entries()["gpt-oss"], one).tiny()
    config = model.config
    config._experts_implementation = way
    torch.manual_seed(0)
    case = make_case(transformers.GptOssForCausalLM(config).double(), batch, optimizer=sgd)
    assert {n.op for n in case.graph.nodes}.issuperset(PRODUCTS)
    assert verdict(case, random_plan(case, 3, 5)).ok


@pytest.mark.slow
def test_large_experts_are_split() -> None:
    """The gradients of 4 experts are 200 times as large as the tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=256, intermediate_size=2048, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=61,
    )  # fmt: skip
    text = torch.randint(61, (8, 8))
    batch = {"input_ids": text, "labels": text}
    plan = hap.plan(transformers.MixtralForCausalLM(config), batch, TWO)
    found = [
        step.ins[1].sharded for step in plan.program.instructions
        if isinstance(step, Compute) and plan.graph.by_name[step.node].op == PRODUCTS[0]
    ]  # fmt: skip
    assert found == [True] * 4
    rows = {row.name: row.step_s for row in plan.prediction.alternatives if row.fits}
    assert rows["data parallel, proportional"] > 2 * plan.prediction.step_s
