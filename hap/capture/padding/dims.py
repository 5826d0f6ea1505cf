"""The dims of a trace's tensors, and which of them hold padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hap.capture.padding import functions
from hap.capture.source_lines import source_of


@dataclass(frozen=True, eq=False)
class Mask:
    """Which entries of a dim count: ``inside``, boolean, (``size``,)."""

    inside: fx.Node
    size: int


@dataclass(frozen=True)
class Choice:
    """A mask of some dims, by which rows are chosen; its entries in row-major order are those of ``mask``."""

    mask: Mask
    node: fx.Node
    shape: tuple[int, ...]


Dim = int | Mask


class Refused(Exception):
    """It is not known how a function leaves padding out."""


class Trace:
    """A graph whose tensors get padding, node by node.

    Attributes:
        node: the node that is replaced now.
        masks: symbol of a size -> the mask that chooses as many rows.
        places: results of ``nonzero`` -> what they are the places of.
        repeated: places that are repeated over other dims -> what they are the places of.
        written: tensors that the graph changes in place.
        counting: results of ``arange`` that count the rows of a dim -> its mask.
        joined: size -> the dims that are joined in one of this size.
        tables: masks of two dims, by which rows were chosen.
        groups: tensors in which the rows of such a mask are divided by its first dim.
        chosen: the user's lines that choose rows, with the number of all.
        indices: tensors of places -> what they are the places of, unchanged, and in which dim of it.
    """

    node: fx.Node

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.masks: dict[Any, Mask] = {}
        self.places: dict[fx.Node, Choice] = {}
        self.repeated: dict[fx.Node, Choice] = {}
        self.indices: dict[fx.Node, tuple[Choice, int]] = {}
        self.counting: dict[fx.Node, Mask] = {}
        self.joined: dict[Any, tuple[Dim, ...]] = {}
        self.tables: dict[Dim, Choice] = {}
        self.groups: dict[fx.Node, Choice] = {}
        self.chosen: dict[tuple[str, int], None] = {}
        self.written = {_root(n) for node in graph.nodes if writes(node) for n in _written(node)}
        self._masks_by_key: dict[Any, Mask] = {}

    def dims(self, value: Any) -> tuple[Dim, ...]:
        """Return the dims of a tensor; those of other values are none.

        Raises:
            Refused: the size of one is computed from the number of a mask's rows.
        """
        example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
        shape = example.shape if isinstance(example, torch.Tensor) else ()
        return tuple(map(self._dim, shape))

    def _dim(self, size: Any) -> Dim:
        symbol = size.node.expr if isinstance(size, torch.SymInt) else size
        if symbol in self.masks:
            return self.masks[symbol]
        if isinstance(symbol, int) or symbol.is_number:
            return int(symbol)
        raise Refused

    def is_padded(self, value: Any) -> bool:
        """Return whether some of a tensor's entries are padding."""
        return any(isinstance(d, Mask) for d in self.dims(value))

    def touches(self, node: fx.Node) -> bool:
        """Return whether a node makes or reads a tensor with padding."""
        given = node.all_input_nodes
        return has_symbol(node) or any(n in self.groups or self.is_padded(n) for n in given)

    def inside(self, value: Any) -> tuple[fx.Node | None, ...]:
        """Return which entries count, by dim, of a tensor or of dims."""
        dims = value if isinstance(value, tuple) else self.dims(value)
        return tuple(d.inside if isinstance(d, Mask) else None for d in dims)

    def sizes(self, value: Any) -> tuple[int, ...]:
        """Return the shape of a tensor with its padding."""
        return tuple(d.size if isinstance(d, Mask) else d for d in self.dims(value))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument of the node's call."""
        args, kwargs = self.node.args, self.node.kwargs
        return args[place] if len(args) > place else kwargs.get(name, default)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Return a new call before the node."""
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(function, args, kwargs)
        told = ("stack_trace", "nn_module_stack")
        made.meta = {key: self.node.meta[key] for key in told if key in self.node.meta}
        return made

    def become(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let the node call a function."""
        self.node.op, self.node.target = "call_function", function
        self.node.args, self.node.kwargs = args, kwargs

    def filled(self, value: Any, fill: Any) -> Any:
        """Return a tensor with a number in its padding, and other values as they are."""
        if not self.is_padded(value):
            return value
        return self.call(functions.filled, value, self.inside(value), fill)

    def choose(self, mask: fx.Node, size: Any) -> Choice:
        """Return the choice of rows by a mask; a symbol ``size`` is the number of its true entries from now on."""
        symbol = size.node.expr if isinstance(size, torch.SymInt) else None
        if symbol is not None and symbol.is_number:  # another tensor's shape says so
            raise Refused(f"a mask must choose {symbol} rows in each step")
        shape = self.sizes(mask)
        whole = self.filled(mask, False)
        key = self._computed(_unshaped(mask))
        if _root(mask) in self.written:  # it may be another one later
            whole, key = self.call(torch.clone, whole), (mask.name, symbol or self.node.name)
        if key not in self._masks_by_key:
            flat = self.call(torch.flatten, whole)
            self._masks_by_key[key] = made = Mask(flat, torch.Size(shape).numel())
            self.chosen[source_of(self.node), made.size] = None
        known = self._masks_by_key[key]
        if symbol is not None and self.masks.setdefault(symbol, known) is not known:
            raise Refused("two masks must choose the same number of rows")
        choice = Choice(known, whole, shape)
        if len(shape) == 2:
            self.tables[known] = choice
        return choice

    def _computed(self, node: fx.Node) -> Any:
        """Return a description of what a node computes; equal ones are equal tensors."""
        if name_of(node) not in PURE or any(_root(n) in self.written for n in node.all_input_nodes):
            return node.name
        args = (node.args, tuple(sorted(node.kwargs.items())))
        return name_of(node), repr(fx.node.map_arg(args, self._computed))


