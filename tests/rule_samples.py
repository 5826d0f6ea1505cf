"""Sample calls of every operator that has a rule.

Sizes are small, distinct and not round, so that no row holds by coincidence of sizes. Dims of
size 1, broadcasting, negative dims, repeated arguments, masks and groups each once hid a wrong
row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hap.capture.ctc  # noqa: F401  (defines operators)
from hap.ir.image_operators import RESIZES, image_dims
from hap.rule_check import Sample
from hap.runtime.emit import resolve

_random = torch.Generator().manual_seed(11)


SAMPLES: list[Sample] = []


def add(op: str, *args: Any, **kwargs: Any) -> None:
    name = op if op.startswith("hap.") else f"aten.{op}"
    resolve(name)  # fails for a misspelt operator
    SAMPLES.append(Sample(name, args, kwargs))


def f(*shape: int) -> Tensor:
    """Return floats around zero."""
    return torch.randn(shape, dtype=torch.float64, generator=_random)


def pos(*shape: int) -> Tensor:
    """Return floats in (0.1, 0.9)."""
    return torch.rand(shape, dtype=torch.float64, generator=_random) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    """Return integers in [0, high)."""
    return torch.randint(high, shape, generator=_random)


def apart(high: int, *shape: int) -> Tensor:
    """Return distinct integers in [0, high): duplicate writes are undefined."""
    count = math.prod(shape)
    return torch.randperm(high, generator=_random)[:count].reshape(shape)


def b(*shape: int) -> Tensor:
    return i(2, *shape).bool()


def each(ops: str, make: Callable[[], tuple[Any, ...]]) -> None:
    for op in ops.split():
        add(op, *make())


# --- factories ---

for _op in ("zeros.default", "ones.default", "empty.memory_format"):
    add(_op, [3, 1, 5], dtype=torch.float64)
add("full.default", [5, 3], 2.5, dtype=torch.float64)
add("full.default", [], True, dtype=torch.bool)
add("scalar_tensor.default", 0.5, dtype=torch.float64)
each("new_ones.default new_zeros.default new_empty.default", lambda: (f(7, 1), [3, 5]))
add("new_full.default", f(7, 1), [3, 5], 1.5)
add("new_ones.default", b(7), [3, 5], dtype=torch.int64)
add("arange.default", 7, dtype=torch.int64)
add("arange.start", 2, 7, dtype=torch.int64)
add("eye.default", 7)
add("eye.m", 7, 5)
add("arange.start_step", 2, 12, 2, dtype=torch.int64)

add("hap.constant.default", [0.5, -1.5, 2.0, 0.1, 3.0, 7.0], [3, 2],
    dtype=torch.float64, device=torch.device("cpu"))  # fmt: skip

# --- pointwise ---

each(
    """abs.default ceil.default cos.default elu.default erf.default exp.default expm1.default
    floor.default gelu.default hardswish.default isinf.default isnan.default leaky_relu.default
    relu.default round.default sigmoid.default sign.default silu.default sin.default
    softplus.default tanh.default""",
    lambda: (f(5, 1, 3),),
)
each(
    "acos.default log.default log1p.default reciprocal.default rsqrt.default sqrt.default",
    lambda: (pos(5, 3),),
)
add("logical_not.default", i(2, 5, 3).double())
add("gelu.default", f(5, 3), approximate="tanh")
add("hardtanh.default", f(5, 3), -0.5, 0.75)
add("clamp.default", f(5, 3), -0.5, 0.75)
add("clamp_max.default", f(5, 3), 0.25)
add("clamp_min.default", f(5, 3), 0.25)
each("ge.Scalar gt.Scalar le.Scalar lt.Scalar eq.Scalar ne.Scalar", lambda: (i(4, 5, 1, 3), 2))
each("ge.Tensor gt.Tensor le.Tensor lt.Tensor eq.Tensor ne.Tensor", lambda: (i(3, 5, 3), i(3, 3)))
each("bitwise_and.Tensor bitwise_or.Tensor", lambda: (b(5, 1, 3), b(7, 1)))
add("bitwise_and.Tensor", i(16, 5, 3), i(16, 5, 3))
add("bitwise_not.default", b(5, 3))
each("logical_and.default logical_or.default", lambda: (b(5, 1), b(3)))
each("maximum.default minimum.default", lambda: (f(5, 3), f(3)))
add("floor_divide.default", i(50, 5, 3), i(5, 5, 1) + 1)
add("remainder.Scalar", i(50, 5, 3), 7)
add("pow.Scalar", 2.0, f(5, 3))
add("pow.Tensor_Scalar", f(5, 3), 3)
add("pow.Tensor_Tensor", pos(5, 3), f(3))
each("rsub.Scalar add.Scalar sub.Scalar", lambda: (f(5, 3), 1.5))
each("ones_like.default zeros_like.default empty_like.default", lambda: (f(5, 1, 3),))
add("full_like.default", f(5, 3), 1.5)
add("ones_like.default", f(5, 3), dtype=torch.int64)
add("neg.default", f(5, 1, 3))
add("neg.default", i(9, 5, 3))
each("mul.Tensor add.Tensor sub.Tensor", lambda: (f(5, 1, 3), f(7, 1)))
each("mul.Tensor add.Tensor sub.Tensor", lambda: (f(5, 3), f()))
each("mul.Tensor add.Tensor sub.Tensor div.Tensor", lambda: (f(5, 3), 1.5))
_same = f(5, 3)
each("mul.Tensor add.Tensor div.Tensor sub.Tensor", lambda: (_same, _same))
add("add.Tensor", f(5, 3), f(5, 3), alpha=2.5)
add("mul.Tensor", f(5, 3), b(5, 1))
add("mul.Tensor", b(5, 3), b(3))
add("add.Tensor", b(5, 3), b(5, 3))
add("add.Tensor", i(9, 5, 3), f(3))
add("mul.Scalar", f(5, 3), 1.5)
add("div.Scalar", f(5, 3), 1.5)
add("div.Tensor", f(5, 1, 3), pos(7, 1))
add("div.Tensor", f(), i(9) + 1)
add("elu_backward.default", f(5, 3), 1.5, 1.0, 1.0, False, f(5, 3))
add("elu_backward.default", f(5, 3), 1.5, 1.0, 1.0, True, f(5, 3))
add("threshold_backward.default", f(5, 3), f(5, 3), 0)
add("gelu_backward.default", f(5, 3), f(5, 3))
add("gelu_backward.default", f(5, 3), f(5, 3), approximate="tanh")
each("silu_backward.default sigmoid_backward.default", lambda: (f(5, 3), f(5, 3)))
add("tanh_backward.default", f(5, 3), f(5, 3))
add("leaky_relu_backward.default", f(5, 3), f(5, 3), 0.1, False)
add("hardtanh_backward.default", f(5, 3), f(5, 3), -0.5, 0.75)
add("native_dropout.default", torch.ones(53, 1, 47, dtype=torch.float64), 0.3, True)
add("native_dropout_backward.default", f(5, 3), b(5, 3), 1.5)
add("where.self", b(5, 1, 3), f(7, 1), f())
add("where.self", b(3), f(5, 3), f(5, 1))
add("masked_fill.Scalar", f(5, 7, 3), b(7, 1), 0)
add("masked_fill.Scalar", f(5, 7, 3), b(5, 1, 3), -1e9)
add("_to_copy.default", f(5, 1, 3), dtype=torch.float64)
add("_to_copy.default", i(9, 5, 3), dtype=torch.float64)
add("_to_copy.default", b(5, 3), dtype=torch.float64)
add("_to_copy.default", f(5, 3), dtype=torch.int64)
add("_to_copy.default", i(2, 5, 3), dtype=torch.bool)

# --- products ---

add("mm.default", f(5, 3), f(3, 7))
add("mm.default", f(1, 3), f(3, 7))
_square = f(5, 5)
add("mm.default", _square, _square)
add("bmm.default", f(2, 5, 3), f(2, 3, 7))
add("addmm.default", f(7), f(5, 3), f(3, 7))
add("addmm.default", f(5, 7), f(5, 3), f(3, 7))
add("addmm.default", f(5, 1), f(5, 3), f(3, 7))
add("addmm.default", f(1), f(5, 3), f(3, 7))
add("addmm.default", f(7), f(5, 3), f(3, 7), beta=0.5, alpha=1.5)
add("linear.default", f(2, 5, 3), f(7, 3))
add("linear.default", f(2, 5, 3), f(7, 3), f(7))
add("linear.default", f(1, 5, 3), f(1, 3), f(1))
add("linear.default", _square, _square)
add("matmul.default", f(2, 5, 3), f(3, 7))
add("matmul.default", f(2, 5, 1, 3), f(3, 7))
add("tensordot.default", f(2, 5, 3), f(2, 5, 7), [0, 1], [0, 1])
add("tensordot.default", f(2, 1, 5, 3), f(2, 1, 5, 7), [0, 1, 2], [0, 1, 2])
add("tensordot.default", f(2, 5, 3), f(3, 7, 2), [-1, 0], [0, 2])
_cube = f(5, 5, 5)
add("tensordot.default", _cube, _cube, [0, 1], [0, 1])


def _conv(
    x: Tensor, w: Tensor, bias: Tensor | None, *, groups: int = 1, transposed: bool = False
) -> None:
    n = x.dim() - 2
    options = ([2] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
    add("convolution.default", x, w, bias, *options)
    grad = torch.randn_like(SAMPLES[-1].run()[0])  # type: ignore[call-overload]
    for mask in ([True, True, False], [False, True, False]):
        add("convolution_backward.default", grad, x, w, None, *options, mask)


_conv(f(2, 3, 9, 11), f(5, 3, 3, 3), f(5))
_conv(f(2, 3, 11), f(5, 3, 3), None)
_conv(f(2, 6, 9, 11), f(4, 3, 3, 3), f(4), groups=2)
_conv(f(2, 5, 9, 11), f(5, 1, 3, 3), None, groups=5)
_conv(f(2, 3, 7, 5), f(3, 11, 3, 3), f(11), transposed=True)
_conv(f(2, 1, 5, 3, 4), f(7, 1, 3, 3, 3), f(7))


def _attend(mask: Tensor | None, *, causal: bool = False, values: int = 5, batch: int = 2) -> None:
    q, k = f(batch, 3, 7, 5), f(batch, 3, 11, 5)
    v = f(batch, 3, 11, values)
    add("hap.sdpa.default", q, k, v, mask, causal, 0.4)
    out, lse = SAMPLES[-1].run()
    grad = torch.randn_like(out)  # type: ignore[arg-type]
    add("hap.sdpa_backward.default", grad, q, k, v, mask, out, lse, causal, 0.4)


_attend(None)
_attend(None, causal=True)
_attend(None, values=13)
_attend(f(2, 1, 7, 11))
_attend(f(1, 3, 1, 1))
_attend(torch.ones(7, 11, dtype=torch.bool).tril(3))
_attend(torch.ones(1, 1, 1, 11, dtype=torch.bool), batch=1)

# --- images ---


def _max_pool(*shape: int) -> None:
    x, options = f(*shape), ([2, 2], [2, 2], [1, 0], [1, 1], False)
    add("max_pool2d_with_indices.default", x, *options)
    out, indices = SAMPLES[-1].run()
    grad = torch.randn_like(out)  # type: ignore[arg-type]
    add("max_pool2d_with_indices_backward.default", grad, x, *options, indices)


def _other_max_pools(n: int, *shape: int) -> None:
    x = f(*shape)
    add(f"adaptive_max_pool{n}d.default", x, [2, 4, 3][:n])
    grad, indices = (t for t in SAMPLES[-1].run() if t is not None)
    add(f"adaptive_max_pool{n}d_backward.default", torch.randn_like(grad), x, indices)
    if n == 3:
        options = ([2, 2, 2], [2, 2, 2], [1, 0, 0], [1, 1, 1], False)
        add("max_pool3d_with_indices.default", x, *options)
        grad, indices = (t for t in SAMPLES[-1].run() if t is not None)
        backward = "max_pool3d_with_indices_backward.default"
        add(backward, torch.randn_like(grad), x, *options, indices)


for _shape in ((2, 3, 7, 13), (3, 7, 13), (1, 3, 7, 13)):
    _max_pool(*_shape)
    _other_max_pools(2, *_shape)
    _options = ([2, 2], [2, 1], [1, 0], False, True, None)
    add("_adaptive_avg_pool2d.default", f(*_shape), [2, 4])
    add("_adaptive_avg_pool2d_backward.default", f(*_shape[:-2], 2, 4), f(*_shape))
    add("avg_pool2d.default", f(*_shape), *_options)
    add("avg_pool2d_backward.default", f(*_shape[:-2], 4, 12), f(*_shape), *_options)

for _shape in ((2, 3, 5, 7, 11), (3, 5, 7, 11)):
    _other_max_pools(3, *_shape)
    _options = ([2, 2, 2], [2, 2, 1], [1, 0, 0], False, True, None)
    add("_adaptive_avg_pool3d.default", f(*_shape), [2, 4, 3])
    add("_adaptive_avg_pool3d_backward.default", f(*_shape[:-3], 2, 4, 3), f(*_shape))
    add("avg_pool3d.default", f(*_shape), *_options)
    add("avg_pool3d_backward.default", f(*_shape[:-3], 3, 3, 10), f(*_shape), *_options)

for _name in RESIZES:
    _n = image_dims(_name)
    _shape, _size = (2, 3, *(5, 7, 11)[:_n]), [4, 13, 9][:_n]
    _options = () if "nearest" in _name else (False,)
    add(f"{_name}.default", f(*_shape), _size, *_options)
    add(f"{_name}_backward.default", f(2, 3, *_size), _size, list(_shape), *_options)

for _n, _image, _points in ((2, (7, 11), (5, 13)), (3, (4, 7, 11), (5, 13, 6))):
    _x, _grid, _grad = f(2, 3, *_image), f(2, *_points, _n), f(2, 3, *_points)
    for _mode in (0, 2) if _n == 2 else (0,):
        add(f"grid_sampler_{_n}d.default", _x, _grid, _mode, 0, False)
        add(f"grid_sampler_{_n}d_backward.default", _grad, _x, _grid, _mode, 0, False, [True, True])

# --- reductions ---

for _dims, _keep in (([1], False), ([-1, 0], True), ([], False), (None, True)):
    add("sum.dim_IntList", f(5, 3, 7), _dims, _keep)
add("sum.dim_IntList", f(5, 1, 3), [1])
add("sum.dim_IntList", b(5, 3), [0])
add("sum.default", f(5, 1, 3))
add("sum.default", i(9, 5, 3))
add("sum.default", f())
for _dims, _keep in (([1], False), ([-1], True), ([0, 2], False)):
    each("amax.default amin.default logsumexp.default", lambda: (f(5, 3, 7), _dims, _keep))  # noqa: B023
add("amax.default", f(5, 3))
each("argmax.default prod.dim_int", lambda: (f(5, 3, 7), 1))
each("argmax.default prod.dim_int", lambda: (f(5, 3, 7), -1, True))
add("argmax.default", f(5, 3))
add("any.dim", b(5, 3, 7), -2, True)
add("any.dim", b(5, 3, 7), 0)
each("_softmax.default _log_softmax.default", lambda: (f(5, 3, 7), -1, False))
each("_softmax.default _log_softmax.default", lambda: (f(5, 3, 7), 1, False))
add("_safe_softmax.default", f(5, 3, 7), -1)
add("topk.default", f(5, 3, 7), 2)
add("topk.default", f(5, 3, 7), 2, 1)
add("sort.default", f(5, 3, 7))
add("sort.default", f(5, 3, 7), 1, True)
add("cumsum.default", f(5, 3, 7), -2)
add("cumsum.default", i(9, 5, 3), 0)
for _dim in (1, -1):
    _x = f(5, 3, 7)
    add("_softmax_backward_data.default", f(5, 3, 7), _x.softmax(_dim), _dim, torch.float64)
    _x = _x.log_softmax(_dim)
    add("_log_softmax_backward_data.default", f(5, 3, 7), _x, _dim, torch.float64)
for _weight in (None, pos(3)):
    for _reduction, _ignore in ((2, -100), (0, 1)):
        _x, _target = f(7, 3), i(3, 7)
        add("nll_loss_forward.default", _x, _target, _weight, _reduction, _ignore)
        _loss, _count = SAMPLES[-1].run()
        _given = (torch.randn_like(_loss), _x, _target, _weight, _reduction, _ignore, _count)
        add("nll_loss_backward.default", *_given)
add("nll_loss_forward.default", f(3), i(3), None, 2, -100)
add("nll_loss_backward.default", f(), f(3), i(3), None, 2, -100, f())
for _shape, _skip in (((7, 3), 1), ((7, 3), -100), ((5, 1, 11), 2), ((1, 3), -1)):
    _x, _target = f(*_shape), i(_shape[-1], *_shape[:-1])
    _target[1:2] = _skip
    add("hap.cross_entropy.default", _x, _target, _skip)
    _lse, _ = SAMPLES[-1].run()
    _given = (f(*_shape[:-1]), f(*_shape[:-1]), _x, _target, _lse, _skip)
    add("hap.cross_entropy_backward.default", *_given)
for _longest in (3, 1):
    _lengths = 8 + i(4, 7), i(1 + _longest, 7)
    _given = (f(11, 7, 5).log_softmax(-1), 1 + i(4, 7, _longest), *_lengths, 0, True)
    add("hap.ctc_loss.default", *_given)
    add("hap.ctc_loss_backward.default", f(7), *_given)
add("rand.default", [5, 7])
add("rand_like.default", f(5, 7))
add("randn.default", [5, 1, 7])
add("randn_like.default", f(5, 7))
add("bernoulli.p", f(11, 23), 0.3)
add("randint.default", 99, [5, 7])
add("randint.low", 2, 99, [5, 7])
add("hap.by_mode.default", f(5, 3), f(5, 3))
add("hap.in_training.default", f(5, 3))
add("hap.rounded_with_feedback.default", f(5, 3), torch.float64, "site")
for _shape in ((5, 3, 7, 2), (11, 3), (1, 7, 5)):
    _x, _grad, _mean, _weight, _bias = f(*_shape), f(*_shape), *f(3, _shape[1])
    _invstd = pos(_shape[1])
    for _more in (1, 2):  # the elements of one batch, or of two
        _count = _more * _x.numel() // _x.shape[1]
        add("hap.channel_mean.default", _x, _count)
        (_own,) = SAMPLES[-1].run()
        add("hap.channel_variance.default", _x, _own, _count)
    add("hap.normalize.default", _x, _mean, _invstd, _weight, _bias)
    add("hap.normalize_sums.default", _grad, _x, _mean, _invstd)
    _given = (_grad, _x, _mean, _invstd, _weight, *f(2, _shape[1]), 35)
    add("hap.normalize_backward.default", *_given)
for _weight, _bias in ((f(6), f(6)), (None, None)):
    _x = f(5, 6, 7, 2)
    add("hap.group_norm.default", _x, _weight, _bias, 2, 1e-5)
    _, *_given = SAMPLES[-1].run()
    add("hap.group_norm_backward.default", f(5, 6, 7, 2), _x, *_given, _weight, 2)
for _weight, _bias in ((f(7), f(7)), (f(7), None), (None, None)):
    _x = f(5, 3, 7)
    add("native_layer_norm.default", _x, [7], _weight, _bias, 1e-5)
    _, _mean, _rstd = SAMPLES[-1].run()
    _mask = [True, _weight is not None, _bias is not None]
    _given = (f(5, 3, 7), _x, [7], _mean, _rstd, _weight, _bias, _mask)
    add("native_layer_norm_backward.default", *_given)
_x = f(5, 1, 3, 7)
add("native_layer_norm.default", _x, [3, 7], f(3, 7), f(3, 7), 1e-5)
_, _mean, _rstd = SAMPLES[-1].run()
_given = (f(5, 1, 3, 7), _x, [3, 7], _mean, _rstd, f(3, 7), f(3, 7), [True, True, True])
add("native_layer_norm_backward.default", *_given)

# --- indexing ---

for _index in (i(11, 5, 3), i(11, 1, 3), i(11)):
    add("embedding.default", f(11, 7), _index)
    add("embedding_dense_backward.default", f(*_index.shape, 7), _index, 11, -1, False)
add("embedding_dense_backward.default", f(13, 7), torch.arange(13) % 4, 11, 2, True)
add("embedding_dense_backward.default", f(13, 5, 7), i(11, 13, 5), 11, 8, False)
add("gather.default", f(5, 11, 3), 1, i(11, 5, 7, 3))
add("gather.default", f(5, 11), -1, i(11, 3, 1))
add("gather.default", i(9, 5, 3), 1, i(3, 5, 3))
add("scatter_add.default", f(5, 11, 3), 1, i(11, 5, 7, 3), f(5, 7, 3))
add("scatter_add.default", f(5, 11), -1, i(11, 3, 1), f(3, 1))
add("scatter_add.default", f(5, 11), 0, i(5, 7, 11), f(13, 11))
add("index_select.default", f(5, 11, 3), 1, i(11, 7))
add("index_select.default", i(9, 5, 3), -1, i(3, 7))
add("index.Tensor", f(5, 11, 3), [None, i(11, 7)])
add("index.Tensor", f(11, 13, 3), [i(11, 7, 1), i(13, 5)])
add("index.Tensor", f(3, 11, 13, 2), [None, i(11, 5), i(13, 5)])
add("index.Tensor", f(11, 3, 13, 2), [i(11, 7, 1), None, i(13, 5)])
add("index.Tensor", i(9, 5, 3), [i(5, 7)])

for _adds in (True, False):
    add(
        "index_put.default",
        f(5, 11, 3),
        [None, i(11, 7) if _adds else apart(11, 7)],
        f(5, 7, 3),
        _adds,
    )
    add("index_put.default", f(11, 13, 3), [apart(11, 7, 1), apart(13, 5)], f(7, 5, 3), _adds)
    add("index_put.default", f(3, 11, 13, 2), [None, apart(11, 5), apart(13, 5)], f(3, 1, 2), _adds)
    add(
        "index_put.default",
        f(11, 3, 13, 2),
        [apart(11, 7, 1), None, apart(13, 5)],
        f(7, 5, 3, 2),
        _adds,
    )
    add("index_put.default", f(11, 3), [apart(11, 7)], f(), _adds)
    add("index_put.default", f(5, 11, 3), [None, b(11)], f(3) if _adds else f(), _adds)
add("scatter.src", f(5, 11, 3), 1, apart(11, 7).view(1, 7, 1).expand(5, 7, 3), f(5, 7, 3))
add("scatter.src", f(5, 11), -1, i(11, 3, 1), f(3, 1))
add("scatter.value", f(5, 11, 3), 1, i(11, 5, 7, 3), 0)
add("scatter.value", f(5, 11, 3), 1, i(11, 5, 7, 3), 1.5)

# --- views ---

for _from, _to in (
    ((5, 3, 7), [15, 7]), ((15, 7), [5, 3, 7]), ((5, 6), [5, 2, 3]), ((5, 12, 2), [5, 24]),
    ((1, 5, 1, 3), [5, 3]), ((6, 10), [4, 15]), ((4, 9), [2, 18]), ((5, 3), [1, -1]), ((1,), []),
    ((2, 3, 5, 4, 7), [6, 5, 28]),
):  # fmt: skip
    add("view.default", f(*_from), _to)
add("view.default", i(9, 5, 3, 2), [15, 2])
add("permute.default", f(5, 1, 3, 7), [0, -1, 1, 2])
add("alias.default", f(5, 1, 3))
each("t.default", lambda: (f(5, 3),))
add("t.default", f(5))
add("transpose.int", f(5, 3, 7), 0, -1)
add("transpose.int", f(5, 1, 7), -3, 1)
add("unsqueeze.default", f(5, 3), 1)
add("unsqueeze.default", f(5, 3), -1)
add("squeeze.dim", f(5, 1, 3), 1)
add("squeeze.dim", f(5, 1, 3), -1)
add("squeeze.dims", f(5, 1, 3, 1), [-1, 0])
add("squeeze.default", f(5, 1, 3))
add("expand.default", f(5, 1, 3), [5, 7, 3])
add("expand.default", f(3), [5, 7, -1])
add("expand.default", f(), [5, 3])
add("slice.Tensor", f(5, 11, 3), 1, 2, -2)
add("slice.Tensor", f(5, 11), -1, 0, 9223372036854775807, 2)
add("slice.Tensor", i(9, 5, 11), 0, 0, 5)
add("slice_backward.default", f(5, 7, 3), [5, 11, 3], 1, 2, 9, 1)
add("slice_backward.default", f(5, 3), [5, 3], 1, 0, 3, 1)
add("flip.default", f(5, 3, 7), [-2])
add("flip.default", f(5, 3, 7), [0, 2])
add("hap.fft_c2c.default", f(5, 3, 7, 2), [1], 1, True)
add("hap.fft_c2c.default", f(5, 3, 7, 2), [0, 2], 0, False)
add("hap.fft_r2c.default", f(5, 3, 7), [2, 1], 0, True)
add("hap.fft_r2c.default", f(5, 3, 7), [2], 2, False)
add("hap.fft_c2r.default", f(5, 4, 3, 2), [2, 1], 2, 7)
each("triu.default tril.default", lambda: (f(2, 5, 7), 1))
add("roll.default", f(5, 3, 7), [2], [-2])
add("roll.default", f(5, 3, 7), [2, -1], [0, 2])
add("roll.default", f(5, 3), [2])
add("select_scatter.default", f(5, 3, 7), f(5, 7), -2, 1)
add("slice_scatter.default", f(5, 11, 3), f(5, 4, 3), 1, 2, 9, 2)
add("slice_scatter.default", i(9, 5, 3), i(9, 2, 3), 0, 0, 2)
add("constant_pad_nd.default", f(5, 3, 7), [1, 2])
add("constant_pad_nd.default", f(5, 3, 7), [0, 0, 2, -1], 1.5)
add("constant_pad_nd.default", f(5, 3, 7), [0, 0, 1, -1])  # a shift: sizes do not change
add("select.int", f(5, 3, 7), 1, -1)
add("select.int", f(5, 3, 7), -1, 2)
add("select_backward.default", f(5, 7), [5, 3, 7], -2, 1)
add("unbind.int", f(5, 3, 7), 1)
add("unbind.int", f(3, 7))
add("split.Tensor", f(5, 11, 3), 4, -2)
add("split.Tensor", f(5, 7), 2)
add("split_with_sizes.default", f(5, 11, 3), [4, 2, 5], 1)
add("cat.default", [f(5, 2, 3), f(5, 7, 3), f(5, 1, 3)], -2)
add("cat.default", [f(2, 3), f(5, 3)])
add("cat.default", [i(9, 5, 2), f(5, 3)], 1)
add("stack.default", [f(5, 3), f(5, 3)], -1)
add("stack.default", [f(5, 3), f(5, 3), f(5, 3)])

# --- later ones stand here, so that the random values of the others stay ---

add("hardsigmoid.default", f(5, 3))
add("hardswish_backward.default", f(5, 3), f(5, 3))
add("hardsigmoid_backward.default", f(5, 3), 9 * f(5, 3))

# --- recurrences ---


def _recur(kind: str, gates: int, parts: int, *, reverse: bool = False) -> None:
    state = f(5, parts * 3)
    sums, weight = f(5, 2, gates * 3), f(gates * 3, 3)
    bias = f(gates * 3) if kind == "gru" else None
    add("hap.recurrence.default", sums, weight, bias, state, kind, reverse)
    states, saved = SAMPLES[-1].run()
    grad = torch.randn_like(states)  # type: ignore[arg-type]
    add("hap.recurrence_backward.default", grad, states, saved, weight, state, kind, reverse)


_recur("lstm", 4, 2)
_recur("lstm", 4, 2, reverse=True)
_recur("gru", 3, 1)
_recur("rnn_tanh", 1, 1)
_recur("rnn_relu", 1, 1, reverse=True)

# --- mixtures of experts ---

for _expert, _skip in ((i(5, 7), -2), (torch.tensor([0, 3, -1, 3, 3, -1, 2]), -1)):
    _x, _weight = f(7, 3), f(5, 3, 11)
    add("hap.expert_mm.default", _x, _weight, _expert, _skip)
    add("hap.expert_mm_backward.default", _x, f(7, 11), _expert, 5, _skip)

# --- operators of state space models, and others ---

add("softplus_backward.default", f(5, 3), f(5, 3), 1.0, 20.0)
add("mish_backward.default", f(5, 3), f(5, 3))
add("logit_backward.default", f(5, 3), pos(5, 3) / 9, 1e-6)
add("hardshrink_backward.default", f(5, 3), f(5, 3), 0.5)
for _op in ("max.dim", "min.dim"):
    add(_op, f(5, 3), 1)
    add(_op, f(5, 3), -2, True)
add("hap.full_lengths.default", torch.tensor([3, 6, 1]), 6)
add("index_add.default", f(5, 3), 0, i(5, 4), f(4, 3))
add("index_add.default", f(5, 7, 3), -2, i(7, 11), f(5, 11, 3))
add("index_add.default", f(5, 3), 0, torch.tensor(2), f(1, 3))
