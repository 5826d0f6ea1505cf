"""Decisions of torch's tracer on sizes that are data, such as the number of rows of ``x[mask]``.

Uses private APIs, checked on torch 2.13.0 (2.11 and 2.12 have the same names). The sizes are symbols without a value.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

Pair = tuple[Any, Any]


@dataclass
class Decisions:
    """Decisions on sizes that are data.

    Attributes:
        empty: whether the sizes are 0 where the forward asks; None: it must not ask.
        equal: pairs of sizes that were taken to be equal.
        asked: sizes of which the forward asked whether they are 0.
    """

    empty: bool | None = False
    equal: list[Pair] = field(default_factory=list)
    asked: set[Any] = field(default_factory=set)


@contextlib.contextmanager
def decided_sizes(empty: bool | None = False) -> Iterator[Decisions]:
    """Decide what torch's tracer refuses to decide, where it has no effect or can be checked later.

    Two sizes are equal, for whoever asks; :func:`hap.capture.padding.keep_all_rows`
    refuses a program in which a pair is not the sizes of one mask. A size is not 0 and not 1 for torch's own functions:
    they ask in order to raise an error, or to compute the same result in another way. For the forward a size is 0 if
    ``empty``, and else it is not; :mod:`hap.capture.joint` checks that only the latter trains.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    decisions = Decisions(empty)
    evaluate = ShapeEnv.evaluate_expr

    def decided(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(self, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            found = _decision(expr, decisions, self.size_like)
            if found is None:
                raise
            return found

    with mock.patch.object(ShapeEnv, "evaluate_expr", decided):
        yield decisions


def _decision(expr: Any, decisions: Decisions, sizes: Container[Any]) -> Any:
    """Return the truth of an expression of sizes, or None.

    Args:
        sizes: the symbols that are sizes; others are numbers of ``item()``.
    """
    import sympy  # type: ignore[import-untyped]

    if isinstance(expr, sympy.Eq | sympy.Ne):
        same, (a, b) = isinstance(expr, sympy.Eq), expr.args
        if a.is_symbol and b.is_symbol:
            decisions.equal.append((a, b))
            return sympy.true if same else sympy.false
        if {a, b} & {sympy.S.Zero, sympy.S.One} and _asked_by_torch():
            return sympy.false if same else sympy.true
    if decisions.empty is None or _asked_by_torch():
        return None
    size = _size_that_may_be_0(expr)
    if size not in sizes:
        return None
    decisions.asked.add(size)
    return expr.subs(size, 0 if decisions.empty else 1)


def _size_that_may_be_0(expr: Any) -> Any:
    """Return the size of which an expression says whether it is 0, as ``0 < 2 * u0``, or None."""
    import sympy

    if not isinstance(expr, sympy.core.relational.Relational) or len(expr.free_symbols) != 1:
        return None
    (size,) = expr.free_symbols
    if not (expr.lhs - expr.rhs).diff(size).is_number:
        return None
    none, one, many = (expr.subs(size, count) for count in (0, 1, 1 << 40))
    return size if one == many != none else None


def _asked_by_torch() -> bool:
    """Return whether a function of torch asks, run by the tracer for the shape of its result."""
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
        if frame.f_code.co_name == "get_fake_value":
            return True
    return False
