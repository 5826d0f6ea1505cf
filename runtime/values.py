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
    """The values in emitted code; the first read of a collective's result inserts a wait.

    Args:
        most_pending: collectives that may be under way. After another one, computing waits until only so many
            have not ended. Default: any number.
        leave: results for which the caller waits. They do not count.
    """

    def __init__(
        self, out: fx.Graph, ctx: fx.Node, most_pending: int | None = None,
        leave: Collection[Value] = (),
    ) -> None:  # fmt: skip
        self._out, self._ctx, self._most_pending, self._leave = out, ctx, most_pending, leave
        self._there: dict[Value, fx.Node] = {}
        self._pending: dict[Value, fx.Node] = {}
        self._issued: list[Value] = []
        """A result of each collective that counts."""

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

    def finish(self) -> None:
        """Wait for results that nothing reads, as on a rank without a share of the next operator.

        A tensor that a collective reads, such as a parameter, may change in place after the step.
        """
        for value in self._pending:
            if value not in self._leave:
                self[value]

    def issue(self, made: list[Value], kind: str, *args: Any) -> None:
        """Start a collective; one that makes several values returns a list."""
        call = self._out.call_method("issue", (self._ctx, kind, *args))
        if len(made) == 1:
            self._pending[made[0]] = call
        else:
            for k, value in enumerate(made):
                self._pending[value] = self._out.call_function(operator.getitem, (call, k))
        if self._most_pending is not None and made[0] not in self._leave:
            self._issued.append(made[0])
            if len(self._issued) > self._most_pending:
                self[self._issued[-1 - self._most_pending]]


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
