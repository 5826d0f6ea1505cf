"""Complex tensors as pairs of real ones: a last dim of 2, as of ``torch.view_as_real``.

Rotary embeddings are often products of complex numbers, and Fourier transforms make them. Programs hold real
tensors alone: collectives, rules and prices need no complex case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from hap.capture import fourier
from hap.errors import ModelError

aten = torch.ops.aten

Call = Callable[..., fx.Node]
"""Adds a call of an operator to the graph: ``(operator, *arguments) -> node``."""


def real_pairs(graph: fx.Graph, where: Callable[[fx.Node], str]) -> None:
    """Replace complex tensors in a traced graph; a complex input or result becomes a pair, too.

    Args:
        where: the user's line that made a node.

    Raises:
        ModelError: an operator on complex tensors has no form for pairs here.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        complex_ins = [n for n in node.all_input_nodes if n in pairs]
        if node.op == "placeholder" and _is_complex(node):
            with graph.inserting_after(node):
                pairs[node] = graph.placeholder(node.name, type_expr=node.type)
            pairs[node].meta = {**node.meta, "val": torch.view_as_real(_value(node))}
        elif node.op == "output":  # gradients of complex parameters, and complex buffers
            for result in complex_ins:
                node.replace_input_with(result, pairs[result])
        elif not (complex_ins or _is_complex(node)):
            continue
        elif (form := _form(node, pairs)) is None:
            dtype = str(_value([*complex_ins, node][0]).dtype).removeprefix("torch.")
            raise ModelError(
                f"the step computes a tensor of dtype {dtype} ({node.target})", where=where(node),
                hint="compute with real and imaginary parts as real tensors",
            )  # fmt: skip
        else:
            with graph.inserting_before(node):
                made = form(_caller(graph, node), node, pairs)
            if _is_complex(node):
                pairs[node] = made
            else:
                node.replace_all_uses_with(made)
    for node in reversed(list(graph.nodes)):
        if node in pairs or any(n in pairs for n in node.all_input_nodes):
            graph.erase_node(node)


