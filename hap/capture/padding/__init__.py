"""Rows that a mask chooses, as in ``x[mask]``: all rows, of which some are padding.

How many rows a mask chooses is data, and a program has no shape for them. The tracer writes such a number as a symbol.
Here each dim of a symbol gets the mask's own size, and the mask says which of its entries count: functions that treat
the entries of the dim alike stay as they are, those that combine them leave padding out, and sizes become numbers of
the program. The rest is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hap.capture.padding.dims import Refused, Trace, has_symbol, is_check, is_number, name_of
from hap.capture.padding.functions import count
from hap.capture.padding.row_indexing import INDEXING, writes_rows
from hap.capture.padding.rules import rule_of
from hap.capture.sizes_private import Pair
from hap.capture.source_lines import source_of
from hap.errors import ModelError

_LOGGER = logging.getLogger(__name__)

HINT = "keep all rows: pass ignore_index to the loss, or write the mean as torch.where(mask, x, 0).sum() / mask.sum()"
"""A remedy for rows that a mask chooses."""


def keep_all_rows(traced: fx.GraphModule) -> None:
    """Replace what depends on the number of rows of a mask, in each graph that chooses any.

    Raises:
        ModelError: a function for which it is not known how to leave padding out.
    """
    masks: dict[Any, Any] = {}
    equal: list[Pair] = []
    for graph in (m.graph for m in traced.modules() if isinstance(m, fx.GraphModule)):
        if not any(has_symbol(n) or writes_rows(n) for n in graph.nodes):
            continue
        trace = Trace(graph)
        for node in list(graph.nodes):
            trace.node = node
            try:
                _replace(trace, node)
            except Refused as error:
                if not writes_rows(node) or any(map(has_symbol, [node, *node.all_input_nodes])):
                    raise _refused(node, str(error)) from error
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise _refused(node, "it is called in an unusual form") from error
            node.meta.pop("unbacked_bindings", None)
        for source, size in trace.chosen:
            _LOGGER.info("%s: all %d rows run, and those that a mask chooses count", source, size)
        for node in reversed(graph.nodes):
            checks = is_check(node)
            if checks:
                equal += _equal_sizes(node)
            unused = is_number(node) or name_of(node) in ("size", "unique_consecutive")
            if not node.users and (checks or unused):
                graph.erase_node(node)
        masks |= trace.masks
    _check_equal(masks, traced.meta["sizes"].equal, equal)


def _check_equal(
    masks: Mapping[Any, Any], decided: Sequence[Pair], checked: Sequence[Pair]
) -> None:
    """Raise ``ModelError`` unless sizes that were taken to be equal are those of one mask.

    Args:
        masks: symbol of a size -> its mask.
        decided: pairs of sizes by which the forward went a way.
        checked: pairs of which torch checks that they are equal; some are no sizes of rows.
    """
    pairs = [*decided, *((a, b) for a, b in checked if {a, b} & masks.keys())]
    if any(a not in masks or masks[a] is not masks.get(b) for a, b in pairs):
        raise ModelError(
            "the forward can't be captured as one graph: it compares two numbers that are data",
            hint="choose the rows of tensors of the same shape by one mask",
        )


def _equal_sizes(check: fx.Node) -> list[Pair]:
    """Return the sizes that a check of torch's says to be equal."""
    condition = check.args[0]
    given = condition.meta.get("example_value") if isinstance(condition, fx.Node) else None
    said: Any = given.node.expr if isinstance(given, torch.SymBool) else None
    if type(said).__name__ != "Equality":
        return []
    a, b = said.args
    divides = a.free_symbols == b.free_symbols  # as in u0 == 6 * (u0 // 6)
    return [] if divides else [(a, b)]


def _refused(node: fx.Node, why: str) -> ModelError:
    return ModelError(
        f"the forward can't be captured as one graph: {name_of(node)!r} of a tensor whose size is data"
        + (f": {why}" if why else ""),
        where=source_of(node), hint=HINT,
    )  # fmt: skip


def _replace(trace: Trace, node: fx.Node) -> None:
    if node.op not in ("call_function", "call_method"):
        return
    if is_number(node):
        if (counts := _size_of(trace, node)) is not None:
            trace.become(count, counts)
        return
    if not trace.touches(node) and not writes_rows(node):
        return
    name = name_of(node)
    if name != "getitem" and any(n in trace.counting for n in node.all_input_nodes):
        raise Refused("it reads the numbers of its rows")
    rule = INDEXING.get(name) or rule_of(name)
    rule(trace)


def _size_of(trace: Trace, node: fx.Node) -> fx.Node | None:
    """Return which entries count of the dim whose size a node reads."""
    x, *place = node.args
    if name_of(node) == "getitem" and isinstance(x, fx.Node) and name_of(x) == "size":
        x = x.args[0]
    elif name_of(node) not in ("sym_size.int", "size"):
        return None
    checked = isinstance(x, fx.Node) and name_of(x) == "unique_consecutive"
    dim: Any = place[0] if place else None
    return None if dim is None or checked else trace.inside(x)[dim]
