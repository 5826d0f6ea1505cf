"""Which program a plan runs: plans with the same digest train alike."""

from __future__ import annotations

import hashlib

from hap.ir.plan import Plan


def program_digest(plan: Plan) -> str:
    """Return what identifies a plan's graph, programs and shares, on all ranks."""
    found = f"{plan.graph.digest}/{plan.program.schedule_digest}/{sorted(plan.shares.items())}"
    if plan.inside:
        inner = plan.inside
        found += f"/{inner.program.schedule_digest}/{sorted(inner.shares.items())}"
    for stage in plan.stages.stages if plan.stages else ():
        found += f"/{stage.ranks}/{stage.in_flight}/{stage.delay}/{stage.recompute}"
        found += "/gather_each" * stage.gather_each
        found += f"/{stage.program.schedule_digest}/{sorted(stage.shares.items())}"
    return found


def short_digest(digest: str) -> str:
    """Return twelve letters that stand for a digest of any length."""
    return hashlib.sha256(digest.encode()).hexdigest()[:12]
