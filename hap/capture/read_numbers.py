"""Numbers that Python reads from tensors, such as ``mask.sum().item()`` and ``len(x[mask])``: tensors again.

The tracer keeps such a number as a symbol. As a tensor of no dims it can be computed with, for each batch anew; where
Python needs the number itself, for a size or a branch, a forward is no single graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from hap.capture.padding.functions import count


def number(t: Tensor) -> Tensor:
    """Return the only element of a tensor, without its gradient."""
    return t.detach().reshape(())


def _float(t: Any) -> Any:
    return t.to(torch.get_default_dtype()) if isinstance(t, Tensor) else float(t)


def _whole(t: Any) -> Any:
    return t.trunc().long() if isinstance(t, Tensor) else int(t)


def _quotient(a: Any, b: Any) -> Any:
    """Divide as Python does: whole numbers in double precision."""
    return (a.double() if isinstance(a, Tensor) and not a.is_floating_point() else a) / b


def _as_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a number in the precision of a result, as Python's numbers have none."""
    return x.to(dtype) if x.is_floating_point() else x


def _largest(a: Any, b: Any) -> Any:
    return a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a)


def _least(a: Any, b: Any) -> Any:
    return a.clamp(max=b) if isinstance(a, Tensor) else b.clamp(max=a)


OF_NUMBERS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: _float, torch.sym_int: _whole, torch.sym_max: _largest, torch.sym_min: _least, torch.sym_not: torch.logical_not,
    operator.not_: torch.logical_not, operator.truediv: _quotient, math.sqrt: torch.sqrt, torch.sym_sqrt: torch.sqrt,
}  # fmt: skip
"""Functions of numbers that the tracer writes -> the same of tensors."""


def numbers_as_tensors(traced: fx.GraphModule) -> None:
    """Replace numbers that are read, in graphs that keep any; checks of them are left out."""
    for graph in (m.graph for m in traced.modules() if isinstance(m, fx.GraphModule)):
        numbers = dict.fromkeys(
            n
            for n in graph.nodes
            if (n.op == "call_method" and n.target == "item") or n.target is count
        )
        for node in graph.nodes:  # what Python computes of numbers alone
            given = node.all_input_nodes
            if node.op == "call_function" and given and all(n in numbers for n in given):
                numbers[node] = None
        for node in reversed(numbers):
            if not node.users:
                graph.erase_node(node)
            elif node.op == "call_method":
                node.op, node.target = "call_function", number
        for node in numbers:
            node.target = OF_NUMBERS.get(node.target, node.target)
            node.meta.pop("unbacked_bindings", None)
        for node in list(graph.nodes):
            made = node.meta.get("example_value")
            if node in numbers or not isinstance(made, Tensor) or not made.is_floating_point():
                continue
            for given in {*node.all_input_nodes} & numbers.keys():
                with graph.inserting_before(node):
                    node.replace_input_with(given, graph.call_function(_as_in, (given, made.dtype)))
