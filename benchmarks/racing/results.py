"""Results of a race: a line of JSON per cell."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any


@dataclass(slots=True, kw_only=True)
class Entry:
    """One contender in one cell.

    Attributes:
        void: Why it does not count; empty if it does.
        seconds: Of its step in each counted round; rounds are those of the whole cell.
        losses: Of all its steps, from the first on.
        peak_bytes: By rank: live tensor bytes at the fullest moment of its second step.
        predicted_s: Of a plan: its step.
        predicted_bytes: Of a plan: its peak by rank; 0 for a rank that it leaves out.
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

    @property
    def counts(self) -> bool:
        return not self.void and bool(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        """Between the first and the third quartile."""
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
        bound_s: Floor of the step as it is proved, with ``covers`` saying of what; 0 if nothing is.
        drift: By counted round, how many times as long the model's kinds of work took as in the
            profile, by the part of a core that ranks had then.
        pace: By counted round, how many times that part they were given for it.
        took_s: Of the whole cell.
        options: Of the race, as far as they change what is measured.
        code: The commit that raced it, with a + if it was changed; empty if that is not known.
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

    def entry(self, name: str) -> Entry | None:
        """The contender's entry if it counts."""
        return next((e for e in self.entries if e.name == name and e.counts), None)

    @property
    def slower(self) -> float:
        """Time of the devices relative to the profile."""
        pairs = zip_longest(self.drift, self.pace, fillvalue=1.0)
        return statistics.median([drift / pace for drift, pace in pairs] or [1.0])

    @property
    def limit_s(self) -> float:
        return max(self.arithmetic_s, self.bound_s)


def append(path: Path, cell: Cell) -> None:
    """Add a cell to a file of lines."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(as_lines([cell]))


def as_lines(cells: Sequence[Cell]) -> list[str]:
    """A line per cell, as :func:`read` reads them."""
    return [json.dumps(asdict(cell)) + "\n" for cell in cells]


def read(path: Path) -> list[Cell]:
    """The cells of a file of lines; of one that was raced again, the last."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = [_cell(json.loads(line)) for line in lines if line]
    return list({(cell.model, cell.cluster): cell for cell in cells}.values())


def _cell(data: dict[str, Any]) -> Cell:
    return Cell(**{**data, "entries": [Entry(**entry) for entry in data["entries"]]})


def judge_losses(entry: Entry, reference: Sequence[float], tolerance: float) -> None:
    """Make an entry void whose losses are not those of one device, to a relative tolerance."""
    for step, (loss, right) in enumerate(zip(entry.losses, reference, strict=False), 1):
        if not abs(loss - right) <= tolerance * abs(right):  # not a number is wrong, too
            entry.void = entry.void or f"loss {loss:.6f} in step {step}, one device {right:.6f}"


def judge_memory(entry: Entry, memory_bytes: Sequence[int], names: Sequence[str]) -> None:
    """Make an entry void that held more on some device than the device has."""
    for peak, limit, name in zip(entry.peak_bytes, memory_bytes, names, strict=False):
        if peak > limit and not entry.void:
            entry.void = f"out of memory: {peak / 2**20:.0f} of {limit / 2**20:.0f} MiB on {name}"
