"""Rules of operators that select elements by index.

If the looked-up dim (letter ``v``) is split, every rank finds its own elements, and zeros for the
other indices: a term of the result (:mod:`hap.runtime.localize`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hap.ir.graph import Tensor
from hap.ir.placement import L
from hap.synthesizer.rules.rule_table import Call, Row, broadcast, equation, letters, rule


@rule("aten.embedding.default")
def _embedding(call: Call) -> list[Row]:
    _, index = call.ins
    picked = letters(index, "i")
    return equation(call, [["v", "h"], picked], [[*picked, "h"]], linear=[{0}])


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(call: Call) -> list[Row]:
    # A looked-up row collects the gradients of all its uses: a sum over the indices, unless it
    # is divided by the number of uses, which requires all the indices.
    _, index = call.ins
    # The counting kernel writes its counts unchecked: it can't ignore an index.
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
    """``x[:, i, j]``: broadcast indices are at the first of them, or in front if others are between."""
    x = call.ins[0]
    given = call.arg(1)
    if any(t.dtype == "bool" for t in call.ins[1:]):
        return equation(
            call, [[None] * len(t.shape) for t in call.ins], [[None] * len(call.out.shape)]
        )
    kept, indices, picked = _picked(x, given, list(call.ins[1:]))
    return equation(call, [kept, *indices], [picked], linear=[{0}] if "float" in x.dtype else [])


def _picked(
    x: Tensor, given: Sequence[object], numbers: Sequence[Tensor]
) -> tuple[list[str | None], list[list[str | None]], list[str | None]]:
    """Return letters of ``x``, of the indices, and of ``x[given]``; looked-up dims have none."""
    at = [d for d, index in enumerate(given) if index is not None]
    start = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    kept = letters(x, fixed=at)
    rank = max(len(t.shape) for t in numbers)
    indices = [
        [None if s == 1 else f"i{k + rank - len(t.shape)}" for k, s in enumerate(t.shape)]
        for t in numbers
    ]
    known = {letter for index in indices for letter in index}
    found = [f"i{k}" if f"i{k}" in known else None for k in range(rank)]
    rest = [letter for d, letter in enumerate(kept) if d not in at]
    return kept, indices, [*rest[:start], *found, *rest[start:]]


@rule("aten.index_put.default")
def _index_put(call: Call) -> list[Row]:
    """The gradient of ``x[i, j]``: terms are added to the looked-up dims."""
    x, *numbers, values = call.ins
    if numbers[0].dtype == "bool":  # a Boolean mask selects an unknown number of elements
        at = next(d for d, index in enumerate(call.arg(1)) if index is not None)
        all_letters = letters(x)
        chosen = all_letters[at : at + len(numbers[0].shape)]
        return equation(
            call, [all_letters, chosen, broadcast(values, x)], [all_letters], linear=[{0, 2}]
        )
    kept, indices, picked = _picked(x, call.arg(1), numbers)
    adds = bool(call.arg(3, "accumulate", False))
    if not adds:  # overwriting: a rank must know all indices
        indices = [[None] * len(index) for index in indices]
        picked = [x if x in kept else None for x in picked]
    shift = len(picked) - len(values.shape)
    given = [None if s == 1 else picked[d + shift] for d, s in enumerate(values.shape)]
    everything = {0, len(call.ins) - 1}
    return equation(
        call, [kept, *indices, given], [kept], linear=[everything], additive={0} if adds else set()
    )


@rule("aten.scatter.src", "aten.scatter.value")
def _scatter(call: Call) -> list[Row]:
    # New elements replace old ones: the dim must be whole.
    x, index, *source = call.ins
    dim = call.dim(1, x)
    shapes = zip(x.shape, index.shape, *(t.shape for t in source), strict=True)
    same = {d for d, sizes in enumerate(shapes) if len(set(sizes)) == 1}
    rest = letters(x, fixed=set(range(len(x.shape))) - same | {dim})
    joint = [{0, 2}] if source else [{0}] if call.arg(3) == 0 else []
    return equation(call, [rest, rest, *(rest for _ in source)], [rest], linear=joint)


@rule("aten.scatter_add.default", "aten.index_add.default")
def _scatter_add(call: Call) -> list[Row]:
    # The gradient of a gather: terms are added to the looked-up dim.
    x, index, source = call.ins
    dim, by_slice = call.dim(1, x), call.node.op == "aten.index_add.default"
    indices = source.shape if by_slice else index.shape
    same = {d for d, n in enumerate(x.shape) if n == indices[d] == source.shape[d]}
    rest = letters(x, fixed=set(range(len(x.shape))) - same | {dim})
    # The source may be larger than the indices; their shapes then differ.
    v, j = ("v", "j" if index.shape else None) if indices == source.shape else (None, None)
    table, added = ([*rest[:dim], x, *rest[dim + 1 :]] for x in (v, j))
    at = [j] * len(index.shape) if by_slice else added
    return equation(call, [table, at, added], [table], linear=[{0, 2}], additive={0})


@rule("hap.cross_entropy.default")
def _cross_entropy(call: Call) -> list[Row]:
    _, target = call.ins
    rows = letters(target)
    return equation(call, [[*rows, "v"], rows], [rows, rows], terms={0: L})


@rule("hap.cross_entropy_backward.default")
def _cross_entropy_backward(call: Call) -> list[Row]:
    logits = [*(rows := letters(call.ins[0])), "v"]
    return equation(call, [rows, rows, logits, rows, rows], [logits], linear=[{0, 1}])


@rule("hap.ctc_loss.default", "hap.ctc_loss_backward.default")
def _ctc_loss(call: Call) -> list[Row]:
    dims: dict[int, list[str | None]] = {3: [None, "n", None], 2: ["n", None], 1: ["n"]}
    ins = [dims[len(t.shape)] for t in call.ins]
    return equation(call, ins, [dims[len(call.out.shape)]], linear=[{0}] if len(ins) == 5 else [])
