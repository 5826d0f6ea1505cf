"""The search engines by name.

``exact`` is bucket elimination, the fastest where its tables fit. ``astar`` is HAP's own
search with a better bound; its tables are bounded and it may be cut short. ``cpsat`` is an
independent solver that checks the other two.
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.errors import InputError
from hap.synthesizer.search import astar, cp_sat
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, minimise
from hap.synthesizer.search.search_result import INFEASIBLE, Engine, Pairs, SearchResult, Unary


def eliminate(unary: Unary, pairs: Pairs) -> SearchResult:
    """Bucket elimination; see :func:`hap.synthesizer.search.bucket_elimination.minimise`, also for ``TooWide``."""
    found = minimise(unary, pairs)
    if found is None or found.cost >= FORBIDDEN:
        return INFEASIBLE
    return SearchResult(found.cost, found)


ENGINES: Mapping[str, Engine] = {"exact": eliminate, "astar": astar.search, "cpsat": cp_sat.solve}


def engine_named(name: str) -> Engine:
    """The engine of that name.

    Raises:
        InputError: there is none; the hint names those that there are.
    """
    if name not in ENGINES:
        raise InputError(f"no search engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    return ENGINES[name]
