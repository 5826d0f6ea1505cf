"""SIGTERM as a notice: the ranks agree on it after a step, so that all save the same step and end."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from hap.errors import Terminated


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
