"""Functions that compute each entry of a result from the entries at the same place."""

from __future__ import annotations

import torch

from hap.capture.padding import functions
from hap.capture.padding.dims import Mask, Refused, Trace, name_of, writes


def is_entrywise(name: str) -> bool:
    """Return whether a function computes each entry of its result from those at the same place."""
    if name in CONVERSIONS | ACTIVATIONS:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(
        torch.Tag.pointwise in t and torch.Tag.nondeterministic_seeded not in t for t in tags
    )


CONVERSIONS = frozenset({
    "float", "double", "half", "bfloat16", "long", "int", "bool", "to", "type", "type_as", "detach",
    "clone", "contiguous", "zeros_like", "ones_like", "full_like", "empty_like", "zero", "fill"
})  # fmt: skip
"""Functions that make new entries, or entries of another kind, in the shape of their first tensor."""

ACTIVATIONS = frozenset({
    "relu6", "hardtanh", "softsign", "tanhshrink", "logsigmoid", "nan_to_num", "masked_fill", "where"
})  # fmt: skip
"""Functions of entries that are not tagged as such."""

SMOOTH = frozenset({
    "add", "sub", "mul", "neg", "relu", "gelu", "silu", "tanh", "sigmoid", "eq", "ne", "lt", "le", "gt",
    "ge", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not", "where",
    "masked_fill", "clamp", "maximum", "minimum", "abs"
})  # fmt: skip
"""Functions of entries with finite derivatives at all numbers; the others get harmless ones in padding."""


def entrywise(trace: Trace) -> None:
    """Check that padding meets padding of the same mask; make it harmless where that matters."""
    node, name = trace.node, name_of(trace.node)
    if name in CONVERSIONS:
        return
    dims = trace.dims(node)
    for given in node.all_input_nodes:
        pairs = zip(reversed(trace.dims(given)), reversed(dims), strict=False)
        for dim, of_result in pairs:
            if isinstance(of_result, Mask) and dim is not of_result and dim != 1:
                raise Refused("it combines these rows with other rows")
    if name in SMOOTH:
        return
    written = node.args[0] if writes(node) else None
    if written is not None and name != "div":
        raise Refused("it writes in place")
    safe = {n: trace.call(functions.harmless, n, trace.inside(n))
            for n in node.all_input_nodes if n is not written and trace.is_padded(n)}  # fmt: skip
    node.args = torch.fx.node.map_arg(node.args, lambda n: safe.get(n, n))
    node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: safe.get(n, n))
