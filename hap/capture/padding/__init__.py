"""Rows that a mask chooses, as in ``x[mask]``: all rows, of which some are padding.

How many rows a mask chooses is data, and a program has no shape for them. The tracer writes such a number as a symbol.
Here each dim of a symbol gets the mask's own size, and the mask says which of its entries count: functions that treat
the entries of the dim alike stay as they are, those that combine them leave padding out, and sizes become numbers of
the program. The rest is refused by name.
"""

from __future__ import annotations

from torch import fx

from hap.capture.padding.dims import Refused, Trace, has_symbol, is_number, name_of
from hap.capture.padding.functions import count
from hap.capture.padding.indexing import INDEXING
from hap.capture.padding.rules import RULES, leaves_dims_alone
from hap.capture.source_lines import source_of
from hap.errors import ModelError

HINT = (
    "keep all rows: losses take ignore_index, and torch.where(mask, x, 0).sum() / mask.sum() is a mean of some"
)


def keep_all_rows(traced: fx.GraphModule) -> None:
    """Replace what depends on the number of rows of a mask, in each graph that chooses any.

    Raises:
        ModelError: a function for which it is not known how to leave padding out.
    """
    for graph in (m.graph for m in traced.modules() if isinstance(m, fx.GraphModule)):
        if not any(map(has_symbol, graph.nodes)):
            continue
        trace = Trace(graph)
        for node in list(graph.nodes):
            trace.node = node
            try:
                _replace(trace, node)
            except Refused as error:
                raise _refused(node, str(error)) from error
            node.meta.pop("unbacked_bindings", None)
        for node in reversed(graph.nodes):
            checks = str(node.target).startswith("aten._assert_scalar")
            if not node.users and (checks or is_number(node)):
                graph.erase_node(node)


def _refused(node: fx.Node, why: str) -> ModelError:
    return ModelError(
        f"the forward can't be captured as one graph: {name_of(node)!r} of rows that a mask chooses, whose "
        f"number is data" + (f": {why}" if why else ""),
        where=source_of(node), hint=HINT,
    )  # fmt: skip


def _replace(trace: Trace, node: fx.Node) -> None:
    if node.op not in ("call_function", "call_method") or is_number(node):
        if name_of(node) == "sym_size.int" and trace.is_padded(node.args[0]):
            trace.become(count, trace.inside(node.args[0])[int(node.args[1])])  # type: ignore[arg-type, index]
        return
    if not has_symbol(node) and not any(map(trace.is_padded, node.all_input_nodes)):
        return
    name = name_of(node)
    rule = INDEXING.get(name) or RULES.get(name)
    if rule is not None:
        rule(trace)
    elif not leaves_dims_alone(trace):
        raise Refused
