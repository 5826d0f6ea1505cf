"""A hint after a plan without stages: the estimate of a pipeline that would be faster."""

from __future__ import annotations

from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.gc_pause import gc_paused
from hap.ir.plan import Plan
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.stages.stage_search import StageSearch
from hap.units import format_seconds

WORTH = 0.95
"""Ratio of steps below which a pipeline is worth a hint: estimates are off by a few percent."""


@gc_paused()
def pipeline_hint(plan: Plan, cluster: Cluster) -> str:
    """Return the hint; empty if no pipeline is estimated to be faster.

    Args:
        cluster: all devices, also those that the plan leaves out.
    """
    limit_s = WORTH * plan.prediction.step_s
    try:
        states = plan.optimizer.states
        search = StageSearch(build_space(plan.graph), cluster, states, quick=True)
        fits = (s.estimate_s for s in search.estimates.sketches(limit_s) if not s.lacking)
        estimate_s = min(fits, default=limit_s)
    except HapError:  # the step has no microbatches, too entangled a graph, or too many kinds
        return ""
    if estimate_s >= limit_s:
        return ""
    return (
        f"a pipeline of stages is estimated to take {format_seconds(estimate_s)}; "
        "--stages searches for one"
    )
