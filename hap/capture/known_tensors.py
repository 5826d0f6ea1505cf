"""Tensors whose numbers a trace knows and whose shapes depend on them: constants of the program.

``torch.unique_consecutive``, ``torch.repeat_interleave`` by a tensor, and an index by a mask make as many
elements as the numbers say. Where these are made of Python's numbers, the result is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hap.capture import tensor_constants, torch_private


def name_known(traced: fx.GraphModule) -> None:
    """Replace calls whose results have shapes made of known numbers, also inside of checkpoints."""
    for module in [m for m in traced.modules() if isinstance(m, fx.GraphModule)]:
        known: dict[fx.Node, Any] = {}
        constant: set[fx.Node] = set()
        for node in module.graph.nodes:
            value = _known(node.meta.get("example_value"))
            if value is None or not known.keys() >= {*node.all_input_nodes}:
                continue
            with torch_private.no_modes():  # later calls may write into it
                called = node.op.startswith("call_")  # else an input of a checkpoint
                known[node] = _call(node, known) if called else value.clone()
            if called and (
                {*node.all_input_nodes} & constant or _shape_depends_on_data(node, known)
            ):
                constant.add(node)  # a tuple, or a constant tensor
            if node in constant and isinstance(known[node], torch.Tensor):
                constant.remove(node)
                node.op, node.target = "call_function", tensor_constants.tensor
                node.args = (torch_private.values(known[node]),)
                node.kwargs = {"dtype": known[node].dtype}
        for node in reversed(module.graph.nodes):
            if node in constant and not node.users:
                module.graph.erase_node(node)
        module.recompile()


def _known(example: Any) -> Any:
    """Return the numbers of a result; of several ones if all are known."""
    if not isinstance(example, tuple | list):
        return torch_private.known_value(example)
    found = tuple(map(torch_private.known_value, example))
    return found if found and all(f is not None for f in found) else None


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return what a call of the graph returns for these values of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _bare(value: Any) -> Any:
    tensor = isinstance(value, torch.Tensor)
    return torch.empty(value.shape, dtype=value.dtype) if tensor else value


def _shape_depends_on_data(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a call fails for tensors without data."""
    with torch_private.no_modes(), torch_private.fake_mode():
        bare = {n: pytree.tree_map(_bare, values[n]) for n in node.all_input_nodes}
        try:
            _call(node, bare)
        except torch_private.data_dependent_errors():
            return True
    return False
