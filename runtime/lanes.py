"""Lanes: overlap collectives with computing, and wait for a result where it is read.

A *lane* runs a rank's collectives one after the other, in the order in which they are issued,
which is the same on all ranks. The emitted program continues to compute, and waits for a
:class:`Pending` result right before the first operator that reads it.

* :class:`ThreadLane`: a thread, for gloo. PyTorch's kernels and gloo's calls release the
  interpreter's lock, so that both proceed.
* :class:`StreamLane`: a CUDA stream, for NCCL; nothing blocks the host.
* :class:`InlineLane`: no overlap, for ranks that are emulated in one process.

The lane also packs and unpacks tensors around a collective.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hap.runtime.collectives import Comm, ProcessGroupComm

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pending:
    """A result that may not be ready; ``pending[k]`` is the ``k``-th of several tensors.

    ``done``: the CUDA event after which it is ready; None if ``result`` itself tells.
    """

    result: Future[Any]
    place: int | None = None
    done: torch.cuda.Event | None = None

    def __getitem__(self, place: int) -> Pending:
        return replace(self, place=place)

    def tensor(self) -> Tensor:
        """Wait for the tensor and return it; raises the collective's error if it failed."""
        result = self.result.result()
        found: Tensor = result if self.place is None else result[self.place]
        return found


class Lane(ABC):
    """A queue that runs a rank's collectives one after the other."""

    @abstractmethod
    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        """Enqueue ``run(*args)`` after everything issued before.

        ``args`` may contain pending results of this lane, also in lists.
        """

    def wait(self, pending: Pending) -> Tensor:
        """Return a result that the operators after this call may read."""
        return pending.tensor()

    def idle(self, wait: Callable[[], Result]) -> Result:
        """Wait for something else than a collective of this lane, such as another stage."""
        return wait()


class InlineLane(Lane):
    """Runs each collective immediately."""

    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        return Pending(_done(run(*map(_resolved, args))))


class ThreadLane(Lane):
    """Runs collectives in a thread of its own, which ends with the lane.

    After a failure it runs nothing more: every later result raises the same error.
    """

    def __init__(self) -> None:
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs = jobs
        # A daemon: a collective with a dead peer must not keep this process alive.
        threading.Thread(target=_serve, args=(jobs,), name="collectives", daemon=True).start()
        weakref.finalize(self, jobs.put, None)

    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        result: Future[Any] = Future()
        self._jobs.put(_Job(run, args, result))
        return Pending(result)


class StreamLane(Lane):
    """Runs collectives in a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        resolved = [_resolved(arg) for arg in args]
        for tensor in _tensors(resolved):
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            result = run(*resolved)
        return Pending(_done(result), done=self._stream.record_event())

    def wait(self, pending: Pending) -> Tensor:
        current = torch.cuda.current_stream(self._stream.device)
        assert pending.done is not None
        current.wait_event(pending.done)
        found = pending.tensor()
        for tensor in _tensors([found]):  # what is issued beside collectives may have no result
            tensor.record_stream(current)
        return found


def lane_of(comm: Comm, device: torch.device) -> Lane:
    """Return the lane for a communicator and the device of its tensors."""
    if not isinstance(comm, ProcessGroupComm):
        return InlineLane()
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class _Job(NamedTuple):
    run: Callable[..., Any]
    args: tuple[Any, ...]
    result: Future[Any]


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    failed: BaseException | None = None
    with torch.no_grad():  # gradient mode is a setting of each thread
        while (job := jobs.get()) is not None:
            run, args, result = job
            del job  # keep no reference to results and arguments after the call
            if failed is None:
                try:
                    result.set_result(run(*map(_resolved, args)))
                except BaseException as error:
                    failed = error
            if failed is not None:
                result.set_exception(failed)
            del run, args, result


def _resolved(arg: Any) -> Any:
    if isinstance(arg, Pending):
        return arg.tensor()
    return [_resolved(entry) for entry in arg] if isinstance(arg, list) else arg


def _tensors(args: list[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from _tensors(arg)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
