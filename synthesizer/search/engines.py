"""The search engines by name.

``exact`` is bucket elimination, the fastest if its tables fit. ``bounded`` is ``exact`` if they fit,
else a short ``astar``. ``astar`` is HAP's own search with a better bound; its tables and the number of
its expansions are limited. ``cpsat`` is an independent solver that checks the other two.
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.errors import InputError
from hap.synthesizer.search import astar, cp_sat
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, TooWide, minimise
from hap.synthesizer.search.search_result import INFEASIBLE, Engine, Pairs, SearchResult, Unary


def eliminate(unary: Unary, pairs: Pairs) -> SearchResult:
    """Run :func:`hap.synthesizer.search.bucket_elimination.minimise`; may raise ``TooWide``."""
    found = minimise(unary, pairs)
    if found is None or found.cost >= FORBIDDEN:
        return INFEASIBLE
    return SearchResult(found.cost, found)


def eliminate_or_bound(unary: Unary, pairs: Pairs) -> SearchResult:
    """Run bucket elimination if its tables fit, else A* with :data:`FEW` expansions."""
    try:
        return eliminate(unary, pairs)
    except TooWide:
        return bound(unary, pairs)


def bound(unary: Unary, pairs: Pairs) -> SearchResult:
    """Run A* with :data:`FEW` expansions."""
    return astar.search(unary, pairs, table_entries=FEW, expansions=FEW)


FEW = 1 << 16
"""Limit of expansions, and of entries of the bound's tables: some ten seconds together."""

ENGINES: Mapping[str, Engine] = {
    "exact": eliminate, "astar": astar.search, "cpsat": cp_sat.solve, "bounded": eliminate_or_bound,
}  # fmt: skip


def engine_named(name: str) -> Engine:
    """Return the engine of that name.

    Raises:
        InputError: the name is unknown; the hint lists the known ones.
    """
    if name not in ENGINES:
        raise InputError(f"no search engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    return ENGINES[name]
