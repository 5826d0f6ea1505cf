"""Linear layers, traced as views and products of matrices, as one operator each.

Autograd flattens the leading dims of a layer's input, transposes the weight, multiplies two matrices, and
unflattens the result. The gradients are computed likewise. :func:`linear_layers` replaces all this by one operator each:

* ``aten.linear``: ``[..., k]`` and a weight ``[n, k]`` give ``[..., n]``, with a bias or without;
* ``aten.matmul``: ``[..., k]`` and a matrix ``[k, n]`` give ``[..., n]``, as in an input's gradient;
* ``aten.tensordot``: ``[..., n]`` and ``[..., k]``, summed over all leading dims, give ``[n, k]``,
  as in a weight's gradient.

The graph has fewer nodes to search, a step fewer calls, and each leading dim can be sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from operator import mul

from hap.ir.graph import Node, Ref, Tensor, reading

LINEAR, MATMUL, TENSORDOT = (f"aten.{op}.default" for op in ("linear", "matmul", "tensordot"))
VIEW, TRANSPOSE, SUM = "aten.view.default", "aten.t.default", "aten.sum.dim_IntList"

VIEW_ENDS = ("_flat", "_whole", "_transposed")
"""Name endings of the new views: the traced node's name and one of these."""


def linear_layers(nodes: Iterable[Node], tensors: dict[str, Tensor]) -> list[Node]:
    """Return the nodes with these operators in place of products of flattened tensors.

    Results keep their names. New tensors are written to ``tensors``; views may have no reader left.

    Args:
        nodes: of a step, each after those that it reads.
    """
    layers = _Layers(tensors)
    for node in nodes:
        layers.add(node)
    return layers.nodes


class _Layers:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.nodes: list[Node] = []
        self._tensors = tensors
        self._whole: dict[str, str] = {}  # flattened matrix -> the tensor with leading dims
        self._flattened: dict[str, Node] = {}  # the same before its view is needed
        self._transposed: dict[str, str] = {}  # matrix -> the one that it is the transpose of
        self._same: dict[str, str] = {}  # tensor -> the equal one that is read in its place

    def add(self, node: Node) -> None:
        """Add a node, or the nodes that replace it."""
        node = reading(node, {name: self._same.get(name, name) for name in node.inputs})
        if node.op == VIEW:
            node = self._view(node)
        elif node.op == TRANSPOSE:
            self._transposed[str(node.outputs[0])] = node.inputs[0]
        elif node.op == SUM and node.args[1:] == ((0,),) and (x := self._whole_of(node.inputs[0])):
            node = replace(node, args=(Ref(x), tuple(range(len(self._shape(x)) - 1))))
        elif node.op in ("aten.mm.default", "aten.addmm.default") and not node.kwargs:
            *bias, a, b = node.inputs
            if x := self._whole_of(a) if self._per_column(bias, b) else None:
                self._rows(node, x, b, bias)
                return
            node = node if bias else self._over_rows(node, self._transposed.get(a, ""), b)
        self.nodes.append(node)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def _per_column(self, bias: list[str], matrix: str) -> bool:
        """Return whether a bias, if there is one, has a number for each column of the product."""
        return all(self._shape(name) == self._shape(matrix)[1:] for name in bias)

    def _view(self, node: Node) -> Node:
        """Let a view read the tensor with leading dims; remember it if it flattens such dims."""
        base, out = self._whole.get(node.inputs[0], node.inputs[0]), str(node.outputs[0])
        shape, made = self._shape(base), self._shape(out)
        node = replace(node, args=(Ref(base), *node.args[1:]))
        if shape == made:
            self._same[out] = base
        elif len(shape) > len(made) == 2 and shape[0] < made[0] in accumulate(shape, mul):
            self._flattened[out] = node
        return node

    def _whole_of(self, flat: str) -> str | None:
        """Return the tensor that has the elements of a matrix and leading dims in place of rows."""
        view = self._flattened.get(flat)
        if flat not in self._whole and view is not None:
            shape = self._shape(view.inputs[0])
            rows, size = self._shape(flat)
            lead = shape[: [*accumulate(shape, mul)].index(rows) + 1]  # of ``rows`` elements
            self._whole[flat] = view.inputs[0]
            if shape != (*lead, size):
                self._whole[flat] = self._new(view, VIEW, view.inputs[0], "_whole", (*lead, size))
        return self._whole.get(flat)

    def _rows(self, node: Node, x: str, matrix: str, bias: list[str]) -> None:
        """Add ``x @ matrix + bias``, and the view of it that flattens its leading dims."""
        flat = self._tensors[str(node.outputs[0])]
        shape = (*self._shape(x)[:-1], flat.shape[-1])
        weight = self._transposed.get(matrix)
        if bias and weight is None:
            weight = self._new(node, TRANSPOSE, matrix, "_transposed", self._shape(matrix)[::-1])
        whole = replace(flat, name=f"{flat.name}_whole", shape=shape)
        self._tensors[whole.name], self._whole[flat.name] = whole, whole.name
        args = tuple(map(Ref, (x, weight or matrix, *bias)))
        op = MATMUL if weight is None else LINEAR
        self.nodes.append(replace(node, op=op, args=args, outputs=(whole.name,)))
        view = replace(node, op=VIEW, args=(Ref(whole.name), flat.shape), name=f"{node.name}_flat")
        self.nodes.append(view)

    def _over_rows(self, node: Node, a: str, b: str) -> Node:
        """Return ``a.t() @ b`` as a sum over leading dims, if both have the same ones."""
        x, y = self._whole_of(a), self._whole_of(b)
        if x is None or y is None or self._shape(x)[:-1] != self._shape(y)[:-1]:
            return node
        dims = tuple(range(len(self._shape(x)) - 1))
        return replace(node, op=TENSORDOT, args=(Ref(x), Ref(y), dims, dims))

    def _new(self, beside: Node, op: str, of: str, end: str, shape: tuple[int, ...]) -> str:
        """Add a view of ``of`` and return its name."""
        name = f"{beside.outputs[0]}{end}"
        self._tensors[name] = replace(self._tensors[of], name=name, shape=shape)
        args = (Ref(of), shape) if op == VIEW else (Ref(of),)
        self.nodes.append(
            replace(beside, name=f"{beside.name}{end}", op=op, args=args, outputs=(name,))
        )
        return name
