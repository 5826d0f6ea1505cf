"""Run one cell from the parent: start the ranks, collect reports, restart without the failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.contenders.base import as_step, built, optimizer, train
from benchmarks.racing.cell import Said, Task, global_batches, race_rank
from benchmarks.racing.results import Entry
from hap.capture.model_file import ModelFile
from hap.errors import HapError
from hap.runtime.testbed import Testbed

Heard = Callable[[Said], None]


def reference(file: ModelFile, steps: int) -> list[float]:
    """Return the losses of plain training on one device, in this process."""
    torch.set_num_threads(1)
    batches = global_batches(file, steps)
    module = as_step(file, built(file), batches[0])
    trained = optimizer(file, list(module.parameters()))
    return [train(module, trained, batch).item() for batch in batches]


def run_cell(
    bed: Testbed, task: Task, heard: Heard = lambda said: None, *, timeout_s: float | None = None
) -> list[Entry]:
    """Return the entries of all contenders of a task, in its order.

    A contender that ends the ranks, or leaves them waiting, is void; the cell then starts again
    with the others, and all seconds are from that last start. Speeds are limited once all of
    them are built, and each round holds them to the profiled speeds of the task.
    """
    void: dict[str, str] = {}
    while names := tuple(name for name in task.names if name not in void):
        hearing = _Hearing(names, bed, heard)
        try:
            bed.spawn(
                race_rank, (replace(task, names=names),), on_report=hearing,
                timeout_s=timeout_s, limited=False,
            )  # fmt: skip
        except HapError as error:
            if hearing.running is None:
                raise
            cause = hearing.failed.get(hearing.running) or first_line(error)
            void[hearing.running] = cause
            continue
        found = hearing.entries
        for name in hearing.dropped:  # a later rank's report may follow the first one
            found[name].void = hearing.failed[name]
        return [found.get(name) or Entry(name=name, void=void[name]) for name in task.names]
    return [Entry(name=name, void=why) for name, why in void.items()]


class _Hearing:
    """Gathers entries from reports."""

    def __init__(self, names: Sequence[str], bed: Testbed, heard: Heard) -> None:
        self.entries = {name: Entry(name=name) for name in names}
        self.running: str | None = None
        self.failed: dict[str, str] = {}
        self.dropped: list[str] = []
        self._bed, self._heard = bed, heard

    def __call__(self, rank: int, said: Any) -> None:
        assert isinstance(said, Said)
        if said.what == "ready":
            self._bed.limit(rank, said.pid)
            return
        if said.what == "looked":
            slower = said.slower * self._bed.pace  # relative to the ranks' first share of a core
            self._bed.hold(slower)
            self._heard(replace(said, slower=slower))
            return
        entry = self.entries[said.name]
        match said.what:
            case "begun":
                self.running = said.name
            case "failed":
                self.failed.setdefault(said.name, f"rank {rank}: {said.text}")
            case "dropped":
                self.dropped.append(said.name)
            case "built":
                entry.losses += said.losses
                entry.peak_bytes = list(said.peak_bytes)
            case "stepped":
                entry.losses += said.losses
                if said.counted:
                    entry.seconds.append(said.seconds)
                elif said.round >= 0:
                    entry.warm_up.append(said.seconds)
        self._heard(said)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]
