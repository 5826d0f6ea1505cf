"""The search engines by name: three ways to solve the same tables.

``exact`` is bucket elimination, the fastest where its tables fit. ``astar`` is HAP's own
search with a better bound; its tables are bounded and it may be cut short. ``cpsat`` is an
independent solver that checks the other two.
"""

from __future__ import annotations

from collections.abc import Mapping

from hap.errors import InputError
from hap.synthesizer import astar
from hap.synthesizer.exact import minimise
from hap.synthesizer.outcome import Engine, Outcome, Pairs, Status, Unary, infeasible


def eliminate(unary: Unary, pairs: Pairs) -> Outcome:
    """Bucket elimination; see :func:`hap.synthesizer.exact.minimise`, also for ``TooWide``."""
    found = minimise(unary, pairs)
    if found is None:
        return infeasible()
    return Outcome(status=Status.OPTIMAL, bound=found.cost, labelling=found)


def referee(unary: Unary, pairs: Pairs) -> Outcome:
    """CP-SAT; see :func:`hap.synthesizer.referee.solve`."""
    from hap.synthesizer.referee import solve  # here: ortools takes long to load

    return solve(unary, pairs)


ENGINES: Mapping[str, Engine] = {"exact": eliminate, "astar": astar.search, "cpsat": referee}


def engine_named(name: str) -> Engine:
    """The engine of that name.

    Raises:
        InputError: there is none; the hint names those that there are.
    """
    if name not in ENGINES:
        raise InputError(f"no search engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    return ENGINES[name]
