"""Derive rules of operators from their tags and schemas, without running them. (torch)

An operator tagged ``pointwise`` is elementwise with broadcasting, so every dim can be split on all
of its tensors together. The schema of an operator tagged ``reduction`` names the reduced dims, and
the others can be split. A view relates dims by their strides. An operator of torch that reads no tensor,
and is not tagged as random, is run whole. Torch guarantees the tags; the shapes of a call are checked
against them.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from hap.ir.graph import Dtype, Ref
from hap.rule_discovery import resolved
from hap.synthesizer.rules import Call
from hap.synthesizer.rules.textual_rules import written_rows


def derived(call: Call) -> tuple[str, ...] | None:
    """Return the rule of a call as lines, or ``None`` if tags and schema do not determine it.

    Raises:
        UnsupportedOpError: the operator does not exist, or no row can describe it.
    """
    op = resolved(call.node.op, call.node.source)
    if not call.ins and op.namespace == "aten" and _deterministic(op):
        return ("origin derived", "# made whole: it reads no tensor")
    if torch.Tag.pointwise in op.tags and _elementwise(call):
        backward = call.node.op.split(".")[1].endswith("_backward")
        first = op._schema.arguments[0].name
        # A backward operator is linear in its incoming gradient.
        linear = " linear 0" if backward and first in ("grad_output", "grad") else ""
        return ("origin derived", f"pointwise{linear}")
    if torch.Tag.reduction in op.tags:
        return _reduction(call, op)
    (*returns,) = op._schema.returns
    if len(returns) == 1 and returns[0].alias_info and str(returns[0].type) == "Tensor":
        return _view(call, op)
    return None


def _deterministic(op: Any) -> bool:
    """Return whether torch says of an operator of its own that it draws no random numbers."""
    return torch.Tag.nondeterministic_seeded not in op.tags


def _elementwise(call: Call) -> bool:
    """Return whether the inputs broadcast to the shape of all results."""
    if not call.ins:
        return False
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in call.ins))
    except RuntimeError:
        return False
    return all(o is None or o.shape == tuple(shape) for o in call.outs)


def _reduction(call: Call, op: Any) -> tuple[str, ...] | None:
    names = [a.name for a in op._schema.arguments]
    dims, keepdim = (str(names.index(n)) if n in names else "-" for n in ("dim", "keepdim"))
    lines = ("origin derived", f"reduces {dims} {keepdim}")
    if len(call.ins) != 1:
        return None
    try:
        written_rows(call, lines)
    except AssertionError:  # the results' dims are not those of a reduction
        return None
    return lines


_APART = 1 << 11
"""Ratio of the strides of neighbouring dims, so that no sum of a few of them equals another."""


def _view(call: Call, op: Any) -> tuple[str, ...] | None:
    """Return a view's rows: dims match by equal strides, with sizes that follow each other."""
    if len(call.ins) != 1 or len(call.ins[0].shape) > 5 or call.outs[0] is None:
        return None
    x, out = call.ins[0], call.outs[0]
    rank = len(x.shape)
    letters, result = ["_"] * rank, ["_"] * len(out.shape)
    try:
        first = _run(call, op, x.shape)
        for dim, size in enumerate(x.shape):
            longer = _run(call, op, [s + (d == dim) for d, s in enumerate(x.shape)])
            at = [k for k, by in enumerate(first.stride()) if by == _stride(rank, dim)]
            if size < 2 or len(at) != 1 or first.storage_offset() != longer.storage_offset():
                continue
            sizes = [s + (k == at[0]) for k, s in enumerate(first.shape)]
            if first.shape[at[0]] == size and list(longer.shape) == sizes:
                letters[dim] = result[at[0]] = string.ascii_lowercase[dim]
    except (RuntimeError, IndexError, ValueError):
        return None
    if tuple(first.shape) != out.shape or set(letters) <= {"_"}:
        return None  # runs may find more
    return ("origin derived", f"{''.join(letters)} -> {''.join(result)}")


def _stride(rank: int, dim: int) -> int:
    return int(_APART ** (rank - 1 - dim)) * 3


def _run(call: Call, op: Any, shape: Sequence[int]) -> torch.Tensor:
    """Run the view on a tensor without data whose strides differ widely."""
    rank = len(shape)
    strides = [_stride(rank, d) for d in range(rank)]
    x = torch.empty_strided(tuple(shape), strides, device="meta", dtype=torch.uint8)

    def arg(value: Any) -> Any:
        match value:
            case Ref():
                return x
            case Dtype():
                raise ValueError("a view of another dtype")
            case tuple():
                return [arg(v) for v in value]
        return value

    found = op(*map(arg, call.node.args), **{k: arg(v) for k, v in call.node.kwargs})
    assert isinstance(found, torch.Tensor)
    return found
