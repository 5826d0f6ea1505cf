"""The search engines by name.

``exact`` is bucket elimination, the fastest if its tables fit; in a small graph whose tables are large,
after a short ``astar``, whose result is taken if it is proved. ``bounded`` is ``exact`` if the tables
fit, else a short ``astar``. ``astar`` is HAP's own search with a better bound; its tables and the number of
its expansions are limited. ``cpsat`` is an independent solver that checks the other two.
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.errors import InputError
from hap.synthesizer.search import astar, cp_sat
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, MOST_ENTRIES, TooWide, minimise
from hap.synthesizer.search.search_result import (
    INFEASIBLE,
    Engine,
    Pairs,
    SearchResult,
    SearchStatus,
    Unary,
)


def eliminate(unary: Unary, pairs: Pairs) -> SearchResult:
    """Return an optimal result.

    Raises:
        TooWide: the tables of :func:`hap.synthesizer.search.bucket_elimination.minimise` are too large.
    """
    small = len(unary) <= SMALL
    try:
        found = minimise(unary, pairs, QUICK if small else MOST_ENTRIES)
    except TooWide:
        if small and (proved := bound(unary, pairs)).status is SearchStatus.OPTIMAL:
            return proved
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


SMALL = 2000
"""Variables up to which a short A* takes less than a second. Deep models have more; their tables repeat."""

QUICK = 1 << 26
"""Entries of all tables up to which elimination takes less than half a second."""

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
