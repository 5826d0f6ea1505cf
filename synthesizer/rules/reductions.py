"""Rules of reductions and normalizations: the reduced dims stay whole, except in sums."""

from __future__ import annotations

from collections.abc import Iterable

from hap.ir.graph import Tensor
from hap.ir.placement import L, P
from hap.synthesizer.rules.rule_table import Call, Letters, Row, equation, letters, rule


def _dims(value: object, tensor: Tensor) -> set[int]:
    rank = len(tensor.shape)
    if value is None or value == ():
        return set(range(rank))
    given: Iterable[int] = [value] if isinstance(value, int) else value  # type: ignore[assignment]
    return {d % rank for d in given} if rank else set()


def _reduced(all_letters: list[str | None], dims: set[int], keepdim: bool) -> list[str | None]:
    if keepdim:
        return [None if d in dims else x for d, x in enumerate(all_letters)]
    return [x for d, x in enumerate(all_letters) if d not in dims]


@rule("aten.sum.default", "aten.sum.dim_IntList")
def _sum(call: Call) -> list[Row]:
    (x,) = call.ins
    named = call.node.op.endswith("IntList")
    dims = _dims(call.arg(1, "dim"), x) if named else _dims(None, x)
    keepdim = bool(call.arg(2, "keepdim", False)) if named else False
    given = letters(x)
    linear = [{0}] if "float" in x.dtype else []
    return equation(call, [given], [_reduced(given, dims, keepdim)], linear=linear)


@rule("aten.amax.default", "aten.amin.default", "aten.any.dim", "aten.argmax.default",
      "aten.prod.dim_int", "aten.max.dim", "aten.min.dim")  # fmt: skip
def _whole(call: Call) -> list[Row]:
    return reduced_rows(call, 1, 2)


def reduced_rows(call: Call, dims: int | None, keepdim: int | None) -> list[Row]:
    """Return the rows of a reduction of one tensor: the other dims can be split.

    Args:
        dims, keepdim: positions of the arguments of these names; None: no such argument.
    """
    (x,) = call.ins
    reduced = _dims(None if dims is None else call.arg(dims, "dim"), x)
    keeps = keepdim is not None and bool(call.arg(keepdim, "keepdim", False))
    given = letters(x, fixed=reduced)
    return equation(call, [given], [_reduced(given, reduced, keeps) for _ in call.node.outputs])


@rule("aten.logsumexp.default")
def _logsumexp(call: Call) -> list[Row]:
    (x,) = call.ins
    given = letters(x)
    out = _reduced(given, _dims(call.arg(1), x), bool(call.arg(2, "keepdim", False)))
    return equation(call, [given], [out], terms={0: L})


@rule("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default",
      "aten.topk.default", "aten.sort.default", "aten.cumsum.default")  # fmt: skip
def _along(call: Call) -> list[Row]:
    (x,) = call.ins
    given = letters(x, fixed=(call.dim(2 if "topk" in call.node.op else 1, x, default=-1),))
    linear = [{0}] if "cumsum" in call.node.op and "float" in x.dtype else []
    return equation(call, [given], [given for _ in call.node.outputs], linear=linear)


@rule("hap.fft_c2c.default", "hap.fft_r2c.default", "hap.fft_c2r.default")
def _fourier(call: Call) -> list[Row]:
    kept = letters(max(*call.ins, call.out, key=lambda t: len(t.shape)), fixed=call.arg(1))[:-1]
    ins, out = ([*kept, None][: len(t.shape)] for t in (call.ins[0], call.out))
    return equation(call, [ins], [out], linear=[{0}])


@rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def _softmax_backward(call: Call) -> list[Row]:
    given = letters(call.ins[0], fixed=(call.dim(2, call.ins[0]),))
    return equation(call, [given, given], [given], linear=[{0}])


@rule("aten.nll_loss_forward.default")
def _nll(call: Call) -> list[Row]:
    # Captured with a sum (or no) reduction: see hap.capture.local_counts.DECOMPOSITIONS.
    batch = ["n"] if len(call.ins[0].shape) == 2 else []
    # The classes are looked up by number, as in hap.synthesizer.rules.indexing.
    x, rest = [*batch, "v"], [["v"] for _ in call.ins[2:]]
    loss = batch if call.arg(3) == 0 else []
    # Without a reduction the second result is a zero that no split changes.
    depends = [{0, 1}, set() if call.arg(3) == 0 else {0, 1}]
    return equation(call, [x, batch, *rest], [loss, []], depends=depends)


