"""The architectures of the coverage table, and the results so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "data" / "coverage.json"
STAGES = ("verify", "plan")
LIMIT_S = 60.0
"""Seconds that planning a full size should take at most."""

Found = dict[str, Any]
"""One result, as JSON has it."""


def entries() -> dict[str, Any]:
    """Name -> entry of :data:`benchmarks.zoo.ZOO`; importing the zoo loads transformers."""
    from benchmarks.zoo import ZOO

    return {entry.name: entry for entry in ZOO}


def read() -> dict[str, Found]:
    """The results so far: architecture -> stage -> result."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def summary(found: Found) -> str:
    """A result in a few words."""
    if not found["ok"]:
        return str(found["reason"])
    if "wall_s" in found:
        return f"{found['nodes']} operators planned in {found['wall_s']} s"
    return f"{found['nodes']} operators, {found['plans']} plans, error {found['error']:.0e}, {found['cpu_s']} s"


def counts(results: dict[str, Found]) -> str:
    """Numbers of models of the table that verify and that plan."""
    known = entries()
    done = {
        what: [n for n in known if results.get(n, {}).get(what, {}).get("ok")] for what in STAGES
    }
    quick = [n for n in done["plan"] if results[n]["plan"]["wall_s"] <= LIMIT_S]
    operators = {
        op
        for n in known
        for what in STAGES
        for op in results.get(n, {}).get(what, {}).get("operators", ())
    }
    return (
        f"{len(known)} architectures: {len(done['verify'])} verified, {len(done['plan'])} planned, "
        f"{len(quick)} of them within {LIMIT_S:.0f} s; {len(operators)} operators"
    )
