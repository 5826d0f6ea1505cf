"""Gradients that are reduced in half precision, which halves the bytes of their reductions.

Each float32 gradient is rounded to half precision; autograd widens it when it stores it in a
parameter. Sums over ranks commute with the rounding but for its error, so the search reduces before
or after it, and after it moves half the bytes. Training is then not equal to one device's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hap.ir.graph import Dtype, Graph, Node, Ref, Tensor


class Rounding(NamedTuple):
    """A way to round gradients: the dtype, and whether the next gradient gets what was lost."""

    dtype: str
    feedback: bool


ROUNDINGS = {
    "bf16-gradients": Rounding("bfloat16", feedback=False),
    "fp16-gradients": Rounding("float16", feedback=False),
    "bf16-gradients-with-feedback": Rounding("bfloat16", feedback=True),
    "fp16-gradients-with-feedback": Rounding("float16", feedback=True),
}
"""By the names that users allow them by."""

ROUND = "aten._to_copy.default"
ROUND_WITH_FEEDBACK = "hap.rounded_with_feedback.default"


def with_half_gradients(graph: Graph, name: str) -> Graph:
    """Return the graph with gradients in half precision in place of float32 ones.

    Args:
        name: an entry of :data:`ROUNDINGS`; empty for the graph itself.
    """
    if not name:
        return graph
    rounding = ROUNDINGS[name]
    tensors, nodes, rounded = dict(graph.tensors), list(graph.nodes), {}
    for tensor in dict.fromkeys(graph.gradients.values()):
        exact = graph.tensors[tensor]
        if exact.dtype != "float32":
            continue
        half = rounded[tensor] = f"{tensor}_half"
        assert half not in tensors
        tensors[half] = Tensor(name=half, shape=exact.shape, dtype=rounding.dtype)
        made, dtype = graph.producer.get(tensor), Dtype(rounding.dtype)
        nodes.append(
            Node(
                name=half, op=ROUND_WITH_FEEDBACK if rounding.feedback else ROUND,
                # The last argument names what was lost here.
                args=(Ref(tensor), dtype, half) if rounding.feedback else (Ref(tensor),),
                kwargs=() if rounding.feedback else (("dtype", dtype),),
                outputs=(half,), module=made.module if made else "",
            )
        )  # fmt: skip
    outputs = tuple(
        replace(o, tensor=rounded.get(o.tensor, o.tensor)) if o.role == "gradient" else o
        for o in graph.outputs
    )
    return replace(graph, nodes=tuple(nodes), outputs=outputs, tensors=tensors)
