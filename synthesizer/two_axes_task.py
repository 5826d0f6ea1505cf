"""Search two mesh axes in other processes, while the planner searches one.

One process begins with the best program between the machines, another one with the restricted programs. The
result is that of the same search afterwards: whatever it knows of the plan over one axis, it
skips only programs that cannot beat that plan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hap.background import BackgroundTask, Caller, background_task
from hap.cluster.topology import Cluster
from hap.ir.axes import Shares
from hap.ir.mesh import Mesh
from hap.ir.program import Program
from hap.synthesizer.candidate import Objective
from hap.synthesizer.cost.mesh_cost import Between
from hap.synthesizer.device_selection import CLOSE
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.two_axes import WAYS, InsideSynthesizer, MeshCandidate, best_on_mesh

Pair = tuple[Program, Shares]

Found = tuple[list[Pair], Objective | None, list[str]]
"""The programs between and inside the machines, if any; their objective; what the search reported."""


@dataclass(frozen=True, slots=True)
class TwoAxesTask:
    """A search that has begun."""

    space: Space
    cluster: Cluster
    states: int
    engine: Engine
    processes: tuple[BackgroundTask[Found], ...]

    def tell(self, objective: Objective) -> None:
        """Tell the search of a plan; the one that it has to beat is at most :data:`CLOSE` slower."""
        self._tell((objective[0], objective[1] * CLOSE))

    def _tell(self, objective: Objective) -> None:
        for process in self.processes:
            process.tell(objective)

    def best(self, beat: Objective, progress: Callable[[str], None]) -> MeshCandidate | None:
        """Return the best pair of programs if it beats ``beat``; wait for the search."""
        best: list[Pair] = []
        for process in self.processes:
            self._tell(beat)
            pairs, objective, reports = process.result()
            for text in reports:
                progress(text)
            if objective is not None and objective < beat:
                best, beat = pairs, objective
        if not best:
            return None
        (program, shares), (inner, inner_shares) = best
        mesh = Mesh(self.cluster)
        between = Between(mesh=mesh, graph=self.space.graph, program=program, shares=shares)
        inside = InsideSynthesizer(between, self.cluster, self.states, self.engine)
        pair = inside.judge(inner, inner_shares)
        return MeshCandidate(between=between, pair=pair, cost=inside.cost(pair))


@contextlib.contextmanager
def two_axes_task(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine
) -> Iterator[TwoAxesTask]:
    """Search in another process inside the context."""

    def search(ways: Sequence[str], caller: Caller) -> Found:
        reports: list[str] = []
        best = best_on_mesh(
            space, cluster, optimizer_states, engine, reports.append, caller.latest, ways=ways
        )
        pairs = (best.between, best.pair) if best else ()
        objective = best.pair.objective if best else None
        return [(c.program, dict(c.shares)) for c in pairs], objective, reports

    with contextlib.ExitStack() as stack:
        # The second one has a core once the planner waits for both.
        processes = tuple(
            stack.enter_context(background_task(functools.partial(search, ways), nice=nice))
            for ways, nice in ((WAYS[:1], 10), (WAYS[1:], 19))
        )
        yield TwoAxesTask(space, cluster, optimizer_states, engine, processes)
