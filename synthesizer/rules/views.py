"""Rules of views: the correspondence of input and output dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hap.synthesizer.rules.rule_table import Call, Row, broadcast, equation, letters, rule


@rule("aten.view.default")
def _view(call: Call) -> list[Row]:
    """Only the leading dim of a merged or split group can carry a shard: (12, 64) -> 768 in 12 blocks."""
    (x,) = call.ins
    ins: list[str | None] = [None] * len(x.shape)
    outs: list[str | None] = [None] * len(call.out.shape)
    units = {}
    for k, (i, o) in enumerate(leading_pairs(x.shape, call.out.shape)):
        ins[i] = outs[o] = f"g{k}"
        units[f"g{k}"] = math.gcd(x.shape[i], call.out.shape[o])
    return equation(call, [ins], [outs], linear=[{0}], units=units)


def leading_pairs(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of leading dims of the smallest groups of ``a`` and ``b`` of equal product."""
    pairs = []
    i = j = 0
    left = [d for d, s in enumerate(a) if s != 1]
    right = [d for d, s in enumerate(b) if s != 1]
    while i < len(left) and j < len(right) and 0 not in a:  # without elements there are none
        first = (left[i], right[j])
        m, n = a[left[i]], b[right[j]]
        while m != n:
            if m < n:
                i += 1
                m *= a[left[i]]
            else:
                j += 1
                n *= b[right[j]]
        pairs.append(first)
        i, j = i + 1, j + 1
    return pairs


@rule("aten.permute.default")
def _permute(call: Call) -> list[Row]:
    (x,) = call.ins
    given = letters(x)
    return equation(call, [given], [[given[d] for d in call.arg(1)]], linear=[{0}])


@rule("aten.t.default", "aten.transpose.int")
def _transpose(call: Call) -> list[Row]:
    (x,) = call.ins
    given = letters(x)
    last = len(given) - 1
    a, b = (call.dim(1, x), call.dim(2, x)) if call.node.op == "aten.transpose.int" else (0, last)
    turned = list(given)
    if turned:
        turned[a], turned[b] = given[b], given[a]
    return equation(call, [given], [turned], linear=[{0}])


@rule("aten.unsqueeze.default")
def _unsqueeze(call: Call) -> list[Row]:
    (x,) = call.ins
    given = letters(x)
    at = call.dim(1, call.out)
    return equation(call, [given], [[*given[:at], None, *given[at:]]], linear=[{0}])


@rule("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def _squeeze(call: Call) -> list[Row]:
    (x,) = call.ins
    rank = len(x.shape)
    named = call.arg(1, "dim", tuple(range(rank)))
    dims = {d % rank for d in ([named] if isinstance(named, int) else named)} if rank else set()
    # A remaining named dim would be squeezed on a rank with a share of one element.
    given = letters(x, fixed=dims)
    kept = [letter for d, letter in enumerate(given) if d not in dims or x.shape[d] > 1]
    return equation(call, [given], [kept], linear=[{0}])


@rule("aten.expand.default")
def _expand(call: Call) -> list[Row]:
    (x,) = call.ins
    return equation(call, [broadcast(x, call.out)], [letters(call.out)], linear=[{0}])


@rule("aten.slice.Tensor", "aten.slice_backward.default", "aten.flip.default",
      "aten.roll.default", "aten.constant_pad_nd.default", "aten.triu.default", "aten.tril.default")  # fmt: skip
def _within(call: Call) -> list[Row]:
    """Dims along which elements keep their places can be split."""
    (x,) = call.ins
    changed = {d for d, (a, b) in enumerate(zip(x.shape, call.out.shape, strict=True)) if a != b}
    if call.node.op == "aten.flip.default":
        changed = {d % len(x.shape) for d in call.arg(1)}
    if call.node.op in ("aten.triu.default", "aten.tril.default"):
        changed = {len(x.shape) - 2, len(x.shape) - 1}
    if call.node.op == "aten.roll.default":  # without dims it rolls the flattened elements
        changed = {d % len(x.shape) for d in call.arg(2, "dims", ()) or range(len(x.shape))}
    if call.node.op == "aten.constant_pad_nd.default":  # (1, -1) shifts, and keeps the size
        pads = call.arg(1)
        changed = {len(x.shape) - 1 - k // 2 for k, pad in enumerate(pads) if pad}
    given, adds = letters(x, fixed=changed), "pad" in call.node.op and call.arg(2, "value", 0)
    linear = [{0}] if not adds and "float" in x.dtype else []
    return equation(call, [given], [given], linear=linear)


@rule("aten.select.int", "aten.unbind.int")
def _select(call: Call) -> list[Row]:
    (x,) = call.ins
    dim = call.dim(1, x)
    given = letters(x, fixed=(dim,))
    out = given[:dim] + given[dim + 1 :]
    return equation(call, [given], [out for _ in call.node.outputs], linear=[{0}])


@rule("aten.select_backward.default")
def _select_backward(call: Call) -> list[Row]:
    dim = call.dim(2, call.out)
    given = letters(call.out, fixed=(dim,))
    return equation(call, [given[:dim] + given[dim + 1 :]], [given], linear=[{0}])


@rule("aten.select_scatter.default", "aten.slice_scatter.default")
def _overwrite(call: Call) -> list[Row]:
    """The second argument replaces a part of one dim."""
    x, _ = call.ins
    dim = call.dim(2, x)
    given = letters(x, fixed=(dim,))
    one = call.node.op == "aten.select_scatter.default"
    part = given[:dim] + given[dim + 1 :] if one else given
    return equation(call, [given, part], [given], linear=[{0, 1}])


@rule("aten.split.Tensor", "aten.split_with_sizes.default")
def _split(call: Call) -> list[Row]:
    (x,) = call.ins
    given = letters(x, fixed=(call.dim(2, x),))
    return equation(call, [given], [given for _ in call.node.outputs], linear=[{0}])


@rule("aten.cat.default")
def _cat(call: Call) -> list[Row]:
    out = call.out
    dim = call.dim(1, out)
    given = letters(out, fixed=(dim,))
    everything = set(range(len(call.ins)))
    return equation(call, [given for _ in call.ins], [given], linear=[everything])


@rule("aten.stack.default")
def _stack(call: Call) -> list[Row]:
    dim = call.dim(1, call.out)
    given = letters(call.out, fixed=(dim,))
    ins = [given[:dim] + given[dim + 1 :] for _ in call.ins]
    return equation(call, ins, [given], linear=[set(range(len(ins)))])
