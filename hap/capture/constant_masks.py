"""Masks of attention that are the same in every step: a causal one becomes a flag, one of all keys none.

Libraries leave a causal mask out only where they can look at its data, which a trace cannot, and
compute it from positions instead. Attention with a flag runs a faster kernel, and half of the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hap.capture import attention  # noqa: F401  (registers the operators)

SDPA: dict[Any, tuple[int, int]] = {
    torch.ops.hap.sdpa.default: (3, 4),
    torch.ops.hap.sdpa_backward.default: (4, 7),
}
"""Operators of attention -> the places of their mask and of their causal flag."""

aten = torch.ops.aten
LIKE_POINTWISE = (
    aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.unsqueeze.default,
)  # fmt: skip
"""Operators that compute the compact form of a result from compact forms, as pointwise ones do."""

LARGEST = 1 << 27
"""Elements of the largest tensor that is computed to look at a mask."""


def simplify_masks(graph: fx.Graph) -> None:
    """Replace constant masks in a graph of a step, and remove what only made them."""
    constants = _Constants()
    known = dict[Any, bool | None]()  # layers read one mask, or views of it
    replaced = list[fx.Node]()
    for node in graph.nodes:
        at, flag = SDPA.get(node.target, (0, 0))
        mask = node.args[at] if at else None
        if not isinstance(mask, fx.Node) or node.args[flag]:
            continue
        seen = constants.of(mask)
        if seen is None:
            continue
        keys = node.args[at - 2].meta["val"].shape[-2]
        key = seen.data_ptr(), seen.shape, seen.stride(), seen.dtype, keys
        if key not in known:
            known[key] = _flag(seen, keys)
        if known[key] is None:
            continue
        args = list(node.args)
        args[at], args[flag] = None, known[key]
        node.args = tuple(args)
        replaced.append(mask)
    _remove_unread(graph, replaced)


def _remove_unread(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    removed = set[fx.Node]()
    while nodes:
        node = nodes.pop()
        if node.op == "call_function" and not node.users and node not in removed:
            removed.add(node)
            nodes += node.all_input_nodes
            graph.erase_node(node)


def _flag(mask: Tensor, keys: int) -> bool | None:
    """Return the causal flag that replaces a mask; ``None`` if neither does."""
    if _all(mask):
        return False
    return True if _causal(mask, keys) else None


def _all(mask: Tensor) -> bool:
    """Return whether a mask lets each query attend to all keys."""
    return bool((mask if mask.dtype == torch.bool else mask == 0).all())


def _causal(mask: Tensor, length: int) -> bool:
    """Return whether a mask of this many keys, in compact form, lets each query attend to those up to its own."""
    if mask.dim() < 2 or mask.numel() != length**2 or tuple(mask.shape[-2:]) != (length, length):
        return False
    blocked = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = mask.reshape(length, length)
    if mask.dtype == torch.bool:
        return bool((mask != blocked).all())
    least = torch.finfo(mask.dtype).min / 2
    return bool((mask[blocked] <= least).all() and (mask[~blocked] == 0).all())


class _Constants:
    """Values that depend on no input, in compact form: dims along which they are equal have size 1."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Tensor | None:
        """Return the compact value of a tensor; ``None`` if it depends on an input, or is too large."""
        for each in _ancestors(node):
            if each not in self._known:
                self._known[each] = self._computed(each)
        found = self._known[node]
        return found if isinstance(found, Tensor) else None

    def _computed(self, node: fx.Node) -> Any:
        made = node.meta.get("val")
        if not str(node.target).startswith("aten.") or not isinstance(made, Tensor):
            return None  # an input, or what depends on the mode, such as dropout
        if any(self._known[x] is None for x in node.all_input_nodes):
            return None
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            return None
        pointwise = torch.Tag.pointwise in target.tags or target in LIKE_POINTWISE
        if target is aten.expand.default:
            compact = self._known[node.all_input_nodes[0]]
            return compact.reshape((1,) * (made.dim() - compact.dim()) + compact.shape)

        def value(x: fx.Node) -> Tensor:
            compact: Tensor = self._known[x]
            return compact if pointwise else compact.expand(x.meta["val"].shape).contiguous()

        whole = [made, *(x.meta["val"] for x in node.all_input_nodes)]
        if not pointwise and max(x.numel() for x in whole) > LARGEST:
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
        if pointwise:
            shapes = [x.shape for x in args if isinstance(x, Tensor)]
            if torch.Size(torch.broadcast_shapes(*shapes)).numel() > LARGEST:
                return None
        here = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        return _compact(target(*args, **{**kwargs, **here}))


def _compact(x: Tensor) -> Tensor:
    for dim, size in enumerate(x.shape):
        if size > 1 and bool((x == x.narrow(dim, 0, 1)).all()):
            x = x.narrow(dim, 0, 1)
    return x


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return the node and all that it depends on, each after its inputs."""
    found, stack = dict[fx.Node, None](), [(node, False)]
    while stack:
        each, ready = stack.pop()
        if ready:
            found[each] = None
        elif each not in found:
            stack.append((each, True))
            stack += [(x, False) for x in each.all_input_nodes]
    return list(found)
