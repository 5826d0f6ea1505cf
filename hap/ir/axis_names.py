"""Names of axes for people: ``batch``, ``encoder.layer.3.attention heads``, ``lm_head out``."""

from __future__ import annotations

from hap.ir.axes import Dim
from hap.ir.graph import Graph
from hap.ir.mesh import origin


def axis_names(graph: Graph) -> dict[Dim, str]:
    """Return names for some dims, the most specific first; an axis takes the first that fits."""
    names: dict[Dim, str] = {}
    for dim, name in enumerate(("batch", "sequence")):
        for i in graph.role("input"):
            tensor = graph.tensors[i.tensor]
            # Only token numbers certainly have a sequence dim; an image has channels there.
            if dim < len(tensor.shape) and (dim == 0 or "float" not in tensor.dtype):
                names.setdefault((i.tensor, dim), name)
    for i in graph.role("received"):  # by a stage, for a microbatch: cut over time along the batch
        over_time = origin(i.tensor).placement
        if over_time.sharded:
            names.setdefault((i.tensor, over_time.dim), "batch")
    for node in graph.nodes:
        out = node.outputs[0]
        if node.op == "hap.sdpa.default":
            names.setdefault((node.inputs[0], 1), f"{node.module or node.name} heads")
            if graph.role("received"):
                names.setdefault((node.inputs[0], 2), "sequence")
        if node.op == "aten.embedding.default" and out is not None:
            names.setdefault((out, len(graph.tensors[out].shape) - 1), "hidden")
    for i in graph.role("parameter"):
        path, _, leaf = i.target.rpartition(".")
        for dim in range(len(graph.tensors[i.tensor].shape)):
            side = ("out", "in")[dim] if dim < 2 else f"dim {dim}"
            names.setdefault((i.tensor, dim), f"{path or leaf} {side}")
    return names
