"""Start and end the process of one rank.

Ranks of this machine are forks of one server, which has imported what the parent has: they start in a
tenth of a second. Importing torch and a library of models takes seconds of each processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

Main = Callable[[Connection, str, Mapping[str, str]], None]
"""The main function of a rank: pipe to the parent, backend, environment variables."""

_SLOW_IMPORTS = {"hap", "timm", "torchvision", "transformers"}

_SERVER = {"MALLOC_ARENA_MAX": "1"}
"""A fork would go on using the heaps that its server has beside the main heap; see
:func:`hap.runtime.launch.keep_memory`."""

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class RankProcess(NamedTuple):
    """A rank's process and the parent's end of its pipe."""

    process: BaseProcess
    pid: int
    pipe: Connection


def start(main: Main, backend: str, method: str) -> RankProcess:
    """Start a rank with this process's environment variables.

    Args:
        method: ``spawn``: a process that imports everything itself; or ``forkserver``.
    """
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_imported())
    ours, theirs = context.Pipe()
    # The server has the variables of the moment at which it was started.
    process = context.Process(target=main, args=(theirs, backend, dict(os.environ)))  # type: ignore[attr-defined]
    if method == "forkserver":
        # The server starts with the first rank. It goes on at a SIGTERM to this process's group, so
        # that the ranks may end as they do by themselves; each of them unblocks the signal.
        with environment(_SERVER), _blocked(signal.SIGTERM):
            process.start()
    else:
        process.start()
    theirs.close()  # so that the rank's death closes the pipe
    assert process.pid is not None
    return RankProcess(process, process.pid, ours)


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Hold a signal back; processes that start inside of the context inherit this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _imported() -> list[str]:
    """Return the modules of slow packages that this process has imported; torch comes with them.

    The first optimizer of each rank would import torch's tracer.
    """
    return ["torch._dynamo", *(n for n in sys.modules if n.partition(".")[0] in _SLOW_IMPORTS)]


def kill(rank: RankProcess) -> None:
    """Kill a rank and its children by SIGKILL, since it may be blocked in a collective."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.process.kill()  # it may not lead its process group yet
    rank.process.join()
    rank.pipe.close()


def end_with_parent() -> None:
    """Make this rank the leader of a process group that is killed when the parent ends.

    Its own children then start as those of a rank of torchrun do.

    The kernel does so for a child of the parent, a thread for a fork of the server: the server ends
    only after its forks.
    """
    os.setsid()  # also: no Ctrl-C of the terminal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # see :func:`start`
    # A process hands on the method that started it. The workers of a DataLoader would have to import
    # the model file, which is no module of theirs.
    multiprocessing.set_start_method(None, force=True)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a child process before it starts: loading torch reads those of OpenMP."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)
