"""Complex tensors as pairs of real ones: a last dim of 2, as of ``torch.view_as_real``.

Rotary embeddings are often products of complex numbers. Programs hold real tensors alone: collectives, rules
and prices need no complex case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from hap.errors import ModelError

aten = torch.ops.aten

Call = Callable[..., fx.Node]
"""Adds a call of an operator to the graph: ``(operator, *arguments) -> node``."""


def real_pairs(graph: fx.Graph, where: Callable[[fx.Node], str]) -> None:
    """Replace complex tensors in a traced graph; a complex input becomes a pair, too.

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
        elif not (complex_ins or _is_complex(node)):
            continue
        elif (form := _form(node)) is None:
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


def _form(node: fx.Node) -> Callable[..., fx.Node] | None:
    """Return how a node computes pairs; ``None`` if there is no way here."""
    drops_imaginary = node.target is aten._to_copy.default and not _is_complex(node)
    if drops_imaginary or any(isinstance(x, complex) for x in node.args):
        return None
    return FORMS.get(node.target)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


def _caller(graph: fx.Graph, origin: fx.Node) -> Call:
    """Return the function that adds calls with the meta data of ``origin``."""

    def call(op: Any, *args: Any, **named: Any) -> fx.Node:
        node = graph.call_function(op, args, named)
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
    rank = _value(node if node.target in DIMS_OF_RESULT else args[0]).dim()
    for n in COUNTED.get(node.target, ()):
        if n < len(args):
            args[n] = _from_front(args[n], rank)
    if node.target in SIZED:
        args[1] = [*args[1], 2]
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
}  # fmt: skip
"""Operator -> its arguments that are dims."""

DIMS_OF_RESULT = (aten.unsqueeze.default, aten.select_backward.default)
"""Operators whose dims are those of the result; those of others are of the first argument."""

SIZED = frozenset({
    aten.view.default, aten.expand.default, aten.slice_backward.default, aten.select_backward.default,
})  # fmt: skip
"""Operators whose second argument is a shape."""

FORMS: dict[Any, Callable[[Call, fx.Node, dict[fx.Node, fx.Node]], fx.Node]] = {
    aten.polar.default: _polar,
    aten.complex.default: _of_parts,
    aten.view_as_complex.default: _itself,
    aten.view_as_real.default: _itself,
    aten.mul.Tensor: _product,
    aten._conj.default: _conjugate,
    aten._to_copy.default: _converted,
    **dict.fromkeys(
        [*COUNTED, *SIZED, aten.alias.default, aten.clone.default, aten.neg.default], _same
    ),
}
"""Operator -> how it computes pairs."""
