"""Where and how often a run saves checkpoints, and the one that it resumes from."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hap.errors import CheckpointError, InputError, reason_of
from hap.runtime.checkpoints.checkpoint import Saved
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder, newest, read_index


class Resumable(Protocol):
    """A training run that can load a checkpoint."""

    rank: int
    batch_size: int

    @property
    def seeks(self) -> bool: ...

    def batches(self, start: int = 0) -> Iterator[Any]: ...

    def load(self, folder: str) -> Saved: ...


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        folder: where they are saved.
        every: steps between two.
        keep: number of the newest that stay.
        resume: ``auto`` for the newest complete one if there is any, ``no``, or one's folder.
    """

    folder: str
    every: int = 100
    keep: int | None = 3
    resume: str = "no"

    def check(self) -> None:
        """Check the folder before the ranks start.

        Raises:
            InputError: the run would mix with the checkpoints of another one.
            CheckpointError: the checkpoint to resume from is absent or incomplete, or no file can be
                written in the folder.
        """
        self._check_writable()
        steps = CheckpointFolder(self.folder).steps()
        if self.resume == "no" and steps:
            raise InputError(
                f"there are checkpoints already, up to step {steps[-1]}", where=self.folder,
                hint="continue from them with --resume auto, or give another folder",
            )  # fmt: skip
        found = self._found()
        if found is not None:
            CheckpointFolder(self.folder).check_newest(read_index(found[0])["step"])

    def _check_writable(self) -> None:
        """Write a temporary file in the folder, or in the one that it would be made in."""
        folder = Path(self.folder)
        try:
            there = next(place for place in (folder, *folder.parents) if place.exists())
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be saved there: {reason_of(error)}", where=self.folder,
                hint="give a folder that can be written",
            ) from None  # fmt: skip

    def options(self) -> list[str]:
        """Return the options of ``hap run`` that give these checkpoints."""
        keep = ["--keep", str(self.keep)] if self.keep is not None else []
        words = ["--checkpoint", self.folder, "--every", str(self.every), *keep]
        return [*words, "--resume", self.resume]

    def _found(self) -> tuple[Path, list[str]] | None:
        """Return the checkpoint to resume from, and what is wrong with newer ones."""
        if self.resume == "no":
            return None
        if self.resume != "auto":
            return newest(self.resume)
        return newest(self.folder) if CheckpointFolder(self.folder).steps() else None

    def resumed(self, run: Resumable) -> tuple[int, Iterator[Any]]:
        """Load the checkpoint to resume from; returns the steps that are done, and the next batches.

        Unless the model file can begin with any batch, those of the steps that are done are drawn
        again before the random generators are restored: so the data goes on as it would have.
        """
        found = self._found()
        if found is None:
            return 0, run.batches()
        path, skipped = found
        index = read_index(path)
        step, rows = int(index["step"]), int(index["batch_size"])
        if rows not in (0, run.batch_size):
            raise CheckpointError(
                f"it was trained with batches of {rows} rows, this plan has {run.batch_size}",
                where=str(path),
                hint="plan for the same global batch; to change it, start from the weights alone, "
                "with hap export and hap import",
            )
        batches = run.batches(step if run.seeks else 0)
        for _ in range(0 if run.seeks else step):
            next(batches)
        run.load(str(path))
        if run.rank == 0:
            lines = [f"incomplete, skipped: {reason}" for reason in skipped]
            print(*lines, f"resumed from {path}", sep="\n", file=sys.stderr, flush=True)
        return step, batches
