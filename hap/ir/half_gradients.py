"""Gradients that are reduced in half precision, which halves the bytes of their reductions.

Each float32 gradient is rounded to half precision and widened again. Sums over ranks commute with
both casts but for rounding, so the search may reduce before, between or after them; between them a
reduction moves half the bytes. The program is then not equal to one device: it rounds gradients.
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

CAST = "aten._to_copy.default"
ROUND_WITH_FEEDBACK = "hap.rounded_with_feedback.default"


def with_half_gradients(graph: Graph, name: str) -> Graph:
    """Return the graph with float32 gradients that are rounded and widened.

    Args:
        name: an entry of :data:`ROUNDINGS`; empty for the graph itself.
    """
    if not name:
        return graph
    rounding = ROUNDINGS[name]
    tensors, nodes, widened = dict(graph.tensors), list(graph.nodes), {}
    for tensor in dict.fromkeys(graph.gradients.values()):
        exact = graph.tensors[tensor]
        if exact.dtype != "float32":
            continue
        half, wide = f"{tensor}_half", f"{tensor}_widened"
        assert not {half, wide} & tensors.keys()
        tensors[half] = Tensor(name=half, shape=exact.shape, dtype=rounding.dtype)
        tensors[wide] = Tensor(name=wide, shape=exact.shape, dtype="float32")
        made = graph.producer.get(tensor)
        nodes += [
            _rounded(tensor, half, rounding, made.module if made else ""),
            _cast(half, wide, "float32", made.module if made else ""),
        ]
        widened[tensor] = wide
    outputs = tuple(
        replace(o, tensor=widened.get(o.tensor, o.tensor)) if o.role == "gradient" else o
        for o in graph.outputs
    )
    return replace(graph, nodes=tuple(nodes), outputs=outputs, tensors=tensors)


def _rounded(tensor: str, half: str, rounding: Rounding, module: str) -> Node:
    if not rounding.feedback:
        return _cast(tensor, half, rounding.dtype, module)
    args = (Ref(tensor), Dtype(rounding.dtype), half)  # the last one names what was lost here
    return Node(name=half, op=ROUND_WITH_FEEDBACK, args=args, outputs=(half,), module=module)


def _cast(tensor: str, made: str, dtype: str, module: str) -> Node:
    return Node(
        name=made, op=CAST, args=(Ref(tensor),), kwargs=(("dtype", Dtype(dtype)),),
        outputs=(made,), module=module,
    )  # fmt: skip
