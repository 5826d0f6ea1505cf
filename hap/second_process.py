"""Compute in another process, a fork, while this one goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from hap.errors import HapError

Item = TypeVar("Item")
Result = TypeVar("Result")

Told = Callable[[], Any]
"""Returns what the first process has told, once it has; ``None`` before."""


class Ahead(Generic[Result]):
    """A computation that has begun in another process, which sends its result by ``pipe``."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, what: Any) -> None:
        """Send a value to the computation; without effect if that has ended."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send(what)

    def result(self) -> Result | None:
        """Wait for the result; ``None`` if the computation failed, which the caller then repeats."""
        try:
            found: Result | None = self._pipe.recv()
        except (EOFError, ConnectionError):
            return None
        return found


@contextlib.contextmanager
def ahead(work: Callable[[Told], Result], later: bool = False) -> Iterator[Ahead[Result] | None]:
    """Compute ``work`` in another process inside the context; ``None`` if there is no core for one.

    Args:
        later: the result is not needed soon: other work has priority.
    """
    if len(os.sched_getaffinity(0)) < 2 or multiprocessing.current_process().daemon:
        yield None
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_compute, args=(work, later, theirs, ours), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process closes the pipe
    try:
        yield Ahead(ours)
    finally:
        process.kill()
        process.join()
        ours.close()


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

    try:
        found = work(told)
    except HapError:
        found = None
    pipe.send(found)


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The result for each item; every other one is computed in another process."""
    second = items[1::2]
    if not second:
        return [work(item) for item in items]
    with ahead(lambda told: [work(item) for item in second]) as process:
        found = [work(item) for item in items[::2]]
        others = process.result() if process else None
    found_there = others if others is not None else [work(item) for item in second]
    return [(found_there if k % 2 else found)[k // 2] for k in range(len(items))]
