"""Rules of sums of products: matrix products, convolutions, attention.

A contracted letter is partial.
"""

from __future__ import annotations

from hap.synthesizer.rules.rule_table import Call, Row, equation, rule


@rule("aten.mm.default", "aten.matmul.default", "aten.linear.default")
def _of_rows(call: Call) -> list[Row]:
    """A tensor times a matrix; the weight of a linear layer has its outputs first."""
    x, _matrix, *bias = call.ins
    lead = [f"b{dim}" for dim in range(len(x.shape) - 1)]
    matrix = "nk" if call.node.op == "aten.linear.default" else "kn"
    return equation(
        call, [[*lead, "k"], matrix, *("n" for _ in bias)], [[*lead, "n"]],
        linear=[{0, 2}, {1, 2}] if bias else [{0}, {1}], additive={2},
    )  # fmt: skip


@rule("aten.bmm.default")
def _bmm(call: Call) -> list[Row]:
    return equation(call, ["bmk", "bkn"], ["bmn"], linear=[{0}, {1}])


@rule("aten.addmm.default")
def _addmm(call: Call) -> list[Row]:
    bias = call.ins[0]
    added = [x if s > 1 else None for x, s in zip("nm", reversed(bias.shape), strict=False)][::-1]
    # A rank without a share of k adds its term of the bias unchanged, so it must not be scaled.
    k = "k" if call.arg(3, "beta", 1) == 1 else None
    return equation(
        call, [added, ["m", k], [k, "n"]], ["mn"], linear=[{0, 1}, {0, 2}], additive={0}
    )


@rule("aten.tensordot.default")
def _tensordot(call: Call) -> list[Row]:
    """A product summed over pairs of dims; the remaining dims keep their order."""
    (x, y), sums = call.ins, (call.arg(2), call.arg(3))
    a, b = ([f"{name}{dim}" for dim in range(len(t.shape))] for name, t in (("x", x), ("y", y)))
    pairs = [(dim % len(a), other % len(b)) for dim, other in zip(*sums, strict=True)]
    for dim, other in pairs:
        b[other] = a[dim]
    summed = {a[dim] for dim, _ in pairs}
    left = [letter for letter in (*a, *b) if letter not in summed]
    return equation(call, [a, b], [left], linear=[{0}, {1}])


@rule("aten.convolution.default")
def _convolution(call: Call) -> list[Row]:
    x, _w, *bias = call.ins
    space = [None] * (len(x.shape) - 2)
    c, o = ("c", "o") if call.arg(8) == 1 else (None, None)  # groups would be split, too
    channels = [c, o] if call.arg(6) else [o, c]  # transposed or not
    return equation(
        call, [["n", c, *space], [*channels, *space], *([o] for _ in bias)], [["n", o, *space]],
        linear=[{0, 2}, {1, 2}] if bias else [{0}, {1}], additive={2},
    )  # fmt: skip


@rule("aten.convolution_backward.default")
def _convolution_backward(call: Call) -> list[Row]:
    grad = call.ins[0]
    space = [None] * (len(grad.shape) - 2)
    c, o = ("c", "o") if call.arg(9) == 1 else (None, None)
    x, w = ["n", c, *space], [*([c, o] if call.arg(7) else [o, c]), *space]
    # The third result, the bias's gradient, is a separate sum: see hap.capture.tracing.
    return equation(
        call, [["n", o, *space], x, w], [x, w, []],
        linear=[{0}, {1}, {2}], depends=[{0, 2}, {0, 1}, set()],
    )  # fmt: skip


@rule("hap.expert_mm.default")
def _expert_mm(call: Call) -> list[Row]:
    # A rank with some of the experts makes zeros for the rows of others: a term of the result.
    return equation(call, ["sk", "vkn", "s"], ["sn"], linear=[{0}, {1}])


@rule("hap.expert_mm_backward.default")
def _expert_mm_backward(call: Call) -> list[Row]:
    return equation(call, ["sk", "sn", "s"], ["vkn"], linear=[{0}, {1}])


def _attention_letters(call: Call, q: int, keys: str | None = None) -> tuple[list[str | None], ...]:
    """Return letters of query, key or value, log-sum-exp, and of the mask if there is one."""
    causal = next(a for a in call.node.args if isinstance(a, bool))
    length = None if causal else "l"  # a causal mask counts queries from the first
    mask = call.ins[q + 3] if len(call.ins) in (4, 7) else None
    keys = None if causal else keys
    full = ["b", "h", length, keys]
    shift = 4 - len(mask.shape) if mask else 0
    seen = (
        [x if s > 1 else None for x, s in zip(full[shift:], mask.shape, strict=True)]
        if mask
        else []
    )
    return ["b", "h", length, None], ["b", "h", keys, None], ["b", "h", length], seen


@rule("hap.sdpa.default")
def _sdpa(call: Call) -> list[Row]:
    q, kv, lse, mask = _attention_letters(call, 0)
    has_mask = len(call.ins) == 4
    return equation(call, [q, kv, kv, *([mask] if has_mask else [])], [q, lse])


@rule("hap.sdpa_backward.default")
def _sdpa_backward(call: Call) -> list[Row]:
    # The saved log-sum-exp includes all keys, so that here parts of the keys are independent.
    q, kv, lse, mask = _attention_letters(call, 1, keys="m")
    has_mask = len(call.ins) == 7
    return equation(
        call, [q, q, kv, kv, *([mask] if has_mask else []), q, lse], [q, kv, kv], linear=[{0}]
    )


@rule("hap.recurrence.default", "hap.recurrence_backward.default")
def _recurrence(call: Call) -> list[Row]:
    by_row, backward = ["b", None, None], "backward" in call.node.op
    ins = [by_row if len(t.shape) == 3 else [None for _ in t.shape] for t in call.ins[:-1]]
    outs = [by_row, ["b", None] if backward else by_row]
    return equation(call, [*ins, ["b", None]], outs, linear=[{0}] if backward else [])


@rule("hap.full_lengths.default")
def _full_lengths(call: Call) -> list[Row]:
    return equation(call, [[None]], [[None]])
