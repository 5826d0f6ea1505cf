"""SIGTERM as a notice: the ranks agree on it after a step, so that all save the same step and end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from hap.errors import Terminated
from hap.runtime.rank_process import PR_SET_PDEATHSIG


class SavedAndEnded(Terminated):
    """A run ended after a notice; its checkpoint is complete.

    Attributes:
        step: of that checkpoint.
    """

    def __init__(self, step: int) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.step = step

    def __str__(self) -> str:
        return f"SIGTERM: step {self.step} is saved; --resume auto continues from it"


@contextlib.contextmanager
def forks_without_notice() -> Iterator[None]:
    """Keep a notice to this process from its forks, such as the workers of a DataLoader.

    Launchers signal a rank's process group, and a worker that ends fails the rank. Each fork inside of
    the context leads a group of its own. One of the main thread ends with this process, also if this
    process is killed; a DataLoader's workers do so in any case.
    """
    global _parent
    _at_forks()
    before, _parent = _parent, os.getpid()
    try:
        yield
    finally:
        _parent = before


_parent = 0  # the process whose forks lead groups of their own
_in_main = False  # is the fork that begins one of the main thread?


@functools.cache
def _at_forks() -> None:
    libc = ctypes.CDLL(None)

    def before() -> None:
        global _in_main
        _in_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if not _parent or os.getppid() != _parent:
            return
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the notice is the parent's
        if _in_main:  # the kernel looks at the thread that forked
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != _parent:
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


class Notice:
    """Waits for SIGTERM; a context manager that all ranks enter together.

    A second SIGTERM ends the process at once. Outside the main thread, which alone receives
    signals, only the notices of other ranks count.
    """

    def __init__(self) -> None:
        self._heard = False
        self._group = None
        self._before: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def given(self) -> bool:
        """Return whether any rank has had a notice; all ranks call it after the same step."""
        if self._group is None:
            return self._heard
        heard = torch.tensor(int(self._heard))
        dist.all_reduce(heard, dist.ReduceOp.MAX, group=self._group)
        return bool(heard)
