"""Gradient accumulation where memory is short: the whole step as one stage, whose batch comes in microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hap.background import each
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.prediction import Bound
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.stages.device_blocks import Ranks
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_search import Chosen, Pipeline, StageSearch
from hap.synthesizer.stages.stage_synthesizer import StageTask
from hap.synthesizer.synthesize import Synthesizer, is_long

TRIED = 3
"""Most numbers of microbatches that are searched on a set of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A step in microbatches, and what each of them runs."""

    sketch: Sketch
    chosen: Chosen

    def programs(self, task: StageTask) -> Chosen:
        return self.chosen


def accumulated(
    spaces: Sequence[Space], cluster: Cluster, states: int, options: PlanOptions, used: Ranks,
    limit_s: float, progress: Callable[[str], None],
) -> tuple[int, Pipeline] | None:  # fmt: skip
    """Return (number of the space, the fastest step in microbatches), if one fits and takes less than ``limit_s``.

    Args:
        spaces: of one step. Those after one that has such a step are not tried.
        used: ranks to try beside all of them and those of the fastest kind.
    """
    for number, space in enumerate(spaces):
        try:
            search = StageSearch(space, cluster, states)
        except HapError as error:
            progress(f"no microbatches: {error.what}")
            return None
        groups = _groups(cluster, options, used, space.hardware(cluster).speed)
        found = each(partial(_fewest, search, limit_s), groups, apart=is_long(space))
        every = [m for one in found if one and (m := search.pipeline(one.sketch, one.programs))]
        best = min(every, key=lambda made: made.times.step_s, default=None)
        if best:
            return (number, best) if best.times.step_s < limit_s else None
    return None


def bound(made: Pipeline, space: Space, states: int) -> Bound:
    """Return a bound of the step, which holds for any number of microbatches: see :func:`stage_bound`."""
    step_s, relaxed = made.times.step_s, Synthesizer(space, made.cluster, states).relaxed
    on = " on the devices in use" if made.left else ""
    assert relaxed.bound_s <= step_s * (1 + 1e-9), "the bound is above the plan"
    return Bound(
        covers=f"all programs{on}, any shares of every axis, any number of microbatches",
        step_s=relaxed.bound_s, gap=max(0.0, 1 - relaxed.bound_s / step_s), searches=relaxed.searches,
    )  # fmt: skip


def _groups(cluster: Cluster, options: PlanOptions, used: Ranks, speed: PerRank) -> list[Ranks]:
    """Return the sets of devices to try."""
    every, keep = tuple(range(cluster.world_size)), options.kept_ranks(cluster)
    if options.all_devices:
        return [every]
    fastest = max(cluster.types(), key=lambda ranks: speed[list(ranks)].sum())
    return [*dict.fromkeys(r for r in (every, used, fastest) if keep <= {*r})]


def _fewest(search: StageSearch, limit_s: float, ranks: Ranks) -> _Found | None:
    """Return the fewest microbatches with which the step fits some devices.

    None are tried if even with unlimited memory the step would take ``limit_s``: memory has its price.
    """
    for sketch in itertools.islice(search.estimates.one_stage(ranks), TRIED):
        if limit_s < math.inf and search.roomy_s(sketch) >= limit_s:
            return None
        made = search.pipeline(sketch)
        if made and made.fits:
            (stage,) = made.stages.stages
            return _Found(sketch=sketch, chosen=(stage.program, stage.shares))
    return None
