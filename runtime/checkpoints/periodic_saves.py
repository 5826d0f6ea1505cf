"""The checkpoints of a run: one that fails does not end training, several in a row do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from hap.errors import CheckpointError
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.checkpoints.checkpoint_writing import wait_for_saves

IN_A_ROW = 3
"""The number of saves after each other whose failure ends the run."""


class PeriodicSaves:
    """Saves every few steps, and goes on if a save fails: all ranks see the same error.

    Args:
        begin: begins to save; the arguments are the folder, the step and how many to keep.
        first: is this rank 0, which prints?
        checkpoints: where, how often, and how many of them stay.
    """

    def __init__(
        self, begin: Callable[[str, int, int | None], None], first: bool, checkpoints: Checkpoints
    ) -> None:
        self._begin, self._first, self._checkpoints = begin, first, checkpoints
        self._failed = 0
        self._in_flight = self._warned = False

    @property
    def folder(self) -> str:
        return self._checkpoints.folder

    def ended(self, step: int, loss: float, *, must: bool) -> None:
        """Save the step that has ended if it is time; all ranks call it.

        While the loss is not finite, no older checkpoint is removed: the weights of a newer one may be
        lost.

        Args:
            must: save it in any case, and return after the checkpoint is complete.

        Raises:
            CheckpointError: the step must be saved and cannot be, or several saves in a row failed.
        """
        keep = self._checkpoints.keep
        if not math.isfinite(loss):
            keep = None
            if not self._warned:
                self._print(
                    f"the loss is {loss:g} at step {step}: until it is finite, no older checkpoint is removed; "
                    f"to go back, give --resume {self.folder}/step-N and another --checkpoint"
                )
            self._warned = True
        if must:
            self._save_now(step, keep)
        elif step % self._checkpoints.every == 0:
            self._save(step, keep)

    def _save_now(self, step: int, keep: int | None) -> None:
        try:
            wait_for_saves()
        except CheckpointError as error:
            self._print(f"training goes on: {error}")  # this save replaces the one that failed
        self._begin(self.folder, step, keep)
        wait_for_saves()

    def _save(self, step: int, keep: int | None) -> None:
        """Wait for the save in flight, and begin this one."""
        if self._succeeds(wait_for_saves) and self._in_flight:
            self._failed = 0
        self._in_flight = self._succeeds(lambda: self._begin(self.folder, step, keep))

    def _succeeds(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except CheckpointError as error:
            self._failed += 1
            if self._failed >= IN_A_ROW:
                raise
            self._print(f"training goes on: {error}")
            return False
        return True

    def _print(self, text: str) -> None:
        if self._first:
            print(text, file=sys.stderr, flush=True)
