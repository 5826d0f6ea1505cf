"""Random numbers apart from what reads them, so that the rest can be compiled or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hap.capture import tensor_constants, torch_private  # noqa: F401  (registers hap.constant)
from hap.runtime.context import Context, kept_scale
from hap.runtime.native_calls import with_native_calls

DRAWS = frozenset({"mask", "draw"})
"""Methods of the context that draw random numbers."""

CONSTANT = torch.ops.hap.constant.default

Boxed = Callable[[Context, list[Any]], Sequence[Tensor]]
"""A function ``(ctx, arguments)`` that empties the list, so that each can be freed after its last use."""


def boxed(graph: fx.Graph) -> Boxed:
    """Return the function of an emitted graph, which is modified."""
    with_native_calls(graph)
    graph.set_codegen(torch_private.BoxedCode())
    function: Boxed = fx.GraphModule(torch.nn.Module(), graph).forward
    return function


class DrawsFirst:
    """A forward or backward ``(ctx, args)`` whose random numbers and constants are made before it.

    Args:
        graph: the emitted graph; it is modified.
        make: returns the function of what remains of the graph.
    """

    def __init__(
        self, graph: fx.Graph, device: torch.device, make: Callable[[fx.Graph], Boxed] = boxed
    ) -> None:
        draw_masks_apart(graph, device)
        ctx = next(iter(graph.nodes))
        drawn = [
            n for n in graph.nodes
            if n.op == "call_method" and n.args[0] is ctx and n.target in DRAWS
        ]  # fmt: skip
        fixed = [n for n in graph.nodes if n.op == "call_function" and n.target is CONSTANT]
        self.draws = [_draw(node) for node in drawn]
        self.constants: list[Tensor] = [CONSTANT(*node.args, **node.kwargs) for node in fixed]
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        for number, node in enumerate((*drawn, *fixed)):
            with graph.inserting_after(last):
                last = graph.placeholder(f"made_{number}")
            node.replace_all_uses_with(last)
            graph.erase_node(node)
        self.run = make(graph)

    def __call__(self, ctx: Context, args: list[Tensor]) -> Sequence[Tensor]:
        args.extend(draw(ctx) for draw in self.draws)
        args.extend(self.constants)
        return self.run(ctx, args)


def _draw(node: fx.Node) -> Callable[[Context], Tensor]:
    name, args, kwargs = str(node.target), node.args[1:], node.kwargs
    return lambda ctx: getattr(ctx, name)(*args, **kwargs)


def draw_masks_apart(graph: fx.Graph, device: torch.device) -> None:
    """Split each dropout into a call that draws its mask and a product that can be compiled."""
    ctx = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op != "call_method" or node.args[0] is not ctx:
            continue
        with graph.inserting_before(node):
            if node.target == "dropout":
                x, p, *place = _args(node)[1:]
                mask = graph.call_method("mask", (ctx, node.meta["shape"], device, p, *place))
                _replace_results(node, [_scaled(graph, ctx, x, mask, kept_scale(p), device), mask])
            elif node.target == "dropout_backward":
                x, mask, by = _args(node)[1:]
                node.replace_all_uses_with(_scaled(graph, ctx, x, mask, by, device))
            else:
                continue
        graph.erase_node(node)


def _scaled(
    graph: fx.Graph, ctx: fx.Node, x: fx.Node, mask: fx.Node, by: float, device: torch.device
) -> fx.Node:
    scale = graph.call_method("kept_factor", (ctx, by, device))
    return graph.call_function(torch.mul, (graph.call_function(torch.mul, (x, mask)), scale))


def _replace_results(node: fx.Node, results: list[fx.Node]) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(results[_args(user)[1]])
        user.graph.erase_node(user)


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args
