"""Checkpoints that fail in a run: training goes on, and not for ever."""

from __future__ import annotations

import math

import pytest

from hap.errors import CheckpointError
from hap.runtime.checkpoints import periodic_saves
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.checkpoints.periodic_saves import PeriodicSaves


class Disk:
    """Saves like the real ones: an error of writing is raised by the next call."""

    def __init__(self, full: set[int], gone: set[int]) -> None:
        self.full, self.gone = full, gone
        self.saved: list[tuple[int, int | None]] = []
        self._error: CheckpointError | None = None

    def begin(self, folder: str, step: int, keep: int | None) -> None:
        if step in self.gone:
            raise CheckpointError("the folder of checkpoints is gone")
        if step in self.full:
            self._error = CheckpointError(f"step-{step} was not saved")
        else:
            self.saved.append((step, keep))

    def wait(self) -> None:
        error, self._error = self._error, None
        if error:
            raise error


def train(
    disk: Disk, steps: int, monkeypatch: pytest.MonkeyPatch, losses: dict[int, float] | None = None
) -> None:
    monkeypatch.setattr(periodic_saves, "wait_for_saves", disk.wait)
    saves = PeriodicSaves(disk.begin, True, Checkpoints(folder="c", every=1, keep=2))
    for step in range(1, steps + 1):
        saves.ended(step, (losses or {}).get(step, 0.5), must=step == steps)


@pytest.mark.parametrize(
    ("full", "gone", "saved"),
    [
        (set(), set(), [1, 2, 3, 4, 5, 6]),
        ({2, 3}, set(), [1, 4, 5, 6]),
        (set(), {2, 3}, [1, 4, 5, 6]),
        ({1, 2, 4, 5}, set(), [3, 6]),
        ({1}, {2, 4, 5}, [3, 6]),
    ],
)
def test_training_goes_on_after_failures(
    full: set[int], gone: set[int], saved: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    disk = Disk(full, gone)
    train(disk, 6, monkeypatch)
    assert [step for step, _ in disk.saved] == saved
    assert capsys.readouterr().err.count("training goes on: ") == len(full) + len(gone)


@pytest.mark.parametrize(
    ("full", "gone"),
    [({2, 3, 4}, set()), (set(), {2, 3, 4}), ({6}, set()), (set(), {6})],
    ids=["three in a row are full", "three in a row are gone", "the last full", "the last gone"],
)
def test_training_ends(full: set[int], gone: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError):
        train(Disk(full, gone), 6, monkeypatch)


def test_a_loss_that_is_not_finite_removes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(set(), set())
    train(disk, 5, monkeypatch, {2: math.inf, 4: math.nan, 5: math.nan})
    assert disk.saved == [(1, 2), (2, None), (3, 2), (4, None), (5, None)]
    assert capsys.readouterr().err.count("the loss is ") == 1
