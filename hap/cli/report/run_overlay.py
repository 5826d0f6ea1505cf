"""A run beside the plan's prediction: figures rank by rank, and the course of steps and losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hap.cli.simulation import rank_uses
from hap.plan_simulation import Simulation
from hap.run_log import LoggedStep, RankFigures, counted, medians
from hap.synthesizer.schedule.event_simulator import COMMUNICATION

WIDTH, HEIGHT = 600, 120
"""Of a plot, in its own units."""

FIGURES = (
    ("computing_s", "computing"),
    ("communicating_s", "in collectives"),
    ("waiting_s", "not computing"),
    ("memory_bytes", "peak memory"),
)


def predicted_figures(made: Simulation) -> list[RankFigures]:
    """The prediction in the terms of a log: time in collectives includes the wait for the last rank."""
    collectives = [s for s in made.run.spans if s.stream == COMMUNICATION]
    return [
        RankFigures(
            computing_s=use.compute_s,
            communicating_s=sum(
                float(s.end_s[use.rank] - s.ready_s[use.rank]) for s in collectives
            ),
            waiting_s=made.run.step_s - use.compute_s,
            memory_bytes=use.peak_bytes,
        )
        for use in rank_uses(made)
    ]


def run_json(
    made: Simulation, steps: Sequence[LoggedStep], own: Sequence[LoggedStep]
) -> dict[str, Any]:
    """The figures of section "run" of the page: medians, and the predictions beside them.

    Args:
        own: the steps that were trained by this plan.
    """
    used = counted(own)
    return {
        "steps": len(steps),
        "own": len(own),
        "counted": len(used),
        "predicted_s": made.run.step_s,
        "seconds": statistics.median(s.seconds for s in used),
        "loss": [s.loss if math.isfinite(s.loss) else None for s in steps],
        "measured": [asdict(figures) for figures in medians(used)],
        "predicted": [asdict(figures) for figures in predicted_figures(made)],
    }


def bars(run: dict[str, Any], name: str) -> list[tuple[int, float, float | None]]:
    """(rank, width of the predicted bar, width of the measured one), in percent of the longest."""
    pairs = [(p[name], m[name]) for p, m in zip(run["predicted"], run["measured"], strict=True)]
    longest = max([v for pair in pairs for v in pair if v is not None], default=0.0) or 1.0
    return [
        (rank, 100 * p / longest, None if m is None else 100 * m / longest)
        for rank, (p, m) in enumerate(pairs)
    ]


def plot(values: Sequence[float], level: float | None = None) -> dict[str, Any]:
    """A line over the steps: ``points`` of an SVG polyline, ``level`` as its height, and the range."""
    finite = [v for v in values if math.isfinite(v)]
    most = max([*finite, *([level] if level is not None else [])], default=1.0)
    least = min(0.0, *finite) if finite else 0.0
    span = (most - least) or 1.0

    def height(value: float) -> float:
        return round(HEIGHT - (value - least) / span * HEIGHT, 2)

    across = WIDTH / max(len(values) - 1, 1)
    points = " ".join(
        f"{round(k * across, 2)},{height(v)}" for k, v in enumerate(values) if math.isfinite(v)
    )
    return {
        "points": points, "level": None if level is None else height(level),
        "least": least, "most": most,
    }  # fmt: skip
