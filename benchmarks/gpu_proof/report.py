"""The outcome of every line as JSON and as a page of tables."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

MET: Final = "met"
MISSED: Final = "missed"
SKIPPED: Final = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One claim and its outcome.

    Attributes:
        part: the part of the proof that checked it.
        claim: the statement that was checked.
        outcome: ``met``, ``missed`` or ``skipped``.
        seen: the figure that was measured, with its unit; empty if none was.
        aim: the figure to reach; empty if the claim has none.
        reason: why the line was missed or skipped.
    """

    part: str
    claim: str
    outcome: str
    seen: str = ""
    aim: str = ""
    reason: str = ""


def unprepared(part: str, claim: str) -> Line:
    """Return the line of something that has no prepared plan."""
    reason = "no prepared plan in the folder; run with --prepare"
    return Line(part=part, claim=claim, outcome=SKIPPED, reason=reason)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of the software."""
    found: dict[str, Any] = {
        "device": device.type, "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found |= {"gpus": names, "cuda": torch.version.cuda, "nccl": version}
    return found


def write(
    path: Path, on: dict[str, Any], date: str, lines: Sequence[Line], extra: dict[str, str]
) -> None:
    """Write ``path`` as JSON, and the page next to it with the suffix ``.md``.

    Args:
        extra: heading -> text, copied below the tables.
    """
    data = {"date": date, "machine": on, "lines": [asdict(line) for line in lines], "extra": extra}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    path.with_suffix(".md").write_text(page(on, date, lines, extra))


def page(on: dict[str, Any], date: str, lines: Sequence[Line], extra: dict[str, str]) -> str:
    """Return the tables, one per part, as Markdown."""
    counts = {o: sum(line.outcome == o for line in lines) for o in (MET, MISSED, SKIPPED)}
    told = ", ".join(f"{key} {value}" for key, value in on.items())
    text = [
        "# Proof on a GPU", "",
        f"{date}: {told}.", "",
        ", ".join(f"{n} {outcome}" for outcome, n in counts.items()) + ".",
    ]  # fmt: skip
    for part in dict.fromkeys(line.part for line in lines):
        text += [
            "",
            f"## {part}",
            "",
            "| claim | outcome | seen | aim | reason |",
            "|---|---|---|---|---|",
        ]
        text += [
            f"| {line.claim} | {line.outcome} | {line.seen} | {line.aim} | {cell(line.reason)} |"
            for line in lines
            if line.part == part
        ]
    for heading, body in extra.items():
        text += ["", f"## {heading}", "", "```", body.rstrip(), "```"]
    return "\n".join(text) + "\n"


def cell(text: str) -> str:
    """Return the text on one line of a table, shortened."""
    flat = " ".join(text.split()).replace("|", "/")
    return flat if len(flat) < 300 else flat[:297] + "..."
