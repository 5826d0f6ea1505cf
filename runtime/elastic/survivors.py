"""The ranks that are left after a loss agree on what they save, by files in a folder of the run.

A lost rank may have served the store, and collectives need all ranks. The folder of checkpoints is
seen by all that are left. ``loss-TOKEN`` in it belongs to one start of the ranks:

    rank-N.json       rank N stands still, its state is that after the step in the file
    decision.json     the step that is saved, and the ranks that write it; the first one counts
    part/             the checkpoint
    written-N.json    what rank N wrote there
    done.json         the outcome, for all
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

PERIOD_S = 0.25
"""Seconds between two looks at the folder."""

PATIENCE_S = 2.0
"""Seconds for which ranks wait for further ones although those that are there hold everything."""

DECIDE_S = 5.0
"""The longest time until the decision; ranks that do not stand still by then take no part."""

SAVE_S = 60.0
"""The longest time for writing."""

_NAME = "loss-"


class SaveDecision(NamedTuple):
    """The step to save and the ranks that write it; ``step`` is ``None`` for no save."""

    step: int | None
    ranks: tuple[int, ...]


class Survivors:
    """One rank's view of the folder.

    Every method raises ``OSError`` if the folder is gone: on a disk that is lost, or because the
    ranks have been started again.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self._rank, self._world_size = folder, rank, world_size

    def heard(self) -> bool:
        """Does any rank stand still because it noticed a loss?"""
        return self.folder.is_dir() and any(self.folder.glob("rank-*.json"))

    def agree(self, step: int | None, holds: Callable[[Collection[int]], bool]) -> SaveDecision:
        """Tell the step after which this rank stands still; return what all save.

        Args:
            step: ``None``: this rank is in the middle of an update.
            holds: do these ranks hold every parameter and buffer?
        """
        self._replace(f"rank-{self._rank}.json", step)
        begun = time.monotonic()
        while True:
            decided = self._read("decision.json")
            if decided is not None:
                return SaveDecision(decided["step"], tuple(decided["ranks"]))
            steps = self._steps()
            choice = _choice(steps, holds)
            waited_s = time.monotonic() - begun
            almost_all = len(steps) >= self._world_size - 1
            enough = almost_all or waited_s > PATIENCE_S
            hopeless = (almost_all and waited_s > PATIENCE_S) or waited_s > DECIDE_S
            if (choice.step is not None and enough) or hopeless:
                self._propose("decision.json", choice._asdict())
            else:
                time.sleep(PERIOD_S / 5)

    def wrote(self, index: Any) -> None:
        """Tell the first writer what this rank wrote."""
        self._replace(f"written-{self._rank}.json", index)

    def written(self, ranks: Collection[int]) -> list[Any]:
        """Wait for all writers; return what they wrote.

        Raises:
            OSError: one of them failed, or it took too long.
        """
        deadline = time.monotonic() + SAVE_S
        while time.monotonic() < deadline:
            found = [self._read(f"written-{rank}.json") for rank in ranks]
            if None not in found:
                return found
            failed = self._read("done.json")
            if failed is not None:
                raise OSError(failed)
            time.sleep(PERIOD_S / 5)
        raise OSError(f"not all of the ranks {list(ranks)} wrote within {SAVE_S:.0f} s")

    def end(self, outcome: str) -> None:
        """Tell all that there is nothing more to wait for."""
        self._propose("done.json", outcome)

    def wait(self) -> None:
        """Wait for the outcome: a launcher that sees a rank end may end the others."""
        deadline = time.monotonic() + SAVE_S
        while self._read("done.json") is None and time.monotonic() < deadline:
            if not self.folder.is_dir():
                return
            time.sleep(PERIOD_S / 5)

    def _steps(self) -> dict[int, int | None]:
        found = {}
        for path in self.folder.glob("rank-*.json"):
            found[int(path.stem.partition("-")[2])] = json.loads(path.read_text())
        return found

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def _replace(self, name: str, content: Any) -> None:
        """Write a file so that others see all of it or nothing."""
        os.replace(self._made(content), self.folder / name)

    def _propose(self, name: str, content: Any) -> None:
        """Write a file unless it is there."""
        made = self._made(content)
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.link(made, self.folder / name)
        made.unlink()  # both names are one file: written again, it would change the other

    def _made(self, content: Any) -> Path:
        made = self.folder / f"{self._rank}.tmp"
        made.write_text(json.dumps(content))
        return made


def _choice(steps: dict[int, int | None], holds: Callable[[Collection[int]], bool]) -> SaveDecision:
    """Return the last step after which ranks that hold everything stand still."""
    for step in sorted({s for s in steps.values() if s is not None}, reverse=True):
        ranks = tuple(sorted(rank for rank, at in steps.items() if at == step))
        if holds(ranks):
            return SaveDecision(step, ranks)
    return SaveDecision(None, ())


def new_folder(folder: Path) -> Path:
    """Make the folder of this start of the ranks."""
    made = folder / f"{_NAME}{uuid.uuid4().hex[:12]}"
    made.mkdir()
    return made


def forget(folder: Path) -> None:
    """Remove the folders of earlier starts, so that no rank of theirs publishes anything from now on.

    One rank calls it before any looks for the newest checkpoint.
    """
    for old in folder.glob(f"{_NAME}*"):
        gone = old.with_name(f"{old.name}.gone")
        old.rename(gone)
        shutil.rmtree(gone)
