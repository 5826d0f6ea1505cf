"""The operators that are given to a compiler compute what the logical operators compute."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hap.capture import cross_entropy
from hap.rule_check import Sample
from hap.runtime import fused_operators
from hap.runtime.emit import resolve
from hap.runtime.fused_operators import FUSED
from tests.rule_samples import SAMPLES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 6), (1, 1)])
def test_the_fused_cross_entropy_is_the_chunked_one(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype) * 30
    target = torch.randint(shape[-1], shape[:-1], generator=generator)
    target[0] = -100
    x[-1, ..., 0] = -math.inf
    x[-1, ..., -1] = 1.0
    found = fused_operators.cross_entropy_terms(x, target, -100)
    expected = cross_entropy.cross_entropy_terms(x, target, -100)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    grads = [torch.randn(target.shape, generator=generator, dtype=expected[0].dtype) for _ in "ab"]
    given = (*grads, x, target, expected[0], -100)
    torch.testing.assert_close(
        fused_operators.cross_entropy_backward(*given), cross_entropy.cross_entropy_backward(*given)
    )


def test_a_row_without_a_possible_class_has_no_sum() -> None:
    x = torch.full((2, 3), -math.inf)
    lse, _ = fused_operators.cross_entropy_terms(x, torch.tensor([0, 1]), -100)
    assert lse.tolist() == [-math.inf, -math.inf]


LOGICAL = [sample for sample in SAMPLES if resolve(sample.op) in FUSED]


@pytest.mark.parametrize("sample", LOGICAL, ids=str)
def test_a_fused_operator_is_the_logical_one(sample: Sample) -> None:
    found = FUSED[resolve(sample.op)](*sample.args)
    results = [found] if isinstance(found, torch.Tensor) else found
    for one, other in zip(results, sample.run(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sample", LOGICAL, ids=str)
def test_a_fused_operator_writes_into_no_tensor(sample: Sample) -> None:
    function, tensors = FUSED[resolve(sample.op)], list(sample.tensors.values())

    def run(*given: torch.Tensor) -> object:
        values = dict(zip(map(id, tensors), given, strict=True))
        return function(*(values.get(id(argument), argument) for argument in sample.args))

    traced = make_fx(run)(*tensors).graph
    calls = [node.target for node in traced.nodes if node.op == "call_function"]
    assert not any(op._schema.is_mutable for op in calls if hasattr(op, "_schema"))


def test_every_fused_operator_has_a_sample() -> None:
    assert {resolve(sample.op) for sample in LOGICAL} == set(FUSED)


def test_every_argument_is_taken() -> None:
    for operator, function in FUSED.items():
        names = [argument.name for argument in operator._schema.arguments]
        assert len(names) == function.__code__.co_argcount
