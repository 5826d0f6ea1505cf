"""Values in emitted code: their names, and waits for collectives before the first read."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any

from torch import fx

from hap.ir.mesh import AGAIN
from hap.ir.placement import R
from hap.ir.program import Value


class Values:
    """The values in emitted code; the first read of a collective's result inserts a wait."""

    def __init__(self, out: fx.Graph, ctx: fx.Node) -> None:
        self._out, self._ctx = out, ctx
        self._there: dict[Value, fx.Node] = {}
        self._pending: dict[Value, fx.Node] = {}

    def __setitem__(self, value: Value, node: fx.Node) -> None:
        self._there[value] = node

    def __getitem__(self, value: Value) -> fx.Node:
        if value not in self._there:
            call = self._out.call_method("wait", (self._ctx, self._pending[value]))
            self._there[value] = named(call, value)
        return self._there[value]

    def take(self, value: Value) -> None:
        """Add a value as an argument of the code.

        The node gets the argument's exact name. Otherwise fx converts it to lower case, and the
        renamed argument stays alive until the end.
        """
        argument = self._out.placeholder(python_name(value))
        argument.name = python_name(value)
        self._there[value] = argument

    def get(self, value: Value) -> fx.Node | None:
        """Return a value to read, or None if the code neither has nor makes it."""
        known = value in self._there or value in self._pending
        return self[value] if known else None

    def early(self, value: Value) -> fx.Node:
        """Return a value for a collective, without a wait: the lane runs collectives in order."""
        return self._there[value] if value in self._there else self._pending[value]

    def finish(self, leave: Collection[Value] = ()) -> None:
        """Wait for results that nothing reads, as on a rank without a share of the next operator.

        A tensor that a collective reads, such as a parameter, may change in place after the step.

        Args:
            leave: results for which the caller waits.
        """
        for value in self._pending:
            if value not in leave:
                self[value]

    def issue(self, made: list[Value], kind: str, *args: Any) -> None:
        """Start a collective; one that makes several values returns a list."""
        call = self._out.call_method("issue", (self._ctx, kind, *args))
        if len(made) == 1:
            self._pending[made[0]] = call
            return
        for k, value in enumerate(made):
            self._pending[value] = self._out.call_function(operator.getitem, (call, k))


def named(node: fx.Node, value: Value) -> fx.Node:
    node.name = python_name(value)
    node.meta["value"] = value
    return node


def set_apart(code: fx.Graph) -> None:
    """Rename helper nodes whose fx name is that of a value, such as ``full``."""
    values = {node.name for node in code.nodes if "value" in node.meta}
    used = {node.name for node in code.nodes}
    for node in code.nodes:
        if "value" not in node.meta and node.op != "placeholder" and node.name in values:
            name = next(n for k in itertools.count() if (n := f"{node.name}_{k}") not in used)
            node.name = name
            used.add(name)


def python_name(value: Value) -> str:
    """Return the Python name of a value in emitted code."""
    name = value.tensor.replace("~", "__").replace(AGAIN, "_again")
    return name.replace(".", "_") + ("" if value.placement == R else f"_{value.placement}")