def _form(node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> Callable[..., fx.Node] | None:
    """Return how a node computes pairs; ``None`` if there is no way here."""
    form, args = FORMS.get(node.target), node.args
    drops_imaginary = node.target is aten._to_copy.default and not _is_complex(node)
    mixed = form in ALIKE and any(n not in pairs for n in node.all_input_nodes)
    with_number = form is _sum and any(not isinstance(x, fx.Node) for x in args)
    by_complex = form is _quotient and args[1] in pairs
    constant = any(isinstance(x, complex) for x in args)
    return None if drops_imaginary or mixed or with_number or by_complex or constant else form


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


def _caller(graph: fx.Graph, origin: fx.Node) -> Call:
    """Return the function that adds calls with the meta data of ``origin``."""
    mode = getattr(origin.meta["val"], "fake_mode", contextlib.nullcontext())

    def call(op: Any, *args: Any, **named: Any) -> fx.Node:
        node = graph.call_function(op, args, named)
        with mode:
            node.meta = {**origin.meta, "val": op(*fx.map_arg(args, _value), **named)}
        return node

    return call


def _pair(call: Call, pairs: dict[fx.Node, fx.Node], x: Any) -> Any:
    """Return the pair of a complex tensor; of a real one itself with a last dim of 1; numbers as they are."""
    if not isinstance(x, fx.Node):
        return x
    return pairs[x] if x in pairs else call(aten.unsqueeze.default, x, -1)


def _parts(call: Call, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the real and the imaginary part, each with a last dim of 1."""
    return call(aten.slice.Tensor, pair, -1, 0, 1), call(aten.slice.Tensor, pair, -1, 1, 2)


def _both(call: Call, real: fx.Node, imaginary: fx.Node) -> fx.Node:
    return call(aten.cat.default, [real, imaginary], -1)


def _product(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return ``a * b``, with the parts of the smaller tensor: a rotation is shared by batch and heads."""
    a, b = (_pair(call, pairs, x) for x in node.args)
    if not all(isinstance(x, fx.Node) and x in pairs for x in node.args):
        return call(aten.mul.Tensor, a, b)
    a, b = sorted((a, b), key=lambda x: -_value(x).numel())
    real, imaginary = _parts(call, b)
    turned = _both(call, call(aten.neg.default, imaginary), imaginary)
    crossed = call(aten.mul.Tensor, call(aten.flip.default, a, [-1]), turned)
    return call(aten.add.Tensor, call(aten.mul.Tensor, a, real), crossed)


def _polar(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    size, angle = (_pair(call, pairs, x) for x in node.args)
    rest = _both(call, call(aten.cos.default, angle), call(aten.sin.default, angle))
    return call(aten.mul.Tensor, size, rest)


def _conjugate(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    real, imaginary = _parts(call, _pair(call, pairs, node.args[0]))
    return _both(call, real, call(aten.neg.default, imaginary))


def _matrix_product(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """One real product: rows of pairs with a matrix that has the pair of each number, and of it times i."""
    given: Any = node.args
    dense = {"memory_format": torch.contiguous_format}
    a, b = (call(aten.clone.default, pairs[x], **dense) for x in given)
    real, imaginary = _parts(call, b)
    turned = _both(call, call(aten.neg.default, imaginary), real)
    rows = [call(aten.unsqueeze.default, x, _value(b).dim() - 2) for x in (b, turned)]
    both = call(aten.cat.default, rows, _value(b).dim() - 2)
    *batch, n, k, _ = _value(a).shape
    m = _value(b).shape[-2]
    left = call(aten.view.default, a, [*batch, n, 2 * k])
    made = call(node.target, left, call(aten.view.default, both, [*batch, 2 * k, 2 * m]))
    return call(aten.view.default, made, [*batch, n, m, 2])


def _sum(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    given: Any = node.args
    return call(node.target, *(pairs[x] for x in given), **node.kwargs)


def _quotient(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    return call(aten.div.Tensor, *(_pair(call, pairs, x) for x in node.args))


def _magnitude(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    x = pairs[node.all_input_nodes[0]]
    squares = call(aten.sum.dim_IntList, call(aten.mul.Tensor, x, x), [_value(x).dim() - 1])
    return call(aten.sqrt.default, squares)


def _direction(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return ``x / abs(x)``, and 0 for 0."""
    size = call(aten.unsqueeze.default, _magnitude(call, node, pairs), -1)
    zero = call(aten.eq.Scalar, size, 0.0)
    return call(aten.div.Tensor, pairs[node.all_input_nodes[0]], call(aten.add.Tensor, size, zero))


def _zeros(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """A new tensor, also one without values: another operator writes them."""
    made = _value(node)
    shape = [*made.shape, 2] if made.is_complex() else made.shape
    return call(aten.zeros.default, shape, dtype=made.dtype.to_real(), device=made.device)


def _padded(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    x, pads, *value = list[Any](node.args)
    return call(aten.constant_pad_nd.default, pairs[x], [0, 0, *pads], *value)


def _transform(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    x, *options = list[Any](node.args)
    return call(TRANSFORMS[node.target], pairs.get(x, x), *options)


def _of_parts(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    shape = [*_value(node).shape, 1]  # the two parts may be broadcast
    parts = (call(aten.expand.default, _pair(call, pairs, x), shape) for x in node.args)
    return _both(call, *parts)


def _converted(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """Another precision; a real tensor gets imaginary parts of 0."""
    x, options = node.args[0], dict(node.kwargs)
    dtype: Any = options.get("dtype") or _value(x).dtype
    options["dtype"] = dtype.to_real()
    made = call(aten._to_copy.default, _pair(call, pairs, x), **options)
    return made if x in pairs else _both(call, made, call(aten.zeros_like.default, made))


def _itself(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """The conversion between a complex tensor and its pair."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return call(aten.alias.default, pairs.get(x, x))


def _same(call: Call, node: fx.Node, pairs: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same operator, whose dims are counted from the front, on pairs."""
    args: list[Any] = list(node.args)
    first = args[0] if isinstance(args[0], fx.Node) else args[0][0]
    rank = _value(node if node.target in DIMS_OF_RESULT else first).dim()
    for n in COUNTED.get(node.target, ()):
        if n < len(args):
            args[n] = _from_front(args[n], rank)
    if node.target in SIZED:
        args[1] = [*args[1], 2]
    if node.target is aten.t.default:
        return call(aten.transpose.int, pairs[args[0]], 0, 1)
    if node.target is aten.roll.default and len(args) == 2:  # of all elements in order
        args[1] = [2 * shift for shift in args[1]]
    if node.target is aten.permute.default:
        args[1] = [*args[1], rank]
    return call(node.target, *fx.map_arg(args, lambda n: pairs.get(n, n)), **node.kwargs)


def _from_front(dims: Any, rank: int) -> Any:
    """Return dims counted from the front; a sum over no dims is one over all."""
    if isinstance(dims, int):
        return dims % rank
    return [d % rank for d in dims or range(rank)]


COUNTED: dict[Any, tuple[int, ...]] = {
    aten.slice.Tensor: (1,), aten.select.int: (1,), aten.unsqueeze.default: (1,),
    aten.transpose.int: (1, 2), aten.permute.default: (1,), aten.sum.dim_IntList: (1,),
    aten.slice_backward.default: (2,), aten.select_backward.default: (2,),
    aten.slice_scatter.default: (2,), aten.squeeze.dim: (1,), aten.squeeze.dims: (1,), aten.roll.default: (2,),
    aten.flip.default: (1,), aten.cat.default: (1,),
}  # fmt: skip
"""Operator -> its arguments that are dims."""

DIMS_OF_RESULT = (aten.unsqueeze.default, aten.select_backward.default)
"""Operators whose dims are those of the result; those of others are of the first argument."""

SIZED = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice_backward.default,
    aten.select_backward.default,
})  # fmt: skip
"""Operators whose second argument is a shape."""

ALIKE = (_same, _sum, _matrix_product)
"""Forms whose tensors must all be complex."""

TRANSFORMS: dict[Any, Any] = {
    aten._fft_c2c.default: fourier.C2C,
    aten._fft_r2c.default: fourier.R2C,
    aten._fft_c2r.default: fourier.C2R,
}

FORMS: dict[Any, Callable[[Call, fx.Node, dict[fx.Node, fx.Node]], fx.Node]] = {
    aten.polar.default: _polar,
    aten.complex.default: _of_parts,
    aten.view_as_complex.default: _itself,
    aten.view_as_real.default: _itself,
    aten.mul.Tensor: _product,
    aten.bmm.default: _matrix_product,
    aten.mm.default: _matrix_product,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.div.Tensor: _quotient,
    aten.abs.default: _magnitude,
    aten.sgn.default: _direction,
    aten._conj.default: _conjugate,
    aten._to_copy.default: _converted,
    aten.constant_pad_nd.default: _padded,
    **dict.fromkeys(TRANSFORMS, _transform),
    **dict.fromkeys(
        [
            aten.zeros.default,
            aten.new_zeros.default,
            aten.zeros_like.default,
            aten.new_empty_strided.default,
        ],
        _zeros,
    ),
    **dict.fromkeys(
        [
            *COUNTED,
            *SIZED,
            aten.alias.default,
            aten.clone.default,
            aten.neg.default,
            aten.mul.Scalar,
            aten.div.Scalar,
            aten.copy.default,
            aten.t.default,
        ],
        _same,
    ),
}
"""Operator -> how it computes pairs."""
