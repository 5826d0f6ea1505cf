"""The search engines by name.

``exact`` is bucket elimination, the fastest if its tables fit; where they are large, and in a small graph
already where they are not small, a short ``astar`` comes first, whose result is taken if it is proved.
``bounded`` is ``exact`` if the tables fit, else a short ``astar``. ``astar`` is HAP's own search with a better bound; its tables and the number of
its expansions are limited. ``cpsat`` is an independent solver that checks the other two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from hap.errors import InputError
from hap.synthesizer.search import astar, cp_sat
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, TooWide, minimise
from hap.synthesizer.search.elimination_order import MOST_ENTRIES
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
        TooWide: the tables of :func:`hap.synthesizer.search.bucket_elimination.minimise` are too large,
            and a short A* proves no result.
    """
    found, too_wide = _searched(unary, pairs)
    if too_wide:
        raise too_wide
    return found


def eliminate_or_bound(unary: Unary, pairs: Pairs) -> SearchResult:
    """Run bucket elimination if its tables fit, else A* with :data:`FEW` expansions."""
    return _searched(unary, pairs)[0]


def eliminate_if_fits(unary: Unary, pairs: Pairs) -> SearchResult:
    """Run bucket elimination; on large graphs raise ``TooWide`` at once if its tables do not fit."""
    if len(unary) <= SMALL:
        return eliminate_or_bound(unary, pairs)
    return _eliminated(unary, pairs, MOST_ENTRIES)


def _searched(unary: Unary, pairs: Pairs) -> tuple[SearchResult, TooWide | None]:
    """Return a result, and why it is not proved."""
    small = len(unary) <= SMALL
    try:
        return _eliminated(unary, pairs, QUICK if small else MOST_ENTRIES), None
    except TooWide as error:
        found, too_wide = bound(unary, pairs), error
    found = replace(found, in_place=not small and found.labelling is not None)
    if found.status in (SearchStatus.OPTIMAL, SearchStatus.INFEASIBLE):
        return found, None
    if small:
        with contextlib.suppress(TooWide):
            return _eliminated(unary, pairs, MOST_ENTRIES), None
    return found, too_wide


def _eliminated(unary: Unary, pairs: Pairs, most_entries: int) -> SearchResult:
    found = minimise(unary, pairs, most_entries)
    if found is None or found.cost >= FORBIDDEN:
        return INFEASIBLE
    return SearchResult(found.cost, found)


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
        raise InputError(f"no search engine {name!r}", hint=f"use one of {', '.join(ENGINES)}")
    return ENGINES[name]
