"""Results of a race: a line of JSON per cell."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.racing.agenda import Slot


@dataclass(slots=True, kw_only=True)
class Entry:
    """One contender in one cell.

    Attributes:
        void: The reason why the entry is void; empty if it counts.
        seconds: Seconds of its step in each counted round; rounds are those of the whole cell.
        warm_up: Seconds of its steps before those, with limits.
        losses: Losses of all its steps, from the first on.
        peak_bytes: Per rank, peak of live tensor bytes in its second step.
        predicted_s: Predicted step, of a plan.
        predicted_bytes: Predicted peak per rank, of a plan; 0 for a rank that it leaves out.
        note: A remark, such as the devices that a plan leaves out.
    """

    name: str
    void: str = ""
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    predicted_s: float = 0.0
    predicted_bytes: list[int] = field(default_factory=list)
    note: str = ""
    warm_up: list[float] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        return not self.void and bool(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        """Distance between the first and the third quartile."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


@dataclass(slots=True, kw_only=True)
class Cell:
    """All contenders for one model on one cluster.

    Attributes:
        unlike: Whether the cluster's devices or links differ.
        reference: Losses of one device for the same steps.
        arithmetic_s: Floor of the step: its products at the summed speed of all devices.
        bound_s: Proved floor of the step, for the programs that ``covers`` names; 0 if none.
        drift: Per counted round, time of the model's kinds of work relative to the profile, for
            the ranks' first share of a core.
        pace: Per counted round, the ranks' share of a core relative to the first.
        took_s: Seconds of the whole cell.
        options: Options of the race that affect the measurements.
        code: The commit that raced it, with a + if it was changed; empty if unknown.
        rows, run: See :class:`benchmarks.racing.agenda.Slot`.
        begun: When the race that it belongs to began, in seconds since the epoch.
    """

    model: str
    cluster: str
    unlike: bool
    reference: list[float]
    entries: list[Entry]
    arithmetic_s: float = 0.0
    bound_s: float = 0.0
    covers: str = ""
    drift: list[float] = field(default_factory=list)
    pace: list[float] = field(default_factory=list)
    took_s: float = 0.0
    options: str = ""
    code: str = ""
    rows: int = 1
    run: int = 1
    begun: float = 0.0

    @property
    def slot(self) -> Slot:
        return Slot(self.model, self.cluster, self.rows, self.run)

    def entry(self, name: str) -> Entry | None:
        """Return the contender's entry if it counts."""
        return next((e for e in self.entries if e.name == name and e.counts), None)

    @property
    def slower(self) -> float:
        """Median time of the devices relative to the profile."""
        pairs = zip_longest(self.drift, self.pace, fillvalue=1.0)
        return statistics.median([drift / pace for drift, pace in pairs] or [1.0])

    @property
    def limit_s(self) -> float:
        return max(self.arithmetic_s, self.bound_s)


def append(path: Path, cell: Cell) -> None:
    """Append a cell to a file of lines."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(as_lines([cell]))


def as_lines(cells: Sequence[Cell]) -> list[str]:
    """Return a line per cell, in the format of :func:`read`."""
    return [json.dumps(asdict(cell)) + "\n" for cell in cells]


def read(path: Path) -> list[Cell]:
    """Return the cells of a file of lines.

    Raises:
        ValueError: a slot is there twice: a cell that is raced again is a run of its own.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = [_cell(json.loads(line)) for line in lines if line]
    if len({cell.slot for cell in cells}) < len(cells):
        raise ValueError(f"{path} has two cells of one slot")
    return cells


def _cell(data: dict[str, Any]) -> Cell:
    return Cell(**{**data, "entries": [Entry(**entry) for entry in data["entries"]]})


def judge_losses(entry: Entry, reference: Sequence[float], tolerance: float) -> None:
    """Make an entry void if its losses differ from one device's by a relative tolerance."""
    for step, (loss, right) in enumerate(zip(entry.losses, reference, strict=False), 1):
        if not abs(loss - right) <= tolerance * abs(right):  # true for NaN, too
            entry.void = entry.void or f"loss {loss:.6f} in step {step}, one device {right:.6f}"


def judge_memory(entry: Entry, memory_bytes: Sequence[int], names: Sequence[str]) -> None:
    """Make an entry void if its peak exceeds the memory of some device."""
    for peak, limit, name in zip(entry.peak_bytes, memory_bytes, names, strict=False):
        if peak > limit and not entry.void:
            entry.void = f"out of memory: {peak / 2**20:.0f} of {limit / 2**20:.0f} MiB on {name}"
