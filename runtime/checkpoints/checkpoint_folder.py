"""A folder of checkpoints: which are complete, how one is published, how many are kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

from hap.errors import CheckpointError, InputError, reason_of

INDEX = "checkpoint.json"
"""The file of a checkpoint that names its tensors and files; it is written last."""

VERSION = 1

LATEST = "latest"
_OLD = ".old.tmp"
_STEP = re.compile(r"step-(\d+)")


class CheckpointFolder:
    """``step-N`` for each complete checkpoint, ``step-N.TOKEN.tmp`` for one that is being written.

    A checkpoint is published by a rename, after all of its files are on the disk. The file
    ``latest`` names the last one that was published.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def at(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def begin(self, step: int) -> Path:
        """Make the empty folder of an unpublished checkpoint; remove what killed runs left.

        Its name is new each time, so that another run in the same folder has no part in it.
        """
        self.recover()
        for left in self.path.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        part = self.path / f"step-{step}.{uuid.uuid4().hex[:12]}.tmp"
        part.mkdir()
        return part

    def publish(self, part: Path, step: int, index: dict[str, Any], keep: int | None) -> None:
        """Write the index, publish the checkpoint in ``part``, and remove all but the last ``keep``."""
        final = self.at(step)
        write_durably(part / INDEX, json.dumps(index, separators=(",", ":"), allow_nan=False))
        _sync_folder(part)
        again = final.exists()
        if again:
            final.rename(self._old(step))
        part.rename(final)
        _sync_folder(self.path)
        if again:
            shutil.rmtree(self._old(step))
        write_durably(self.path / f"{LATEST}.tmp", f"{final.name}\n")
        os.replace(self.path / f"{LATEST}.tmp", self.path / LATEST)
        _sync_folder(self.path)
        try:
            self._prune(step, keep)
        except OSError as error:  # the new one is complete
            warnings.warn(
                f"{self.path}: an old checkpoint can't be removed: {reason_of(error)}", stacklevel=2
            )

    def _prune(self, step: int, keep: int | None) -> None:
        """Remove incomplete checkpoints of later steps, and all complete ones but the last ``keep``."""
        for other in self.steps():
            if other > step and not is_complete(self.at(other)):
                self._remove(other)
        if keep is not None:
            for old in self.steps()[:-keep]:
                self._remove(old)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; first rename it, so that no half of it looks like one."""
        gone = self.path / f"step-{step}.gone.tmp"
        self.at(step).rename(gone)
        shutil.rmtree(gone)

    def _old(self, step: int) -> Path:
        return self.path / f"step-{step}{_OLD}"

    def recover(self) -> None:
        """Put back a checkpoint whose replacement was interrupted between two renames."""
        for old in self.path.glob(f"step-*{_OLD}"):
            name = old.name.removesuffix(_OLD)
            if _STEP.fullmatch(name) and not (self.path / name).exists():
                with contextlib.suppress(OSError):  # another rank was first
                    old.rename(self.path / name)

    def check_newest(self, step: int) -> None:
        """Check that no complete checkpoint is newer than the one to be saved.

        Raises:
            InputError: there is one, of a run that went further than this one.
        """
        for other in self.steps():
            if other > step and is_complete(self.at(other)):
                raise InputError(
                    f"there is a checkpoint of the later step {other}", where=str(self.path),
                    hint=f"save step {step} into another folder, or remove the later checkpoints",
                )  # fmt: skip

    def steps(self) -> list[int]:
        """Return the steps of the published checkpoints, in ascending order."""
        if not self.path.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)


def is_complete(path: Path) -> bool:
    """Is there a checkpoint whose files all have their sizes?"""
    try:
        read_index(path)
    except CheckpointError:
        return False
    return True


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of one checkpoint, after a check that its files are complete.

    Raises:
        CheckpointError: the index is absent or damaged, or a file is absent or cut off.
    """

    def fail(
        reason: str, hint: str = "load another checkpoint, by its own folder"
    ) -> CheckpointError:
        return CheckpointError(reason, where=str(path), hint=hint)

    if (path / ".metadata").exists() and not (path / INDEX).exists():
        raise fail(
            "this checkpoint of torch.distributed.checkpoint has a pickle in it (.metadata), "
            "which hap does not read",
            "convert it where it was made, with torch.distributed.checkpoint.format_utils."
            "dcp_to_torch_save, and give the file to hap import",
        )
    try:
        index = json.loads((path / INDEX).read_bytes())
    except FileNotFoundError:
        raise fail(
            f"there is no {INDEX}, so this is no checkpoint of hap",
            "name a folder that hap run or Trainer.save wrote",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "damaged or cut off"
        raise fail(f"{INDEX} is unreadable: {reason}") from None
    if not isinstance(index, dict) or not isinstance(index.get("version"), int):
        raise fail(f"{INDEX} is not the index of a checkpoint of hap")
    if index["version"] > VERSION:
        raise fail(
            f"the checkpoint has version {index['version']}, this hap reads up to {VERSION}",
            "update hap",
        )
    with damaged(path):
        for name, size in index["files"].items():
            if Path(name).name != name:
                raise fail(f"{INDEX} names a file outside of the folder: {name}")
            try:
                there = (path / name).stat().st_size
            except OSError as error:
                raise fail(f"{name} is unreadable: {reason_of(error)}") from None
            if there != size:
                raise fail(f"{name} has {there} bytes of {size}")
    return index


@contextlib.contextmanager
def damaged(path: Path) -> Any:
    """Report entries of an index that are absent or of the wrong kind."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{INDEX} is damaged ({type(error).__name__}: {error})", where=str(path),
            hint="load an older checkpoint, by its own folder",
        ) from error  # fmt: skip


def newest(path: str | Path) -> tuple[Path, list[str]]:
    """Return the newest complete checkpoint of a folder, and what is wrong with newer ones.

    Args:
        path: a folder of checkpoints, or one checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    folder = CheckpointFolder(path)
    skipped = []
    if (folder.path / INDEX).exists() or (folder.path / ".metadata").exists():
        read_index(folder.path)
        return folder.path, []
    folder.recover()
    for step in reversed(folder.steps()):
        try:
            read_index(folder.at(step))
        except CheckpointError as error:
            skipped.append(f"{folder.at(step).name}: {error.what}")
            continue
        return folder.at(step), skipped
    if skipped:
        raise CheckpointError(
            f"no checkpoint here is complete: {'; '.join(skipped)}", where=str(path),
            hint="give the folder of another run, or start anew in another folder",
        )  # fmt: skip
    what = "there is no checkpoint here" if folder.path.is_dir() else "there is no such folder"
    raise CheckpointError(
        what, where=str(path),
        hint="give the folder that --checkpoint or hap.save wrote; hap import makes one of weights",
    )  # fmt: skip


def write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_sync_folder = sync_file
