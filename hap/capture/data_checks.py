"""Checks of data in a trace, which a program does not run. (torch)"""

from __future__ import annotations

from torch import fx

_CHECKS = ("aten._linalg_check_errors.", "aten._assert_")


def drop_checks(graph: fx.Graph) -> None:
    """Remove operators that return nothing and raise if data is not as expected.

    Those of matrices are ordered by tokens: inputs that each of them returns as its first result.
    """
    for node in reversed(graph.nodes):
        if str(node.target) == "with_effects" and str(node.args[1]).startswith(_CHECKS):
            for token in list(node.users):
                token.replace_all_uses_with(node.args[0])
                graph.erase_node(token)
            graph.erase_node(node)
        elif str(node.target).startswith(_CHECKS) and not node.users:
            graph.erase_node(node)