def has_symbol(node: fx.Node) -> bool:
    """Return whether a node makes a tensor of which a size is data."""
    made = node.meta.get("example_value")
    return any(
        isinstance(size, torch.SymInt)
        for x in (made if isinstance(made, tuple | list) else [made])
        if isinstance(x, torch.Tensor)
        for size in x.shape
    )


def is_number(node: fx.Node) -> bool:
    """Return whether a node is a size, or computed from sizes."""
    made = node.meta.get("example_value")
    return isinstance(made, torch.SymInt | torch.SymBool | torch.SymFloat)


def is_check(node: fx.Node) -> bool:
    """Return whether a node checks a number and makes nothing; until torch 2.12 some are ``torch._check``."""
    return name_of(node) == "_check" or str(node.target).startswith("aten._assert_scalar")


def name_of(node: fx.Node) -> str:
    """Return torch's name of the function or method that a node calls, without that of in-place ones."""
    module = str(getattr(node.target, "__module__", None) or "torch")
    other = module.startswith("torch._ops.") and module != "torch._ops.aten"
    if other or module.partition(".")[0] not in ("torch", "_operator", "builtins", "math", "hap"):
        return f"{module}.{getattr(node.target, '__name__', node.target)}"  # not known by its name
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = str(name or node.target).removeprefix("aten.")
    # In torch 2.11 some comparisons are calls of ``__eq__`` and the like.
    name = name.strip("_") if name.startswith("__") else name.rstrip("_")
    return OPERATORS.get(name, name)


OPERATORS = {
    "iadd": "add", "isub": "sub", "imul": "mul", "truediv": "div", "itruediv": "div", "ifloordiv": "floor_divide",
    "floordiv": "floor_divide", "mod": "remainder", "imod": "remainder", "ipow": "pow", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "iand": "bitwise_and", "ior": "bitwise_or", "ixor": "bitwise_xor",
    "invert": "bitwise_not", "inv": "bitwise_not", "imatmul": "matmul",
}  # fmt: skip
"""Python's operators -> torch's functions."""


def writes(node: fx.Node) -> bool:
    """Return whether a node changes a tensor in place."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in WRITERS or (name.endswith("_") and not name.endswith("__"))


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a node may change."""
    first = node.args[0] if node.args else None
    return [first] if isinstance(first, fx.Node) else node.all_input_nodes


WRITERS = {
    "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"
}  # fmt: skip
"""Operators of Python that change a tensor."""


def _unshaped(node: fx.Node) -> fx.Node:
    """Return the tensor of which a node is a view with the same entries in order."""
    while name_of(node) in ("view", "reshape", "flatten") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _root(node: fx.Node) -> fx.Node:
    """Return the tensor of which a node may be a view."""
    while name_of(node) in VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


VIEWS = frozenset({
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "swapaxes", "movedim",
    "getitem", "select", "narrow", "detach", "expand", "expand_as", "broadcast_to", "split", "chunk", "unbind", "diagonal",
    "getattr", "view_as", "contiguous", "to", "type_as", "bool", "float", "long", "int", "double",
})  # fmt: skip
"""Functions whose results may share memory with their first tensor."""


PURE = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or",
    "logical_not", "isnan", "isfinite", "bool", "view", "reshape", "flatten", "squeeze", "detach",
})  # fmt: skip
"""Functions by which masks are made."""
