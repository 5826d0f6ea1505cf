"""Search two mesh axes in a process of its own, while the planner searches one.

The process is a fork. The result is that of the same search afterwards: whatever it knows of the
plan over one axis, it skips only programs that cannot beat that plan.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.axes import Shares
from hap.ir.mesh import Mesh
from hap.ir.program import Program
from hap.synthesizer.candidate import Merit
from hap.synthesizer.cost.mesh_cost import Between
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.two_axes import InsideSynthesizer, MeshCandidate, best_on_mesh

Progress = Callable[[str], None]
Pair = tuple[Program, Shares]


@dataclass(frozen=True, slots=True)
class _Found:
    """The pair of programs between and inside the machines, and what the search reported."""

    pairs: tuple[Pair, Pair] | None
    merit: Merit | None
    reports: list[str]


class TwoAxesAhead:
    """A search that has begun.

    Args:
        parent: connection to the process that searches.
    """

    def __init__(
        self, space: Space, cluster: Cluster, optimizer_states: int, engine: Engine,
        parent: Connection,
    ) -> None:  # fmt: skip
        self._space, self._cluster, self._states = space, cluster, optimizer_states
        self._engine, self._pipe = engine, parent

    def best(self, beat: Merit, progress: Progress) -> MeshCandidate | None:
        """Return the best pair of programs if it beats ``beat``; wait for the search.

        If the other process failed, the search is repeated in this one, where its error is raised.
        """
        with contextlib.suppress(ConnectionError):  # the search has ended
            self._pipe.send(beat)
        try:
            found: _Found | None = self._pipe.recv()
        except (EOFError, ConnectionError):
            found = None
        if found is None:
            progress("searching two mesh axes again: the process that did so failed")
            again = best_on_mesh(
                self._space, self._cluster, self._states, self._engine, progress, lambda: beat
            )
            return again if again and again.pair.merit < beat else None
        for text in found.reports:
            progress(text)
        if found.pairs is None or found.merit is None or found.merit >= beat:
            return None
        (program, shares), (inner, inner_shares) = found.pairs
        between = Between(
            mesh=Mesh(self._cluster), graph=self._space.graph, program=program, shares=shares
        )
        inside = InsideSynthesizer(between, self._cluster, self._states, self._engine)
        pair = inside.judge(inner, inner_shares)
        return MeshCandidate(between=between, pair=pair, cost=inside.cost(pair))


@contextlib.contextmanager
def searched_ahead(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine
) -> Iterator[TwoAxesAhead | None]:
    """Search in a second process inside the context; ``None`` where there is no core for one."""
    if len(os.sched_getaffinity(0)) < 2 or multiprocessing.current_process().daemon:
        yield None
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(
        target=_search, args=(space, cluster, optimizer_states, engine, theirs, ours), daemon=True
    )
    process.start()
    theirs.close()  # so that the end of the process closes the pipe
    try:
        yield TwoAxesAhead(space, cluster, optimizer_states, engine, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def _search(
    space: Space, cluster: Cluster, optimizer_states: int, engine: Engine, pipe: Connection,
    parent: Connection,
) -> None:  # fmt: skip
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    known: list[Merit] = []

    def beat() -> Merit | None:
        if not known and pipe.poll():
            known.append(pipe.recv())
        return known[0] if known else None

    reports: list[str] = []
    try:
        best = best_on_mesh(space, cluster, optimizer_states, engine, reports.append, beat)
    except HapError:
        pipe.send(None)
        return
    pairs, merit = None, None
    if best is not None:
        merit = best.pair.merit
        # Without what the programs have cached.
        pairs = (
            (replace(best.between.program), dict(best.between.shares)),
            (replace(best.pair.program), dict(best.pair.shares)),
        )
    pipe.send(_Found(pairs, merit, reports))
