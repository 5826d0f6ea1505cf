"""Decisions of torch's tracer on sizes that are data, such as the number of rows of ``x[mask]``.

Uses private APIs, checked on torch 2.13.0 (2.11 and 2.12 have the same names). The sizes are symbols without a value.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

Pair = tuple[Any, Any]


@contextlib.contextmanager
def decided_sizes() -> Iterator[list[Pair]]:
    """Decide what torch's tracer refuses to decide, where it has no effect or can be checked later.

    Two sizes are equal, for whoever asks. The list has these pairs, and :func:`hap.capture.padding.keep_all_rows`
    refuses a program in which a pair is not the sizes of one mask. A size is not 0 and not 1 for torch's own functions:
    they ask in order to raise an error, or to compute the same result in another way.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    equal: list[Pair] = []
    evaluate = ShapeEnv.evaluate_expr

    def decided(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(self, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            found = _decision(expr, equal)
            if found is None:
                raise
            return found

    with mock.patch.object(ShapeEnv, "evaluate_expr", decided):
        yield equal


def _decision(expr: Any, equal: list[Pair]) -> Any:
    """Return the truth of an expression of sizes, or None."""
    import sympy  # type: ignore[import-untyped]

    if not isinstance(expr, sympy.Eq | sympy.Ne):
        return None
    same, (a, b) = isinstance(expr, sympy.Eq), expr.args
    if a.is_symbol and b.is_symbol:
        equal.append((a, b))
        return sympy.true if same else sympy.false
    if {a, b} & {sympy.S.Zero, sympy.S.One} and _asked_by_torch():
        return sympy.false if same else sympy.true
    return None


def _asked_by_torch() -> bool:
    """Return whether a function of torch asks, run by the tracer for the shape of its result."""
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
        if frame.f_code.co_name == "get_fake_value":
            return True
    return False
