"""The faster calls give what the operators give: values, dtypes, strides and shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from hap.runtime.native_calls import NATIVE, VIEWS, with_native_calls

aten, hap = torch.ops.aten, torch.ops.hap
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
FLOATS = DTYPES[:3]


def x(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor whose dims are in another order in memory."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 9, shape[::-1], generator=generator)
    made = (drawn / 2).to(dtype) if dtype.is_floating_point else drawn.to(dtype)
    return made.permute(list(reversed(range(len(shape)))))


def calls(operator: Any, dtype: torch.dtype) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return arguments of an operator: one tensor, two, or those that the schema asks for."""
    a, b = x(3, 4, dtype=dtype), x(3, 4, dtype=dtype, seed=1)
    half = {"dtype": torch.float64}
    own: dict[Any, list[tuple[Any, ...] | tuple[tuple[Any, ...], dict[str, Any]]]] = {
        aten.add.Tensor: [(a, b), (a, b[0]), ((a, b), {"alpha": 2}), (a, 2), (a, x(dtype=dtype))],
        aten.sub.Tensor: [(a, b), ((a, b), {"alpha": 2}), (a, x(dtype=torch.float64))],
        aten.mul.Tensor: [(a, b), (a, b[:, :1]), (a, 3), (a, x(dtype=torch.float32))],
        aten.mul.Scalar: [(a, 3), (a, 0.5)], aten.div.Scalar: [(a, 3), (a, 0.5)],
        aten.div.Tensor: [(a, b), (a, 2), (a, x(dtype=dtype))],
        aten.addmm.default: [(b[0, :3], a, x(4, 3, dtype=dtype)),
                             ((b[:, :3], a, x(4, 3, dtype=dtype)), {"beta": 2, "alpha": 3})],
        aten.mm.default: [(a, x(4, 5, dtype=dtype)), (a, b.t())],
        aten.linear.default: [(x(2, 3, 4, dtype=dtype), a, b[0, :3]), (a, b),
                              (x(2, 3, 4, dtype=dtype).contiguous(), a, b[0, :3])],
        aten.matmul.default: [(x(2, 3, 4, dtype=dtype), a.t()), (x(2, 5, 3, dtype=dtype).contiguous(), a)],
        aten.tensordot.default: [(x(2, 3, 4, dtype=dtype), x(2, 3, 5, dtype=dtype), [0, 1], [0, 1]),
                                 (x(2, 3, 4, dtype=dtype), x(4, 2, dtype=dtype), [-1, 0], [0, 1])],
        aten.bmm.default: [(x(2, 3, 4, dtype=dtype), x(2, 4, 5, dtype=dtype))],
        aten.argmax.default: [(a,), (a, 1), (a, 1, True)],
        aten.cat.default: [([a, b],), ([a, b], 1)],
        aten.clone.default: [(a,), ((a,), {"memory_format": torch.contiguous_format})],
        aten.convolution.default: [(x(2, 4, 6, 6, dtype=dtype), x(6, 2, 3, 3, dtype=dtype), None,
                                    [1, 1], [1, 1], [1, 1], False, [0, 0], 2)],
        aten.cumsum.default: [(a, 1), ((a, 0), half)],
        aten.embedding.default: [(a, torch.tensor([[0, 2], [1, 1]])), (a, torch.tensor([0, 2]), 2)],
        aten.gather.default: [(a, 1, torch.tensor([[0, 2], [1, 1]]))],
        aten.masked_fill.Scalar: [(a, b > 2, 0), (a, b > 2, -1)],
        aten.native_layer_norm.default: [(a, [4], b[0], b[1], 1e-5), (a, [4], None, None, 1e-5)],
        aten.permute.default: [(a, [1, 0])], aten.transpose.int: [(a, 0, 1), (a, -1, 0)],
        aten.pow.Tensor_Scalar: [(a, 2), (a, 3.0), (a, 0.5)],
        aten.reshape.default: [(a, [2, 6]), (a, [-1]), (a.t(), [2, 6])],
        aten.select.int: [(a, 1, 2), (a, 0, -1)], aten.unsqueeze.default: [(a, 0), (a, -1)],
        aten.sum.default: [(a,), ((a,), half)],
        aten.sum.dim_IntList: [(a, [0]), (a, [0], True), ((a, [1]), half), (a, [])],
        aten.where.self: [(a > 2, a, b), (a > 2, a, x(dtype=dtype))],
        aten.gelu.default: [(a,), ((a,), {"approximate": "tanh"})],
        aten.t.default: [(a,), (a[0],)],
    }  # fmt: skip
    found = own.get(operator)
    if found is None:
        count = sum(str(argument.type) == "Tensor" for argument in operator._schema.arguments)
        found = [(a, b)[:count] + ((2,) if operator._overloadname == "Scalar" else ())]
    return [c if len(c) == 2 and isinstance(c[1], dict) else (c, {}) for c in found]  # type: ignore[misc]


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


