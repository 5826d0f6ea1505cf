"""Where and how often a run saves checkpoints, and the one that it resumes from."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hap.errors import CheckpointError, InputError, reason_of
from hap.runtime.checkpoints.checkpoint import Saved
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder, newest, read_index

AUTO = "auto"

_TELL_S = 30.0  # between two messages while batches are drawn again


class Resumable(Protocol):
    """A training run that can load a checkpoint."""

    rank: int
    batch_size: int

    @property
    def seeks(self) -> bool: ...

    def batches(self, start: int = 0) -> Iterator[Any]: ...

    def load(self, folder: str) -> Saved: ...

    def first_says(self, text: str) -> str:
        """Return what the first rank passes; a collective call."""
        ...


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        folder: where they are saved.
        every: steps between two.
        keep: number of the newest that stay.
        resume: ``auto`` for the newest complete one if there is any, ``auto:FOLDER`` for that of another
            folder unless its own has a later one, ``no``, or one's folder.
    """

    folder: str
    every: int = 100
    keep: int | None = 3
    resume: str = "no"

    @property
    def goes_on(self) -> bool:
        """Whether the run resumes from the newest checkpoint of its own folder, if there is one."""
        return self.resume == AUTO or self.resume.startswith(f"{AUTO}:")

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

    def again(self) -> Checkpoints:
        """Return the checkpoints of a run that goes on where this one ended, or begins as it did."""
        if self.goes_on:
            return self
        return replace(self, resume=AUTO if self.resume == "no" else f"{AUTO}:{self.resume}")

    def _check_writable(self) -> None:
        """Write a temporary file in the folder, or in the one that it would be made in."""
        folder = Path(self.folder)
        if folder.is_symlink() and not folder.exists():
            raise CheckpointError("this link is broken", where=self.folder, hint="remove it")
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
        if not self.goes_on:
            return newest(self.resume)
        first = self.resume.removeprefix(AUTO).removeprefix(":")
        found = [newest(first)] if first else []
        if CheckpointFolder(self.folder).steps():
            found.append(newest(self.folder))  # if both are of one step, this one
        return max(reversed(found), key=lambda one: read_index(one[0])["step"], default=None)

    def _chosen(self, run: Resumable) -> dict[str, Any]:
        """Return what the first rank finds; other ranks may not see the newest folder yet.

        Raises:
            CheckpointError: on all ranks, if it finds none.
        """
        found: dict[str, Any] = {}
        if run.rank == 0:
            try:
                if chosen := self._found():
                    path, skipped = chosen
                    index = read_index(path)
                    found = {"path": str(path), "skipped": skipped}
                    found |= {"step": int(index["step"]), "rows": int(index["batch_size"])}
            except CheckpointError as error:
                found = {"error": [error.what, error.where, error.hint]}
        found = json.loads(run.first_says(json.dumps(found)))
        if "error" in found:
            what, where, hint = found["error"]
            raise CheckpointError(what, where=where, hint=hint)
        return found

    def resumed(self, run: Resumable) -> tuple[int, Iterator[Any]]:
        """Load the checkpoint to resume from; returns the steps that are done, and the next batches.

        Unless the model file can begin with any batch, those of the steps that are done are drawn
        again before the random generators are restored: so the data goes on as it would have.
        """
        found = self._chosen(run)
        if not found:
            return 0, run.batches()
        path, step, rows = found["path"], found["step"], found["rows"]
        if rows not in (0, run.batch_size):
            raise CheckpointError(
                f"the checkpoint was trained with batches of {rows} rows, this plan has {run.batch_size}",
                where=path,
                hint="plan for the same global batch; to change it, start from the weights alone, "
                "with hap export and hap import",
            )
        batches = run.batches(step if run.seeks else 0)
        if not run.seeks:
            _draw_again(batches, step, run.rank == 0)
        run.load(path)
        if run.rank == 0:
            lines = [f"incomplete, skipped: {reason}" for reason in found["skipped"]]
            print(*lines, f"resumed from {path}", sep="\n", file=sys.stderr, flush=True)
        return step, batches


def _draw_again(batches: Iterator[Any], count: int, tells: bool) -> None:
    """Draw the batches of the steps that are done, and tell how far it is now and then."""
    told = time.monotonic()
    if tells and count:
        text = (
            f"reading {count} earlier batches again; batches(start) in the model file can skip them"
        )
        print(text, file=sys.stderr, flush=True)
    for number in range(count):
        next(batches)
        if tells and time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            print(f"read {number + 1} of {count}", file=sys.stderr, flush=True)
