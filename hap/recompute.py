"""Activations that the backward makes again in place of keeping them.

The forward's operators fall into *regions*. What leaves a region is kept; what the backward
reads from inside is made again, by copies of the operators, right before it is read. That is
``torch.utils.checkpoint`` (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016)
as a rewriting of the graph, so that the search places and prices the copies like all else.
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.graph import Graph, Node, Ref, Tensor, reading
from hap.peephole import DISTINCT

DROPOUT = "aten.native_dropout.default"


def recomputed(graph: Graph, regions: Mapping[str, int]) -> Graph:
    """The graph whose backward makes again what it reads from inside of a region.

    Random values are no function of their inputs: a mask is kept, and what was dropped out is
    made again from it.

    Args:
        regions: node -> its region, for some of the forward's nodes.
    """
    if not regions:
        return graph
    copies = _Copies(graph, regions)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in graph.backward:
            names = {name: copies.of(name, nodes) for name in node.inputs}
            node = reading(node, names)
        nodes.append(node)
    return Graph(
        inputs=graph.inputs, nodes=tuple(nodes), outputs=graph.outputs, tensors=copies.tensors
    )


class _Copies:
    """Makes the copies of tensors, and of what they are made of, as they are asked for."""

    def __init__(self, graph: Graph, regions: Mapping[str, int]) -> None:
        self.tensors = dict(graph.tensors)
        self._graph = graph
        self._regions = {n: r for n, r in regions.items() if n not in graph.backward}
        self._made: dict[str, str] = {}
        self._inside = {
            out
            for node in graph.nodes
            if node.name in self._regions
            for out in node.outputs
            if out is not None and self._stays_inside(node, out)
        }

    def _stays_inside(self, node: Node, out: str) -> bool:
        """Is it read in its own region and the backward alone?"""
        if node.op in DISTINCT and not self._has_mask(node, out):
            return False
        region = self._regions[node.name]
        return all(
            user.name in self._graph.backward or self._regions.get(user.name) == region
            for user in self._graph.consumers[out]
        )

    @staticmethod
    def _has_mask(node: Node, out: str) -> bool:
        return node.op == DROPOUT and out == node.outputs[0] and node.outputs[1] is not None

    def of(self, name: str, nodes: list[Node]) -> str:
        """What the backward reads in place of ``name``; new nodes are appended to ``nodes``."""
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
        """Dropout by the mask that was kept: the backward's operator says just that."""
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