@pytest.mark.parametrize("operator", [o for o in NATIVE if o.namespace == "aten"], ids=str)
def test_a_native_call_is_the_operator(operator: Any) -> None:
    tried = set()
    for dtype in DTYPES:
        for args, options in calls(operator, dtype):
            try:
                expected = operator(*args, **options)
            except (RuntimeError, NotImplementedError):  # no kernel for this dtype
                continue
            tried.add(dtype)
            found = NATIVE[operator](*args, **options)
            for one, other in zip(flat(found), flat(expected), strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert one.stride() == other.stride()
                assert torch.equal(one, other)
                if isinstance(args[0], Tensor):
                    shared = other.data_ptr() == args[0].data_ptr()
                    assert (one.data_ptr() == args[0].data_ptr()) == shared
    assert tried >= ({torch.int64} if "bitwise" in str(operator) else set(FLOATS[:2]))


def traced(code: str, arguments: int) -> fx.GraphModule:
    names = ", ".join("xyz"[:arguments])
    space: dict[str, Any] = {"aten": aten, "torch": torch}
    exec(f"def f({names}):\n    return {code}", space)
    return fx.symbolic_trace(space["f"])


def test_equal_views_become_one() -> None:
    module = traced(
        "aten.mm.default(aten.reshape.default(x, [2, 6]), y) + "
        "aten.mm.default(aten.reshape.default(x, [2, 6]), aten.alias.default(y)) + "
        "aten.mm.default(aten.reshape.default(x, [2, -1]), y)", 2,
    )  # fmt: skip
    a, b = x(3, 4, dtype=torch.float64), x(6, 5, dtype=torch.float64)
    expected = module(a, b)
    with_native_calls(module.graph)
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(a, b), expected)
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    assert targets.count(torch.reshape) == 2
    assert aten.alias.default not in targets


def test_casts_copy_and_expansions_share() -> None:
    module = traced(
        "[aten._to_copy.default(x, dtype=torch.float32), aten._to_copy.default(x, dtype=torch.bfloat16),"
        " aten.expand.default(y, [3, 4])]", 2,
    )  # fmt: skip
    with_native_calls(module.graph)
    module.recompile()
    a, b = x(3, 4, dtype=torch.float32), x(1, 4, dtype=torch.float32)
    same, half, wide = module(a, b)
    assert torch.equal(same, a)
    assert same.data_ptr() != a.data_ptr()
    assert same.stride() == aten._to_copy.default(a, dtype=torch.float32).stride()
    assert half.dtype == torch.bfloat16
    assert wide.data_ptr() == b.data_ptr()
    assert {n.op for n in module.graph.nodes} == {"placeholder", "call_method", "output"}


def test_no_view_draws_numbers_or_writes() -> None:
    for operator in VIEWS:
        assert not operator._schema.is_mutable
        assert torch.Tag.nondeterministic_seeded not in operator.tags


def test_a_new_tensor_is_written_in_place() -> None:
    fresh = traced("aten.index_put.default(aten.new_zeros.default(x, [3]), [y], x, True)", 2)
    shared = traced(
        "(lambda new: [aten.scatter_add.default(new, 0, y, x), new])"
        "(aten.new_zeros.default(x, [3]))", 2,
    )  # fmt: skip
    values, at = x(4, dtype=torch.float32), torch.tensor([0, 2, 2, 1])
    for module, writes in ((fresh, True), (shared, False)):
        expected = module(values, at)
        with_native_calls(module.graph)
        module.recompile()
        for one, other in zip(flat(module(values, at)), flat(expected), strict=True):
            assert torch.equal(one, other)
        targets = [str(node.target) for node in module.graph.nodes]
        assert any(name.endswith("_.default") for name in targets) == writes
