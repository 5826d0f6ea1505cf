"""Compute in another process, a fork, while this one goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from hap.errors import HapError

Item = TypeVar("Item")
Result = TypeVar("Result")

Told = Callable[[], Any]
"""Returns what the first process has told, once it has; ``None`` before."""


class Ahead(Generic[Result]):
    """A computation that has begun.

    Args:
        work: the computation.
        pipe: connection to the process that computes; ``None``: :meth:`result` computes.

    ``failed``: whether the process ended without a result.
    """

    def __init__(self, work: Callable[[Told], Result], pipe: Connection | None) -> None:
        self._work, self._pipe = work, pipe
        self._told: Any = None
        self.failed = False

    def tell(self, what: Any) -> None:
        """Give a value to the computation; without effect if that has ended."""
        self._told = what
        if self._pipe:
            with contextlib.suppress(ConnectionError):
                self._pipe.send(what)

    def result(self) -> Result:
        """Wait for the result; if the other process failed, compute it in this one."""
        found: tuple[Result] | None = None
        if self._pipe:
            with contextlib.suppress(EOFError, ConnectionError):
                found = self._pipe.recv()
            self.failed = found is None
        return found[0] if found else self._work(lambda: self._told)


@contextlib.contextmanager
def ahead(
    work: Callable[[Told], Result], *, apart: bool = True, later: bool = False
) -> Iterator[Ahead[Result]]:
    """Compute in another process inside the context, or where there is no core for it, at the end.

    Args:
        apart: whether the work is worth another process.
        later: the result is not needed soon: other work has priority.
    """
    if not (apart and _has_core()):
        yield Ahead(work, None)
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_compute, args=(work, later, theirs, ours), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process closes the pipe
    try:
        yield Ahead(work, ours)
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


def _compute(
    work: Callable[[Told], Any], later: bool, pipe: Connection, parent: Connection
) -> None:
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.nice(10 if later else 0)
    known: list[Any] = []

    def told() -> Any:
        if not known and pipe.poll():
            known.append(pipe.recv())
        return known[0] if known else None

    with contextlib.suppress(HapError):  # the parent computes again, and raises it
        pipe.send((work(told),))


def each(work: Callable[[Item], Result], items: Sequence[Item], *, apart: bool) -> list[Result]:
    """The result for each item; with ``apart`` every other one is computed in another process."""
    others = items[1::2]
    with ahead(lambda told: [*map(work, others)], apart=apart and bool(others)) as process:
        found = [*map(work, items[::2])]
        second = process.result()
    return [(second if k % 2 else found)[k // 2] for k in range(len(items))]