@rule("aten.nll_loss_backward.default")
def _nll_backward(call: Call) -> list[Row]:
    grad, x = call.ins[:2]
    batch: list[str | None] = ["n"] if len(x.shape) == 2 else []
    weight: list[list[str | None]] = [["v"] for _ in call.ins[3:-1]]
    grad_letters = batch if grad.shape else []
    ins: list[list[str | None]] = [grad_letters, [*batch, "v"], batch, *weight, []]
    rows = equation(call, ins, [[*batch, "v"]], linear=[{0}])
    # The total weight is a divisor only in a mean; here a sum over shards suffices.
    return [*rows, *(row._replace(ins=(*row.ins[:-1], P)) for row in rows)]


@rule("aten.native_layer_norm.default")
def _layer_norm(call: Call) -> list[Row]:
    x = call.ins[0]
    outer = _outer(x, len(call.arg(1)))
    inner: list[str | None] = [None] * len(call.arg(1))
    affine = [inner for _ in call.ins[1:]]
    return equation(call, [[*outer, *inner], *affine], [[*outer, *inner]] + [[*outer, *inner]] * 2)


@rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(call: Call) -> list[Row]:
    x = call.ins[1]
    outer = _outer(x, len(call.arg(2)))
    inner: list[str | None] = [None] * len(call.arg(2))
    full = [*outer, *inner]
    affine = [inner for _ in call.ins[4:]]
    return equation(call, [full, full, full, full, *affine], [full, inner, inner], linear=[{0}])


def _outer(x: Tensor, inner: int) -> list[str | None]:
    rank = len(x.shape)
    return letters(x, fixed=range(rank - inner, rank))[: rank - inner]


# --- batch norm, in parts: hap.capture.batch_norm. Statistics have the letter of the channels. ---


def _channel(x: Tensor) -> list[str | None]:
    return letters(x)[1:2]


@rule("hap.channel_mean.default")
def _channel_mean(call: Call) -> list[Row]:
    (x,) = call.ins
    return equation(call, [letters(x)], [_channel(x)], linear=[{0}])


@rule("hap.channel_variance.default")
def _channel_variance(call: Call) -> list[Row]:
    x = call.ins[0]
    return equation(call, [letters(x), _channel(x)], [_channel(x)])


@rule("hap.normalize.default")
def _normalize(call: Call) -> list[Row]:
    x = call.ins[0]
    return equation(call, [letters(x), *[_channel(x)] * 4], [letters(x)])


@rule("hap.normalize_sums.default")
def _normalize_sums(call: Call) -> list[Row]:
    x, c = letters(call.ins[0]), _channel(call.ins[0])
    return equation(call, [x, x, c, c], [c, c], linear=[{0}])


@rule("hap.normalize_backward.default")
def _normalize_backward(call: Call) -> list[Row]:
    x, c = letters(call.ins[0]), _channel(call.ins[0])
    return equation(call, [x, x, c, c, c, c, c], [x], linear=[{0, 5, 6}])


# --- group norm: hap.capture.group_norm. Channels are cut between groups. ---


@rule("hap.group_norm.default")
def _group_norm(call: Call) -> list[Row]:
    x, affine, shared = _groups(call, call.ins[0], len(call.ins) - 1)
    return equation(call, [x, *affine], [x, ["b", "c"], ["b", "c"]], units=shared)


@rule("hap.group_norm_backward.default")
def _group_norm_backward(call: Call) -> list[Row]:
    x, affine, shared = _groups(call, call.ins[1], len(call.ins) - 4)
    ins = [x, x, ["b", "c"], ["b", "c"], *affine]
    return equation(call, ins, [x, ["c"], ["c"]], linear=[{0}], units=shared)


def _groups(call: Call, x: Tensor, affine: int) -> tuple[Letters, list[Letters], dict[str, int]]:
    """Return letters of images and of weights, and the number of groups, which cuts keep whole."""
    size = next(a for a in call.node.args if isinstance(a, int))
    images: Letters = ["b", "c", *(None for _ in x.shape[2:])]
    return images, [["c"] for _ in range(affine)], {"c": x.shape[1] // size}
