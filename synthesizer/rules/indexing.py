"""Operators that look elements up by number.

If the dim that is looked up in is split, every rank finds what it has and nothing for the other
numbers: a term of the result. How an operator is told to find nothing is written in
:mod:`hap.runtime.localize`. The letter ``v`` is the looked-up dim's.
"""

from __future__ import annotations

from hap.placement import L
from hap.synthesizer.rules.base import Call, Row, equation, letters, rule


@rule("aten.embedding.default")
def _embedding(call: Call) -> list[Row]:
    _, index = call.ins
    picked = letters(index, "i")
    return equation(call, [["v", "h"], picked], [[*picked, "h"]], linear=[{0}])


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(call: Call) -> list[Row]:
    # A looked-up row collects the gradients of all its uses: a sum over the indices, unless it
    # is divided by the number of uses, which only all the indices know.
    _, index = call.ins
    # The kernel that counts them writes its counts unchecked: no number can be passed over.
    counted = bool(call.arg(4))
    picked = [None] * len(index.shape) if counted else letters(index, "i")
    v = None if counted else "v"
    return equation(call, [[*picked, "h"], picked], [[v, "h"]], linear=[{0}])


@rule("aten.gather.default")
def _gather(call: Call) -> list[Row]:
    x, index = call.ins
    dim = call.dim(1, x)
    same = {d for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if a == b}
    given = letters(index, fixed=set(range(len(index.shape))) - same - {dim})
    inside = ["v" if d == dim else letter for d, letter in enumerate(given)]
    return equation(call, [inside, given], [given], linear=[{0}] if "float" in x.dtype else [])


@rule("aten.index_select.default")
def _index_select(call: Call) -> list[Row]:
    x, _ = call.ins
    dim = call.dim(1, x)
    inside = letters(x)
    inside[dim] = "v"
    out = [*inside[:dim], "i", *inside[dim + 1 :]]
    return equation(call, [inside, ["i"]], [out], linear=[{0}] if "float" in x.dtype else [])


@rule("aten.index.Tensor")
def _index(call: Call) -> list[Row]:
    """``x[:, i, j]``: the indices broadcast together and stand where the first of them does.

    With a dim between them, as in ``x[i, :, j]``, they stand in front.
    """
    x = call.ins[0]
    given = call.arg(1)
    at = [d for d, index in enumerate(given) if index is not None]
    if any(t.dtype == "bool" for t in call.ins[1:]):
        return equation(
            call, [[None] * len(t.shape) for t in call.ins], [[None] * len(call.out.shape)]
        )
    start = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    kept = letters(x, fixed=at)
    rank = len(call.out.shape) - (len(x.shape) - len(at))
    picked = [
        f"i{k}" if s > 1 else None for k, s in enumerate(call.out.shape[start : start + rank])
    ]
    indices = [
        [None if s == 1 else f"i{k + rank - len(t.shape)}" for k, s in enumerate(t.shape)]
        for t in call.ins[1:]
    ]
    rest = [letter for d, letter in enumerate(kept) if d not in at]
    out = [*rest[:start], *picked, *rest[start:]]
    return equation(call, [kept, *indices], [out], linear=[{0}] if "float" in x.dtype else [])


@rule("aten.scatter_add.default")
def _scatter_add(call: Call) -> list[Row]:
    # The gradient of a gather: what is added falls into the dim that was looked up in.
    x, index, source = call.ins
    dim = call.dim(1, x)
    shapes = zip(x.shape, index.shape, source.shape, strict=True)
    same = {d for d, (a, b, c) in enumerate(shapes) if a == b == c}
    rest = letters(x, fixed=set(range(len(x.shape))) - same | {dim})
    # Where more is given than is added, numbers and what belongs to them are not of one shape.
    alike = index.shape == source.shape
    table, added = ([*rest[:dim], x if alike else None, *rest[dim + 1 :]] for x in "vj")
    return equation(call, [table, added, added], [table], linear=[{0, 2}], additive={0})


@rule("hap.cross_entropy.default")
def _cross_entropy(call: Call) -> list[Row]:
    _, target = call.ins
    rows = letters(target)
    return equation(call, [[*rows, "v"], rows], [rows, rows], terms={0: L})


@rule("hap.cross_entropy_backward.default")
def _cross_entropy_backward(call: Call) -> list[Row]:
    rows = letters(call.ins[0])
    logits = [*rows, "v"]
    return equation(call, [rows, rows, logits, rows, rows], [logits], linear=[{0, 1}])
