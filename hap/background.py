"""Tasks in another process, a fork, while this one goes on.

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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from hap.errors import HapError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a computation: its result if ``last``; ``failed``: it raised a ``HapError``."""

    value: Any = None
    last: bool = False
    failed: bool = False


class Caller:
    """The process that wants the result, as the computation sees it: without a pipe, this one."""

    def __init__(self, pipe: Connection | None = None, known: Any = None) -> None:
        self._pipe, self._known = pipe, known

    def latest(self) -> Any:
        """Return what the first process has told last; ``None`` before it has."""
        while self._pipe and self._pipe.poll():
            self._known = self._pipe.recv()
        return self._known

    def tell(self, what: Any) -> None:
        """Let the first process know something before the result."""
        if self._pipe:
            self._pipe.send(_Message(what))


class BackgroundTask(Generic[Result]):
    """A computation that has begun.

    Args:
        work: the computation.
        pipe: connection to the process that computes; ``None``: :meth:`result` computes.
        stop: ends that process, if the result is not needed.
    """

    def __init__(
        self, work: Callable[[Caller], Result], pipe: Connection | None = None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._work, self._pipe, self.stop = work, pipe, stop
        self._told: Any = None
        self._first: _Message | None = None

    def tell(self, what: Any) -> None:
        """Give a value to the computation; without effect if that has ended."""
        self._told = what
        if self._pipe:
            with contextlib.suppress(ConnectionError):
                self._pipe.send(what)

    def first(self) -> Any:
        """Wait for what the computation says first, and return it; ``None`` if it says nothing."""
        if self._pipe and not self._first:
            with contextlib.suppress(EOFError, ConnectionError):  # result() warns of it
                self._first = self._pipe.recv()
        return self._first.value if self._first and not self._first.last else None

    def result(self) -> Result:
        """Wait for the result. If the other process ended without one, warn, and compute it here.

        Raises:
            HapError: as of the computation, which is then repeated here.
        """
        message = self._first
        try:
            while self._pipe and not (message and message.last):
                message = self._pipe.recv()
        except (EOFError, ConnectionError):
            message = None
            warnings.warn(
                "a process of the planner ended without a result; its search is repeated",
                stacklevel=2,
            )
        if message and not message.failed:
            found: Result = message.value
            return found
        return self._work(Caller(known=self._told))


@contextlib.contextmanager
def background_task(
    work: Callable[[Caller], Result], *, apart: bool = True, nice: int = 0
) -> Iterator[BackgroundTask[Result]]:
    """Compute in another process inside the context, or where there is no core for it, at the end.

    Args:
        apart: whether the work is worth another process.
        nice: of the process; above 0 for a result that is needed late, or perhaps not at all.
    """
    if not (apart and _has_core()):
        yield BackgroundTask(work)
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_compute, args=(work, nice, theirs, ours), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process closes the pipe
    try:
        yield BackgroundTask(work, ours, process.kill)
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
    work: Callable[[Caller], Any], nice: int, pipe: Connection, parent: Connection
) -> None:
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.nice(nice)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        message = _Message(work(Caller(pipe)), last=True)
    except HapError:  # the parent computes again, and raises the error
        message = _Message(last=True, failed=True)
    pipe.send(message)


def _end_with_parent() -> None:
    """Wait for the end of the process that wants the result, which may be killed."""
    first = multiprocessing.parent_process()
    assert first is not None
    wait([first.sentinel])
    os._exit(1)


def each(work: Callable[[Item], Result], items: Sequence[Item], *, apart: bool) -> list[Result]:
    """The result for each item; with ``apart`` every other one is computed in another process."""
    others = items[1::2]
    with background_task(
        lambda caller: [*map(work, others)], apart=apart and bool(others)
    ) as process:
        found = [*map(work, items[::2])]
        second = process.result()
    return [(second if k % 2 else found)[k // 2] for k in range(len(items))]
