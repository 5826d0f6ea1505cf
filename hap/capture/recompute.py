"""Recomputation of activations in the backward instead of saving them.

The forward's operators fall into *regions*. Outputs of a region are kept; other values that the
backward reads are computed again, by copies of the operators, right before they are read. This is
``torch.utils.checkpoint`` (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016)
as a rewriting of the graph, so that the search places and prices the copies like all operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hap.ir.graph import Graph, Node, Ref, Tensor, reading, renamed_in_backward
from hap.ir.graph_builder import RANDOM

DROPOUT = "aten.native_dropout.default"

PRODUCTS = frozenset({
    "aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.linear.default",
    "aten.matmul.default", "aten.tensordot.default", "aten.convolution.default",
    "hap.expert_mm.default", "hap.sdpa.default", "hap.recurrence.default",
})  # fmt: skip
"""Operators of the forward whose arithmetic takes longer than reading their results."""

WAYS = ("cheap", "blocks")
"""Arguments of :func:`chosen`, the least recomputation first."""


class Region(NamedTuple):
    """The region of a node, and whether its results are kept all the same."""

    number: int
    kept: bool = False


def chosen(graph: Graph, way: str) -> dict[str, Region]:
    """Return regions of the forward by the numbered blocks of its modules, such as ``layers.3``.

    ``blocks`` keeps only the inputs of a block. ``cheap`` also keeps the results of all
    products, so that recomputation is memory traffic alone.
    """
    numbers: dict[str, int] = {}
    found = {}
    for node in graph.nodes:
        block = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", node.module)
        if block:
            number = numbers.setdefault(block[0], len(numbers))
            found[node.name] = Region(number, way == "cheap" and node.op in PRODUCTS)
    return found


def recomputed(graph: Graph, regions: Mapping[str, Region]) -> Graph:
    """Return the graph with a backward that recomputes its inputs from inside of regions.

    Random values are no function of their inputs: a dropout's mask is kept, and its result is
    recomputed from the mask.

    Args:
        regions: node -> its region, for some of the forward's nodes.
    """
    if not regions:
        return graph
    copies = _Copies(graph, regions)
    return renamed_in_backward(graph, copies.of, copies.tensors)


class _Copies:
    """Makes copies of tensors, and of the tensors that they depend on, on demand."""

    def __init__(self, graph: Graph, regions: Mapping[str, Region]) -> None:
        self.tensors = dict(graph.tensors)
        self._graph = graph
        self._regions = {n: r for n, r in regions.items() if n not in graph.backward}
        self._made: dict[str, str] = {}
        written = {o.target for o in graph.outputs if o.role == "buffer"}
        # The step may have written them when the backward runs.
        self._written = {i.tensor for i in graph.role("buffer") if i.target in written}
        self._inside = {
            out
            for node in graph.nodes
            if node.name in self._regions
            for out in node.outputs
            if out is not None and self._stays_inside(node, out)
        }

    def _stays_inside(self, node: Node, out: str) -> bool:
        """Return whether only its own region and the backward read it."""
        if node.op in RANDOM and not self._has_mask(node, out):
            return False
        if self._written.intersection(node.inputs):
            return False
        region = self._regions[node.name]
        users = [u.name for u in self._graph.consumers[out] if u.name not in self._graph.backward]
        beside = [self._regions[name].number for name in users if name in self._regions]
        return not region.kept and beside == [region.number] * len(users)

    @staticmethod
    def _has_mask(node: Node, out: str) -> bool:
        return node.op == DROPOUT and out == node.outputs[0] and node.outputs[1] is not None

    def of(self, name: str, nodes: list[Node]) -> str:
        """Return the backward's value for ``name``; append new nodes to ``nodes``."""
        if name not in self._inside:
            return name
        if name not in self._made:
            node = self._graph.producer[name]
            inputs = {i: self.of(i, nodes) for i in node.inputs}
            if node.op == DROPOUT:
                nodes.append(self._dropped(node, inputs))
            else:
                outs = tuple(o if o is None else self._new(o) for o in node.outputs)
                nodes.append(reading(node, inputs, f"{node.name}_redone", outs))
        return self._made[name]

    def _dropped(self, node: Node, inputs: Mapping[str, str]) -> Node:
        """Return dropout by the kept mask, which is the operator of dropout's backward."""
        out, mask = node.outputs
        assert out is not None
        assert mask is not None
        p = node.args[1]
        args = (Ref(inputs[node.inputs[0]]), Ref(mask), 1 / (1 - p) if p < 1 else 0.0)
        return Node(
            name=f"{node.name}_redone", op="aten.native_dropout_backward.default", args=args,
            outputs=(self._new(out),), source=node.source, module=node.module,
        )  # fmt: skip

    def _new(self, name: str) -> str:
        copy, tensor = f"{name}_redone", self.tensors[name]
        assert copy not in self.tensors
        self.tensors[copy] = Tensor(name=copy, shape=tensor.shape, dtype=tensor.dtype)
        self._made[name] = copy
        return copy
