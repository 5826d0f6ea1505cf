"""Aliases of parameters for the backward, so that it may gather them a second time.

If both passes read the same value of a parameter, a replica gathered for the forward must stay
in memory until the backward. So the backward reads an alias of the parameter, its *twin*, which
costs nothing and may have another placement: that of the forward's replica, or that of the stored
shards, which are then gathered a second time (ZeRO, stage 3: Rajbhandari et
al., SC 2020).
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.ir.graph import Graph, Node, Ref, Tensor, reading, renamed_in_backward

ALIAS = "aten.alias.default"

# Views of parameters; each is made anew for the backward.
_LOOKS = frozenset({
    "aten.view.default", "aten.t.default", "aten.transpose.int", "aten.permute.default",
})  # fmt: skip


def with_backward_aliases(graph: Graph) -> Graph:
    """Return the graph with twins of all parameters of two or more dims that both passes read.

    Vectors (biases, weights of norms) are too small for a second gather to be worth its start.
    """
    parameters = {i.tensor for i in graph.role("parameter") if _large(graph.tensors[i.tensor])}
    read = {name for n in graph.nodes if n.name not in graph.backward for name in n.inputs}
    twins = _BackwardAliases(graph, parameters & read)
    return renamed_in_backward(graph, twins.of, twins.tensors)


def backward_alias_of(graph: Graph) -> Mapping[str, str]:
    """Return parameter -> its twin."""
    parameters = {i.tensor for i in graph.role("parameter")}
    return {
        n.inputs[0]: str(n.outputs[0])
        for n in graph.nodes if n.op == ALIAS and n.inputs[0] in parameters
    }  # fmt: skip


def _large(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1


class _BackwardAliases:
    """Makes the twins of parameters, and of the forward's views of them, on demand."""

    def __init__(self, graph: Graph, parameters: set[str]) -> None:
        self.tensors = dict(graph.tensors)
        self._graph, self._parameters = graph, parameters
        self._made: dict[str, str] = {}

    def of(self, name: str, nodes: list[Node]) -> str:
        """Return the backward's value for ``name``; append new nodes to ``nodes``."""
        if name in self._made:
            return self._made[name]
        view = self._graph.producer.get(name)
        if name in self._parameters:
            twin = self._new(name)
            nodes.append(Node(name=twin, op=ALIAS, args=(Ref(name),), outputs=(twin,)))
        elif view and view.op in _LOOKS and view.name not in self._graph.backward:
            base = self.of(view.inputs[0], nodes)
            if base == view.inputs[0]:
                return name  # a view of another tensor
            twin = self._new(name)
            nodes.append(reading(view, {view.inputs[0]: base}, twin, (twin,)))
        else:
            return name
        self._made[name] = twin
        return twin

    def _new(self, name: str) -> str:
        twin, tensor = f"{name}_again", self.tensors[name]
        assert twin not in self.tensors
        self.tensors[twin] = Tensor(name=twin, shape=tensor.shape, dtype=tensor.dtype)
        return twin
