"""Names of axes for people: ``batch``, ``encoder.layer.3.attention heads``, ``vocabulary``."""

from __future__ import annotations

from hap.axes import Dim
from hap.graph import Graph


def axis_names(graph: Graph) -> dict[Dim, str]:
    """Names for some dims, the most telling first; an axis takes the first that it contains."""
    names: dict[Dim, str] = {}
    order = ["batch", "sequence"]
    for dim, name in enumerate(order):
        for i in graph.role("input"):
            shape = graph.tensors[i.tensor].shape
            floats = "float" in graph.tensors[i.tensor].dtype
            if dim < len(shape) and (dim == 0 or not floats):
                names.setdefault((i.tensor, dim), name)
    for node in graph.nodes:
        if node.op == "hap.sdpa.default":
            names.setdefault((node.inputs[0], 1), f"{_parent(node.module) or node.name} heads")
        if node.op == "aten.embedding.default":
            names.setdefault((node.outputs[0] or node.name, -1), "hidden")
            rank = len(graph.tensors[node.outputs[0]].shape) if node.outputs[0] else 0
            names.setdefault((node.outputs[0] or node.name, rank - 1), "hidden")
    for i in graph.role("parameter"):
        path, _, leaf = i.target.rpartition(".")
        shape = graph.tensors[i.tensor].shape
        for dim in range(len(shape)):
            side = "out" if dim == 0 else "in" if dim == 1 else f"dim {dim}"
            names.setdefault((i.tensor, dim), f"{path or leaf} {side}")
    return names


def _parent(module: str) -> str:
    return module
