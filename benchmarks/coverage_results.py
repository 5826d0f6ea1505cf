"""The architectures of the coverage table, the results so far, and their summary."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "data" / "coverage.json"
EVERY = Path(__file__).parent / "data" / "every_transformer.json"
OPERATORS = Path(__file__).parent / "data" / "every_operator.json"
KINDS = {
    "causal": "decoder", "masked": "encoder", "pairs": "encoder-decoder", "images": "image classification",
    "pixels": "semantic segmentation", "patches": "masked patches", "videos": "video classification",
    "sounds": "audio classification", "ctc": "speech, CTC", "speech": "speech to text",
    "sentences": "sequence classification", "words": "token classification", "answers": "question answering",
    "captions": "contrastive image and text", "described": "image and text to text",
}  # fmt: skip
"""Kinds of models of :mod:`benchmarks.every_transformer`, and their names on the page."""

STAGES = ("verify", "plan")
LIMIT_S = 60.0
"""Seconds that planning a full size should take at most."""
MEDIAN_S = 15.0
"""Seconds that planning should take at the median."""
SMALL = 1_000_000
SMALL_S = 10.0
"""Seconds that planning a model of fewer than ``SMALL`` parameters should take at most."""
WANTED = 100
"""Architectures that others wrote."""

Found = dict[str, Any]
"""One result, as JSON has it."""


class Figure(NamedTuple):
    """A line of the summary; ``met`` is None without a target."""

    name: str
    seen: str
    target: str = ""
    met: bool | None = None


def entries() -> dict[str, Any]:
    """Name -> entry of :data:`benchmarks.zoo.ZOO`."""
    from benchmarks.zoo import ZOO

    return {entry.name: entry for entry in ZOO}


def read() -> dict[str, Found]:
    """The results so far: architecture -> stage -> result."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def read_every() -> dict[str, dict[str, Found]]:
    """The results of :mod:`benchmarks.every_transformer`: kind -> class of the configuration -> result."""
    return json.loads(EVERY.read_text()) if EVERY.exists() else {}


def read_operators() -> dict[str, Found]:
    """The results of :mod:`benchmarks.every_operator`: name -> result."""
    return json.loads(OPERATORS.read_text()) if OPERATORS.exists() else {}


def summary(found: Found) -> str:
    """A result in a few words."""
    if not found["ok"]:
        return str(found["reason"])
    if "wall_s" in found:
        return f"{found['nodes']} operators planned in {found['wall_s']} s"
    return f"{found['nodes']} operators, {found['plans']} plans, error {found['error']:.0e}, {found['cpu_s']} s"


def _done(results: dict[str, Found], stage: str) -> list[str]:
    return [name for name in entries() if results.get(name, {}).get(stage, {}).get("ok")]


def counts(results: dict[str, Found]) -> str:
    """Numbers of models of the table that verify and that plan."""
    known = entries()
    verified, planned = (_done(results, stage) for stage in STAGES)
    quick = [name for name in planned if results[name]["plan"]["wall_s"] <= LIMIT_S]
    operators = {
        op
        for name in known
        for stage in STAGES
        for op in results.get(name, {}).get(stage, {}).get("operators", ())
    }
    return (
        f"{len(known)} architectures: {len(verified)} verified, {len(planned)} planned, "
        f"{len(quick)} of them within {LIMIT_S:.0f} s; {len(operators)} operators"
    )


def figures(results: dict[str, Found]) -> list[Figure]:
    """Return the summary of the results, beside the targets."""
    known = entries()
    verified, planned = (_done(results, stage) for stage in STAGES)
    others = [name for name, entry in known.items() if entry.requires]
    both = set(verified) & set(planned) & set(others)
    lines = [
        Figure("architectures", str(len(known))),
        Figure(
            "written by others, verified and planned", f"{len(both)} of {len(others)}",
            f"{WANTED}", len(both) >= WANTED,
        ),
        Figure("verified", f"{len(verified)} of {len(known)}"),
        Figure("planned", f"{len(planned)} of {len(known)}"),
    ]  # fmt: skip
    if not planned:
        return lines
    plans = [results[name]["plan"] for name in planned]
    walls, processor = ([plan[key] for plan in plans] for key in ("wall_s", "cpu_s"))
    built = [plan["build_s"] for plan in plans if "build_s" in plan]
    late = [plan for plan in plans if plan["wall_s"] > LIMIT_S]
    small = [plan for plan in plans if plan["parameters"] < SMALL]
    late_small = [plan for plan in small if plan["wall_s"] > SMALL_S]
    return [
        *lines,
        Figure(
            "seconds of planning, median", f"{median(walls):.1f} ({median(processor):.1f})",
            f"at most {MEDIAN_S:.0f}", median(walls) <= MEDIAN_S,
        ),
        Figure(
            "seconds of planning, maximum", f"{max(walls):.0f} ({max(processor):.0f})",
            f"at most {LIMIT_S:.0f}", max(walls) <= LIMIT_S,
        ),
        Figure(
            f"planned in more than {LIMIT_S:.0f} s", f"{len(late)} of {len(plans)}", "0", not late
        ),
        Figure(
            f"planned in more than {SMALL_S:.0f} s, below {SMALL // 10**6} million parameters",
            f"{len(late_small)} of {len(small)}", "0", not late_small,
        ),
        Figure("seconds of importing and building, median", f"{median(built or [0.0]):.1f}"),
    ]  # fmt: skip
