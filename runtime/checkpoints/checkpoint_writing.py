"""Checkpoints are written beside training: one at a time, by a thread per process."""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from hap.errors import CheckpointError, HapError, InputError
from hap.runtime.collectives import LocalComm, ProcessGroupComm
from hap.runtime.hap_module import HapModule

T = TypeVar("T")

warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class Writing:
    """The checkpoints of one module: its process group, and the save that is in flight.

    The ranks exchange what they write through a gloo group of their own, so that they never mix
    with the collectives of a step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.rank, self.world_size = 0, 1
        self.group: dist.ProcessGroup | None = None
        self.folders: set[str] = set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._what = ""
        if not isinstance(module, HapModule) or isinstance(module._comm, LocalComm):
            return
        comm = module._comm
        if not isinstance(comm, ProcessGroupComm):
            raise InputError(
                "emulated ranks cannot save or load checkpoints",
                hint="start a process per rank, with torchrun for example",
            )
        self.rank, self.world_size = comm.rank, comm.world_size
        ranks = None if comm._group is None else dist.get_process_group_ranks(comm._group)
        self.group = dist.new_group(ranks, backend="gloo")

    @property
    def alone(self) -> bool:
        return self.group is None

    def start(self, write: Callable[[], object], what: str) -> None:
        """Run ``write`` in a thread, after the save in flight has ended."""
        self.finish()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._what = what
        self._thread = threading.Thread(target=run, name=f"hap {what}")
        self._thread.start()

    def join(self) -> None:
        """Wait for the save in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait for the save in flight; raise its error, or that of one that has ended."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise_told(error, f"{self._what} was not saved")

    def together(self, act: Callable[[], T], same: Mapping[str, str] | None = None) -> T:
        """Return this rank's ``act()``; if it fails on any rank, raise that error on all.

        Args:
            same: digests that must be those of the first rank, by the name of what they are of; ``act`` may add them.

        Raises:
            InputError: a digest differs.
        """
        if self.group is None:
            return act()
        result: T | None = None
        failed: HapError | None = None
        unexpected: Exception | None = None
        try:
            result = act()
        except HapError as error:
            failed = error
        except Exception as error:  # the others must not wait for this rank
            unexpected = error
            failed = HapError(f"rank {self.rank}: {type(error).__name__}: {error}")
        told: list[tuple[HapError | None, Mapping[str, str]]] = [(None, {})] * self.world_size
        dist.all_gather_object(told, (failed, same or {}), group=self.group)
        if unexpected is not None:
            raise unexpected
        raised = [error for error, _ in told if error is not None]
        if raised:
            raise raised[0]
        for rank, (_, digests) in enumerate(told):
            for name in told[0][1].keys() | digests.keys():
                if told[0][1].get(name) != digests.get(name):
                    raise InputError(
                        f"{name} of rank {rank} differs from that of rank 0, which alone would be saved",
                        hint="keep a rank's parts of parameters, such as averages of weights, in another module of the "
                        "plan, and save that; hap.save already saves the random generators of each rank",
                    )
        return result  # type: ignore[return-value]

    def of_first(self, act: Callable[[], T]) -> T:
        """Return rank 0's ``act()`` on every rank; if it fails, raise its error on all."""
        found = [self.together(lambda: act() if self.rank == 0 else None)]
        if self.group is not None:
            dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]  # type: ignore[return-value]


_open: weakref.WeakKeyDictionary[nn.Module, Writing] = weakref.WeakKeyDictionary()


def writing_of(module: nn.Module) -> Writing:
    """Return the saves of a module. All ranks must make the first call together."""
    if module not in _open:
        _open[module] = Writing(module)
    return _open[module]


def join_all() -> None:
    """Wait for the saves of all modules; their errors are kept for later."""
    for writing in list(_open.values()):
        writing.join()


def wait_for_saves() -> None:
    """Wait until all checkpoints are written.

    Call it on every rank at the end of training, before ``destroy_process_group``.

    Raises:
        CheckpointError: a checkpoint could not be written.
    """
    for writing in list(_open.values()):
        writing.finish()


def raise_told(error: BaseException, what: str) -> NoReturn:
    """Raise the error of a save or load for people; other errors are raised as they are."""
    cause, where = error, ""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda pair: pair[0])
        where = f"rank {rank}: "
    if isinstance(cause, HapError):
        raise cause
    if isinstance(cause, OSError | SafetensorError):
        hint = "the state in memory and older checkpoints are unchanged; free or repair the disk"
        raise CheckpointError(f"{what}: {where}{cause}", hint=hint) from None
    raise error


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_saves()
    except HapError as error:
        print(f"error: {error}", file=sys.stderr)
