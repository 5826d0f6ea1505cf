"""Layers that repeat: each kind is traced once, and its operators are copied for the others.

A deep model has few kinds of layers. The tracer keeps the forward of one as a *region*, a program that calls
name, if the others are alike and a forward of the whole model ran the same operators in them. The joint graph
calls the region's forward, and later a program that is its forward and backward together. Here both calls become
operators.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from hap.capture import regions_private

FEW = 3
"""Layers up to which a region is not worth its trace, which takes longer than that of a layer."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_kinds(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of layers that occur several times in one list, the outermost ones.

    Layers are alike if their parameters and buffers are. Those that write into a buffer are left out.
    """
    if not regions_private.HAS_REGIONS:
        return ()
    found = dict[type[nn.Module], None]()
    for layers in module.modules():
        if isinstance(layers, nn.ModuleList | nn.Sequential):
            alike: dict[object, list[nn.Module]] = {}
            for layer in filter(None, layers):
                alike.setdefault(_looks(layer), []).append(layer)
            several = [group[0] for group in alike.values() if len(group) > FEW]
            found |= dict.fromkeys(type(layer) for layer in several if _is_region(layer))
    outer = [part for part in module.modules() if type(part) in found]
    inside = {type(part) for layer in outer for part in layer.modules() if part is not layer}
    return tuple(kind for kind in found if kind not in inside)


def _looks(layer: nn.Module) -> object:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return type(layer), tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def _is_region(layer: nn.Module) -> bool:
    statistics = (m for m in layer.modules() if getattr(m, "track_running_stats", False))
    writes = any(norm.training for norm in statistics)
    return not isinstance(layer, _CONTAINERS) and any(layer.children()) and not writes


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a region: the values of its program's nodes so far, and what its nodes' metadata are to say."""

    body: fx.GraphModule
    values: dict[fx.Node, Any]
    metadata: _Metadata


def copy_repeated(graph: fx.Graph) -> None:
    """Replace the calls of regions in a joint graph by their operators."""
    root = graph.owning_module
    calls = [node for node in graph.nodes if regions_private.is_region_call(node)]
    pairs: dict[object, list[fx.Node]] = {}
    for call in calls:
        pairs.setdefault(regions_private.region_number(call), []).append(call)
    first: dict[str, str] = {}  # name of a region -> the path of the layer that was traced
    begun: dict[object, _Copy] = {}
    for call in calls:
        number = regions_private.region_number(call)
        last = pairs[number][-1]
        body: fx.GraphModule = getattr(root, str(last.args[0].target))  # type: ignore[union-attr]
        ends = list(body.graph.output_node().args[0])  # type: ignore[arg-type]
        results = ends
        if number not in begun:
            path = _path_of(call)
            traced = first.setdefault(str(call.args[1]), path)
            begun[number] = _Copy(body, {}, _Metadata(traced, path, call.meta))
            if call is not last:  # gradients come first
                results = ends[-len(call.meta["val"]) :]
        copied = begun[number]
        inputs = body.graph.find_nodes(op="placeholder")
        copied.values.update(zip(inputs, call.args[2:], strict=False))
        wanted = [end for end in results if isinstance(end, fx.Node)]
        _copy(graph, call, copied, _needed(body.graph, wanted, copied.values))
        for user in list(call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(copied.values[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(call)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)


def _needed(graph: fx.Graph, ends: Iterable[fx.Node], known: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return the nodes that ``ends`` are computed of and that have no value yet, in order."""
    needed, todo = set[fx.Node](), list(ends)
    while todo:
        node = todo.pop()
        if node not in known and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    return [node for node in graph.nodes if node in needed]


def _copy(graph: fx.Graph, before: fx.Node, to: _Copy, nodes: Iterable[fx.Node]) -> None:
    root = graph.owning_module
    with graph.inserting_before(before):
        for node in nodes:
            new = graph.node_copy(node, to.values.__getitem__)
            if node.op == "get_attr":  # a constant of the layer
                new.target = f"{before.name}_{node.target}"
                setattr(root, new.target, getattr(to.body, str(node.target)))
            new.meta = to.metadata.of(node)
            to.values[node] = new


_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_CHECKPOINT = ("recompute", "ac_graph_id")


def _path_of(node: fx.Node) -> str:
    return next((path for path, _ in reversed(node.meta.get(_STACKS[0], {}).values())), "")


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Metadata of the nodes of the layer ``traced``, as those of the layer ``path`` that ``call`` calls."""

    traced: str
    path: str
    call: dict[str, Any]
    _stacks: dict[int, Any] = field(default_factory=dict)

    def of(self, node: fx.Node) -> dict[str, Any]:
        meta = dict(node.meta)
        for key in _STACKS:
            if key in meta:
                stack = meta[key]
                if id(stack) not in self._stacks:
                    self._stacks[id(stack)] = dict(self._renamed(stack))
                meta[key] = self._stacks[id(stack)]
        return meta | {key: self.call[key] for key in _CHECKPOINT if key in self.call}

    def _renamed(self, stack: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, (path, kind) in stack.items():
            inside = path == self.traced or path.startswith(f"{self.traced}.")
            yield key, (self.path + path[len(self.traced) :] if inside else path, kind)
