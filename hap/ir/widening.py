"""Casts of the backward to a wider dtype, as autocast makes of gradients in half precision."""

from __future__ import annotations

from hap.ir.graph import FREE, Graph, Node
from hap.ir.microbatch import is_sum


def widened_later(graph: Graph) -> frozenset[str]:
    """Return the tensors that nothing reads but casts to a wider dtype, or views before these."""
    found = set[str]()
    for name in reversed(graph.defined):  # readers first
        readers = graph.consumers[name]
        if readers and all(_widens(n, graph) or _passes_on(n, found) for n in readers):
            found.add(name)
    return frozenset(found)


def narrow_sums(graph: Graph) -> list[str]:
    """Return the sums over the microbatches that are cast to a wider dtype afterwards.

    PyTorch casts a microbatch's gradient first, and accumulates in the parameter's dtype.
    """
    later = widened_later(graph)
    return [o for n in graph.nodes if is_sum(n) for o in n.outputs if o in later]


def _widens(node: Node, graph: Graph) -> bool:
    """Return whether an operator of the backward casts a floating-point tensor to a wider dtype."""
    if node.name not in graph.backward or len(node.inputs) != 1 or len(node.outputs) != 1:
        return False
    before, after = (graph.tensors[str(name)] for name in (*node.inputs, *node.outputs))
    return (
        "float" in before.dtype and "float" in after.dtype
        and before.shape == after.shape and before.nbytes < after.nbytes
    )  # fmt: skip


def _passes_on(node: Node, found: set[str]) -> bool:
    """Return whether an operator is a view of which all results are among those found."""
    return node.op in FREE and all(o in found for o in node.outputs if o)
