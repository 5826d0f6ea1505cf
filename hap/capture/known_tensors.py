"""Tensors whose numbers a trace knows and whose shapes depend on them: constants of the program.

``torch.unique_consecutive``, ``torch.repeat_interleave`` by a tensor, and an index by a mask make as many
elements as the numbers say. Where these are made of Python's numbers, the result is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hap.capture import tensor_constants, torch_private


def name_known(traced: fx.GraphModule) -> None:
    """Replace calls whose results have shapes made of known numbers, also inside of checkpoints."""
    for module in [m for m in traced.modules() if isinstance(m, fx.GraphModule)]:
        known: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if torch_private.known_value(value) is None or not known.keys() >= {*node.all_input_nodes}:
                continue
            with torch_private.no_modes():
                known[node] = _call(node, known)
            if node.all_input_nodes and _shape_depends_on_data(node, known):
                node.op, node.target = "call_function", tensor_constants.tensor
                node.args, node.kwargs = (torch_private.values(known[node]),), {"dtype": known[node].dtype}
        module.recompile()


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return what a call of the graph returns for these values of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _shape_depends_on_data(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    with torch_private.no_modes(), torch_private.fake_mode():
        bare = {
            n: torch.empty(values[n].shape, dtype=values[n].dtype) for n in node.all_input_nodes
        }
        try:
            _call(node, bare)
        except torch_private.data_dependent_errors():
            return True
    return False
