"""The result of a search engine: a labelling, a bound, and a status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs, Labelling
from hap.synthesizer.search.bucket_elimination import Pairs as Pairs

Unary = Sequence[Costs]
"""Per variable, the cost of each of its labels."""


class SearchStatus(Enum):
    """The outcome of a search."""

    OPTIMAL = "optimal"
    """The labelling is the cheapest."""
    FEASIBLE = "feasible"
    """A labelling was found; a cheaper one, down to the bound, is not ruled out."""
    INFEASIBLE = "infeasible"
    """Every labelling is forbidden."""
    UNKNOWN = "unknown"
    """The engine gave up without a labelling, and without a proof that there is none."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of one engine; no labelling costs less than ``bound``.

    ``in_place``: A* ran in place of an elimination whose tables are too large, in a graph where it takes
    seconds.
    """

    bound: int
    labelling: Labelling | None
    in_place: bool = False

    def __post_init__(self) -> None:
        assert self.labelling is None or self.bound <= self.labelling.cost < FORBIDDEN

    @property
    def status(self) -> SearchStatus:
        if self.labelling is None:
            forbidden = self.bound >= FORBIDDEN
            return SearchStatus.INFEASIBLE if forbidden else SearchStatus.UNKNOWN
        proven = self.bound == self.labelling.cost
        return SearchStatus.OPTIMAL if proven else SearchStatus.FEASIBLE


Engine = Callable[[Unary, Pairs], SearchResult]
"""Solves the tables of one labelling problem. The same tables give the same outcome."""

INFEASIBLE = SearchResult(FORBIDDEN, None)


def cost_of(labels: Sequence[int], unary: Unary, pairs: Pairs) -> int:
    """Return the cost of a labelling, in integers that do not overflow."""
    own = sum(int(costs[x]) for costs, x in zip(unary, labels, strict=True))
    return own + sum(int(table[labels[u], labels[v]]) for (u, v), table in pairs.items())
