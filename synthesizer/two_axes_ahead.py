"""Search two mesh axes in another process, while the planner searches one.

The result is that of the same search afterwards: whatever it knows of the plan over one axis, it
skips only programs that cannot beat that plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hap.cluster.topology import Cluster
from hap.ir.axes import Shares
from hap.ir.mesh import Mesh
from hap.ir.program import Program
from hap.second_process import Ahead, Told, ahead
from hap.synthesizer.candidate import Merit
from hap.synthesizer.cost.mesh_cost import Between
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.two_axes import InsideSynthesizer, MeshCandidate, best_on_mesh

Pair = tuple[Program, Shares]


@dataclass(frozen=True, slots=True)
class _Found:
    """The pair of programs between and inside the machines, and what the search reported."""

    pairs: tuple[Pair, Pair] | None
    merit: Merit | None
    reports: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoAxesAhead:
    """A search that has begun."""

    space: Space
    cluster: Cluster
    states: int
    engine: Engine
    process: Ahead[_Found]

    def best(self, beat: Merit, progress: Callable[[str], None]) -> MeshCandidate | None:
        """Return the best pair of programs if it beats ``beat``; wait for the search.

        If the other process failed, the search is repeated in this one, where its error is raised.
        """
        self.process.tell(beat)
        found = self.process.result()
        if self.process.failed:
            progress("searched two mesh axes again: the process that did so failed")
        for text in found.reports:
            progress(text)
        if found.pairs is None or found.merit is None or found.merit >= beat:
            return None
        (program, shares), (inner, inner_shares) = found.pairs
        mesh = Mesh(self.cluster)
        between = Between(mesh=mesh, graph=self.space.graph, program=program, shares=shares)
        inside = InsideSynthesizer(between, self.cluster, self.states, self.engine)
        pair = inside.judge(inner, inner_shares)
        return MeshCandidate(between=between, pair=pair, cost=inside.cost(pair))


@contextlib.contextmanager
def searched_ahead(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine
) -> Iterator[TwoAxesAhead]:
    """Search in another process inside the context."""

    def search(told: Told) -> _Found:
        reports: list[str] = []
        best = best_on_mesh(space, cluster, optimizer_states, engine, reports.append, told)
        if best is None:
            return _Found(None, None, reports)
        outer, inner = ((c.program, dict(c.shares)) for c in (best.between, best.pair))
        return _Found((outer, inner), best.pair.merit, reports)

    with ahead(search, later=True) as process:
        yield TwoAxesAhead(
            space=space, cluster=cluster, states=optimizer_states, engine=engine, process=process
        )
