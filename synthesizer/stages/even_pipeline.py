"""A baseline: Megatron-LM's pipeline of equal groups, everything even (Narayanan et al., SC 2021).

Stages have equally many consecutive ranks and equal work, whatever the devices' speeds. Inside, each
stage is data parallel or tensor parallel with even shares. The number of stages and of microbatches is
the fastest that fits, with the microbatches in flight of 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hap.errors import HapError
from hap.ir.axes import Shares
from hap.ir.mesh import origin
from hap.ir.placement import Placement, R, S
from hap.ir.prediction import EVEN_PIPELINE, Alternative
from hap.ir.program import Program
from hap.synthesizer.baselines import tensor_parallel
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_search import Pipeline, StageSearch
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer, StageTask
from hap.synthesizer.synthesize import proportional_shares

STAGES = (2, 4, 8)


def even_pipeline(search: StageSearch) -> tuple[Alternative, Pipeline | None]:
    """Return the row of the baseline, and its pipeline if there is one."""
    found = list(even_pipelines(search))
    if not found:
        shown = ", ".join(map(str, STAGES))
        what = f"neither devices nor layers can be divided into {shown} equal stages"
        return no_pipeline(what), None
    made, how = min(found, key=lambda pair: (not pair[0].fits, pair[0].times.step_s))
    peaks = [float(each.peak_bytes.max()) for each in made.figures]
    lacking = [
        float(peak) - made.cluster.devices[rank].memory_bytes
        for stage, each in zip(made.stages.stages, made.figures, strict=True)
        for rank, peak in zip(stage.ranks, each.peak_bytes, strict=True)
    ]
    row = Alternative(
        name=EVEN_PIPELINE, step_s=made.times.step_s, fits=made.fits,
        note=f"Megatron-LM: {len(peaks)} stages, {how} in each, {made.microbatches} microbatches",
        communicate_s=max(each.communicate_s for each in made.figures),
        communicate_bytes=sum(
            made.parts[t.src].tensors[t.tensor].nbytes * (1 if t.once else made.microbatches)
            for t in made.transfers
        ),
        peak_bytes=round(max(peaks)), lacking_bytes=max(0, round(max(lacking))),
    )  # fmt: skip
    return row, made


def no_pipeline(why: str) -> Alternative:
    """Return the row of the baseline where there is none."""
    return Alternative(name=EVEN_PIPELINE, step_s=0.0, fits=False, note=why)


def even_pipelines(search: StageSearch) -> Iterator[tuple[Pipeline, str]]:
    """Yield the pipelines of all numbers of stages and microbatches, with the way inside the stages."""
    estimates, world = search.estimates, search.cluster.world_size
    for stages in STAGES:
        cuts = estimates.even_cuts(stages)
        if world % stages or not cuts:
            continue
        size = world // stages
        groups = tuple(tuple(range(k * size, (k + 1) * size)) for k in range(stages))
        ways = {"one device": _whole}
        if size > 1:
            ways = {"data parallel": _data_parallel, "tensor parallel": tensor_parallel}
        for how, restriction in ways.items():
            programs = _Programs(search, restriction)
            for count in estimates.counts:
                sketch = Sketch(
                    groups=groups, cuts=cuts, microbatches=count, estimate_s=0.0, least_s=0.0
                )
                ahead = tuple(min(count, stages - k) for k in range(stages))
                made = search.pipeline(sketch, programs, ahead)
                if made is not None:
                    yield made, how


class _Programs:
    """The cheapest program of each stage within a restriction, with even shares."""

    def __init__(self, search: StageSearch, restriction: Callable[[Space], Allowed]) -> None:
        self._search, self._restriction = search, restriction
        self._found: dict[object, tuple[Program, Shares] | None] = {}

    def __call__(self, task: StageTask) -> tuple[Program, Shares] | None:
        key = task.ranks, task.whole.outputs, task.count
        if key not in self._found:
            self._found[key] = self._made(task)
        return self._found[key]

    def _made(self, task: StageTask) -> tuple[Program, Shares] | None:
        space, cluster = task.space, self._search.cluster.keep(task.ranks)
        even = proportional_shares(space.axes, np.ones(cluster.world_size))
        for restriction in (self._restriction, _data_parallel):  # a stage may lack pairs of layers
            try:
                allowed = _receiving(space, restriction(space))
                search = StageSynthesizer(task, cluster, self._search.states, allowed)
                return search.in_order(search.cheapest(even))
            except HapError:
                continue
        return None


def _receiving(space: Space, allowed: Allowed) -> Allowed:
    """Allow the stage to receive tensors in shards, as Megatron-LM does, whatever is allowed inside it."""
    received = {i.tensor for i in space.graph.role("received")}
    return lambda tensor, p, stored: (stored and tensor in received) or allowed(tensor, p, stored)


def _data_parallel(space: Space) -> Allowed:
    """Split along the batch what the microbatches split; store parameters whole."""
    fixed = {t for t, holdings in space.holdings.items() if holdings == ((R,),)}
    parameters = {i.tensor for i in space.graph.role("parameter")}

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        if tensor in fixed:
            return True
        over_time = origin(tensor).placement
        if tensor in parameters:
            return p == R
        return p == S(over_time.dim) if over_time.sharded else not p.sharded

    return allowed


def _whole(space: Space) -> Allowed:
    return lambda tensor, p, stored: True
