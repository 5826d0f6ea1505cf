"""The log of a run: JSON lines, one per step, that ``hap run --log`` writes and the page shows.

A line is ``{"step": 3, "loss": 2.31, "seconds": 0.412, "ranks": [{"computing_s": ..,
"communicating_s": .., "waiting_s": .., "memory_bytes": ..}, ..], "plan": "1a2b.."}``, with an entry
per rank. A figure that was not measured is left out or ``null``. Ranks and plan may change in a run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hap.errors import InputError, reason_of
from hap.files import read_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's step, predicted or measured; ``None``: not measured.

    Attributes:
        computing_s: in operators and the optimizer's update.
        communicating_s: inside collectives, the wait for the last rank included.
        waiting_s: the rest of the step, in which nothing is computed.
        memory_bytes: the peak.
    """

    computing_s: float | None = None
    communicating_s: float | None = None
    waiting_s: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One line of the log; ``plan`` tells plans apart, and is empty if it is not known."""

    step: int
    loss: float
    seconds: float
    ranks: tuple[RankFigures, ...]
    plan: str = ""

    def line(self) -> str:
        """The line of the file; the inverse of :func:`read_log`."""
        measured = [
            {f.name: v for f in fields(r) if (v := getattr(r, f.name)) is not None}
            for r in self.ranks
        ]
        loss = self.loss if math.isfinite(self.loss) else None
        data: dict[str, Any] = {
            "step": self.step,
            "loss": loss,
            "seconds": self.seconds,
            "ranks": measured,
        }
        data |= {"plan": self.plan} if self.plan else {}
        return json.dumps(data, allow_nan=False) + "\n"


def read_log(path: str) -> list[LoggedStep]:
    """Read the log of a run.

    Raises:
        InputError: no such file, no steps, or a line of another form.
    """
    try:
        lines = read_whole(path).splitlines()
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise InputError(
            f"the log cannot be read ({reason})", where=path, hint="hap run --log writes one"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_step(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(
                f"this is no line of a run's log ({what})", where=f"{path}:{number}",
                hint="write the lines as docs/report.md says",
            ) from None  # fmt: skip
    if not found:
        raise InputError("the log has no steps", where=path, hint="train for a step or more")
    return found


def _step(data: Any) -> LoggedStep:
    if not isinstance(data, dict) or not isinstance(data["ranks"], list):
        raise TypeError("it must be an object with step, loss, seconds and a list of ranks")
    number = data["step"]
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TypeError(f"step is {number!r}")
    seconds = _figure(data, "seconds")
    if seconds is None:
        raise TypeError("seconds is null")
    loss = data["loss"]
    if loss is not None and (not isinstance(loss, int | float) or isinstance(loss, bool)):
        raise TypeError(f"loss is {loss!r}")
    names = [f.name for f in fields(RankFigures)]
    for rank in data["ranks"]:
        if not isinstance(rank, dict):
            raise TypeError(f"a rank is {rank!r}")
    plan = data.get("plan", "")
    if not isinstance(plan, str):
        raise TypeError(f"plan is {plan!r}")
    ranks = tuple(
        RankFigures(**{name: _figure(rank, name) for name in names if name in rank})
        for rank in data["ranks"]
    )
    return LoggedStep(
        step=number, loss=math.nan if loss is None else float(loss), seconds=seconds, ranks=ranks,
        plan=plan,
    )  # fmt: skip


def steps_of_plan(
    steps: Sequence[LoggedStep], plan: str, world_size: int, path: str
) -> list[LoggedStep]:
    """Return the steps of a run that were trained by one plan.

    A step that does not tell its plan is taken for one of it if it has as many ranks.

    Raises:
        InputError: there is none.
    """
    found = [s for s in steps if s.plan in (plan, "") and len(s.ranks) == world_size]
    if found:
        return found
    counts = sorted({len(s.ranks) for s in steps})
    what = f"they have {', '.join(map(str, counts))} ranks, the plan has {world_size}"
    if counts == [world_size]:
        what = "they are of another plan with as many ranks"
    raise InputError(
        f"no step of the log is by this plan: {what}", where=path,
        hint="give a plan of this run; those that hap run made are in the folder plans of its "
        "--checkpoint",
    )  # fmt: skip


def _figure(data: dict[str, Any], name: str) -> float | None:
    value = data[name]
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TypeError(f"{name} is {value!r}")
    return float(value)


def counted(steps: Sequence[LoggedStep]) -> Sequence[LoggedStep]:
    """The steps that count: all but the first, which warms up, if there are others."""
    return steps[1:] or steps


def medians(steps: Sequence[LoggedStep]) -> list[RankFigures]:
    """Per rank, the median of each figure over the steps given; ``None`` if no step has it."""
    names = [f.name for f in fields(RankFigures)]
    found = []
    for rank in range(len(steps[0].ranks)):
        of_rank = {}
        for name in names:
            values = [v for s in steps if (v := getattr(s.ranks[rank], name)) is not None]
            of_rank[name] = statistics.median(values) if values else None
        found.append(RankFigures(**of_rank))
    return found
