"""Faster calls of the same operators, for code that runs eagerly.

``torch.ops.aten.addmm.default(...)`` checks its arguments against a schema at each call, which takes
twice as long as ``torch.addmm(...)``. Where kernels are short, as in half precision on a fast GPU, the time
of the host is the time of the step. Logical operators are called as functions, without the layers
of a custom operator. A view that is taken
twice is taken once. Products of matrices with odd rows run by :mod:`hap.runtime.aligned_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from hap.capture import batch_norm, fourier, group_norm
from hap.capture.attention import attention, attention_backward
from hap.capture.cross_entropy import cross_entropy_backward, cross_entropy_terms
from hap.capture.experts import expert_mm, expert_mm_backward
from hap.runtime import aligned_rows
from hap.runtime.aligned_rows import with_dims_of

aten = torch.ops.aten

_SAME_NAME: Final = (
    *("abs.default", "add.Tensor", "addmm.default", "argmax.default", "bitwise_and.Tensor"),
    *("bitwise_not.default", "bmm.default", "cat.default", "clone.default", "convolution.default"),
    *(
        "cos.default",
        "cumsum.default",
        "div.Scalar",
        "div.Tensor",
        "embedding.default",
        "eq.Scalar",
    ),
    *("eq.Tensor", "exp.default", "gather.default", "ge.Scalar", "gt.Scalar", "le.Tensor"),
    *("log.default", "lt.Scalar", "masked_fill.Scalar", "maximum.default", "minimum.default"),
    *("mm.default", "mul.Scalar", "mul.Tensor", "native_layer_norm.default", "ne.Scalar"),
    *("neg.default", "permute.default", "pow.Tensor_Scalar", "relu.default", "reshape.default"),
    *("rsqrt.default", "select.int", "sigmoid.default", "sin.default", "sqrt.default"),
    *("sub.Tensor", "sum.default", "sum.dim_IntList", "t.default", "tanh.default"),
    *("transpose.int", "unsqueeze.default", "where.self"),
)
"""Operators that are functions of ``torch`` with the same name and arguments."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.t() + bias`` as one product of matrices, even if ``x`` is not contiguous."""
    if x.is_contiguous():
        return F.linear(x, weight, bias)
    return with_dims_of(x, F.linear(x.flatten(0, -2), weight, bias))


def matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """Return ``x @ matrix``, likewise."""
    if x.is_contiguous():
        return torch.matmul(x, matrix)
    return with_dims_of(x, x.flatten(0, -2) @ matrix)


def tensordot(x: Tensor, y: Tensor, dims: list[int], others: list[int]) -> Tensor:
    """Return the product summed over pairs of dims: one of matrices if these are all but the last ones."""
    if dims == others == [*range(x.dim() - 1)] and x.dim() == y.dim():
        return x.flatten(0, -2).t() @ y.flatten(0, -2)
    made: Tensor = torch.tensordot(x, y, (dims, others))
    return made


NATIVE: Final[Mapping[Any, Callable[..., Any]]] = {
    **{
        getattr(getattr(aten, packet), overload): getattr(torch, packet)
        for packet, overload in (name.split(".") for name in _SAME_NAME)
    },
    aten.gelu.default: F.gelu,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.tensordot.default: tensordot,
    torch.ops.hap.sdpa.default: attention,
    torch.ops.hap.sdpa_backward.default: attention_backward,
    torch.ops.hap.expert_mm.default: expert_mm,
    torch.ops.hap.expert_mm_backward.default: expert_mm_backward,
    fourier.C2C: fourier.c2c,
    fourier.R2C: fourier.r2c,
    fourier.C2R: fourier.c2r,
    torch.ops.hap.channel_mean.default: batch_norm.channel_mean,
    torch.ops.hap.channel_variance.default: batch_norm.channel_variance,
    torch.ops.hap.normalize.default: batch_norm.normalize,
    torch.ops.hap.normalize_sums.default: batch_norm.normalize_sums,
    torch.ops.hap.normalize_backward.default: batch_norm.normalize_backward,
    torch.ops.hap.group_norm.default: group_norm.group_norm,
    torch.ops.hap.group_norm_backward.default: group_norm.group_norm_backward,
    torch.ops.hap.cross_entropy.default: cross_entropy_terms,
    torch.ops.hap.cross_entropy_backward.default: cross_entropy_backward,
}
"""Operator -> a function that takes the same arguments and returns the same tensors, sooner."""

VIEWS: Final = frozenset({
    aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.select.int,
})  # fmt: skip
"""Operators whose results depend on their arguments alone, and mostly share their memory."""


NEW: Final = frozenset({aten.new_zeros.default, aten.zeros.default, aten.full.default})

WRITERS: Final[Mapping[Any, Any]] = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
}
"""Operator that copies its first input and writes into the copy -> the one that writes into the input."""


ODD_ROWS: Final = "odd_rows"
"""The mark, in a node's ``meta``, of an operator of :data:`ALIGNED` whose rows are not aligned."""

ALIGNED: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.mm.default: aligned_rows.mm,
    aten.addmm.default: aligned_rows.addmm,
    aten.linear.default: aligned_rows.linear,
    aten.matmul.default: aligned_rows.matmul,
    aten.tensordot.default: aligned_rows.tensordot,
    aten._to_copy.default: aligned_rows.to,
}
"""Operator -> a function whose result has aligned rows."""

ALIGNED_OPS: Final = frozenset(map(str, ALIGNED))


def with_native_calls(code: fx.Graph) -> None:
    """Replace calls in emitted code by faster ones."""
    _share_views(code)
    _write_into_new(code)
    for node in list(code.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.alias.default and not _is_result(node):
            node.replace_all_uses_with(node.args[0])
            code.erase_node(node)
        elif ODD_ROWS in node.meta and not _has_options(node):
            node.target = ALIGNED[node.target]
        elif node.target in NATIVE:
            node.target = NATIVE[node.target]
        elif node.target is aten.expand.default and not node.kwargs:
            node.op, node.target = "call_method", "expand"
        elif node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}:
            node.op, node.target = "call_method", "to"
            node.kwargs = {**node.kwargs, "copy": True}


def _share_views(code: fx.Graph) -> None:
    """Let equal views of one tensor be one view."""
    known: dict[str, fx.Node] = {}
    for node in list(code.nodes):
        if node.op != "call_function" or node.target not in VIEWS or _is_result(node):
            continue
        first = known.setdefault(repr((str(node.target), node.args, node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            code.erase_node(node)


def _write_into_new(code: fx.Graph) -> None:
    """Write into a tensor that is made for it, not into a copy."""
    for node in code.nodes:
        made = node.args[0] if node.op == "call_function" and node.target in WRITERS else None
        if isinstance(made, fx.Node) and made.target in NEW and list(made.users) == [node]:
            node.target = WRITERS[node.target]


def _has_options(node: fx.Node) -> bool:
    """Return whether a call has other keywords than :data:`ALIGNED` takes, such as a factor."""
    return bool(node.kwargs.keys() - {"dtype"})


def _is_result(node: fx.Node) -> bool:
    """Results stay apart: what runs the code may add to one in place."""
    return any(user.op == "output" for user in node.users)
