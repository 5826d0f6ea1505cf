"""Compute in another process, a fork, while this one goes on.

A fork has the tables of a search without a copy. ``concurrent.futures`` would have to pickle them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from hap.errors import HapError

Item = TypeVar("Item")
Result = TypeVar("Result")

Told = Callable[[], Any]
"""Returns what the first process has told last; ``None`` before it has."""


class Ahead(Generic[Result]):
    """A computation that has begun.

    Args:
        work: the computation.
        pipe: connection to the process that computes; ``None``: :meth:`result` computes.
        stop: ends that process, if the result is not needed.
    """

    def __init__(
        self, work: Callable[[Told], Result], pipe: Connection | None = None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._work, self._pipe, self.stop = work, pipe, stop
        self._told: Any = None

    def tell(self, what: Any) -> None:
        """Give a value to the computation; without effect if that has ended."""
        self._told = what
        if self._pipe:
            with contextlib.suppress(ConnectionError):
                self._pipe.send(what)

    def result(self) -> Result:
        """Wait for the result. If the other process ended without one, warn, and compute it here.

        Raises:
            HapError: as of the computation, which is then repeated here.
        """
        found: tuple[Result] | None = None
        if self._pipe:
            try:
                found = self._pipe.recv()
            except (EOFError, ConnectionError):
                warnings.warn(
                    "a process of the planner ended without a result; its search is repeated",
                    stacklevel=2,
                )
        return found[0] if found else self._work(lambda: self._told)


@contextlib.contextmanager
def ahead(
    work: Callable[[Told], Result], *, apart: bool = True, nice: int = 0
) -> Iterator[Ahead[Result]]:
    """Compute in another process inside the context, or where there is no core for it, at the end.

    Args:
        apart: whether the work is worth another process.
        nice: of the process; above 0 for a result that is needed late, or perhaps not at all.
    """
    if not (apart and _has_core()):
        yield Ahead(work)
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_compute, args=(work, nice, theirs, ours), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process closes the pipe
    try:
        yield Ahead(work, ours, process.kill)
    finally:
        process.kill()
        process.join()
        ours.close()


def _has_core() -> bool:
    """Whether there is a core for a fork; elsewhere than on Linux forks are not safe."""
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and not multiprocessing.current_process().daemon
    )


def _compute(work: Callable[[Told], Any], nice: int, pipe: Connection, parent: Connection) -> None:
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.nice(nice)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    known: list[Any] = []

    def told() -> Any:
        while pipe.poll():
            known[:] = [pipe.recv()]
        return known[0] if known else None

    try:
        found = (work(told),)
    except HapError:
        found = None  # the parent computes again, and raises the error
    pipe.send(found)


def _end_with_parent() -> None:
    """Wait for the end of the process that wants the result, which may be killed."""
    first = multiprocessing.parent_process()
    assert first is not None
    wait([first.sentinel])
    os._exit(1)


def each(work: Callable[[Item], Result], items: Sequence[Item], *, apart: bool) -> list[Result]:
    """The result for each item; with ``apart`` every other one is computed in another process."""
    others = items[1::2]
    with ahead(lambda told: [*map(work, others)], apart=apart and bool(others)) as process:
        found = [*map(work, items[::2])]
        second = process.result()
    return [(second if k % 2 else found)[k // 2] for k in range(len(items))]
