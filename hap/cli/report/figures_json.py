"""The figures of a plan as JSON: what ``hap show --json`` prints and the page of ``hap report`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hap.cli.plan_screen import plan_json
from hap.ir.plan import Plan
from hap.plan_simulation import Simulation, plan_costs, simulate_plan
from hap.stage_simulation import stage_costs, stage_figures
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.peak_memory import at_peak, while_updating
from hap.synthesizer.schedule.event_simulator import COMMUNICATION


def show_json(plan: Plan) -> dict[str, Any]:
    """The plan as ``hap plan --json`` has it, and the contents of each rank's memory at its peak."""
    return shown_with(simulate_plan(plan))


def shown_with(made: Simulation) -> dict[str, Any]:
    """:func:`show_json` of a plan that is simulated already."""
    return plan_json(made.plan) | {"memory_parts": memory_parts(made)}


def memory_parts(made: Simulation) -> list[dict[str, int]]:
    """Per rank, bytes by kind at the predicted peak; kinds that a rank lacks are left out.

    They sum to ``peak_bytes`` of the rank's prediction, up to rounding, in plans of this version.
    """
    if made.plan.stages:
        return _memory_of_stages(made.plan)
    graph, program = made.plan.whole
    parts = at_peak(graph, program, plan_costs(made.plan), _until(made))
    return [_of_rank(parts, rank) for rank in range(made.plan.world_size)]


def _of_rank(parts: Mapping[str, PerRank], rank: int) -> dict[str, int]:
    return {kind: nbytes for kind, each in parts.items() if (nbytes := round(float(each[rank])))}


def _memory_of_stages(plan: Plan) -> list[dict[str, int]]:
    """The parts of each rank's peak.

    It is in a turn, with the other microbatches in flight and sums over all, or in the update.
    """
    found: dict[int, dict[str, int]] = {}
    each = zip(stage_costs(plan), stage_figures(plan), strict=True)
    for (graph, stage, cost), figures in each:
        parts = at_peak(graph, stage.program, cost, updating=False)
        update = while_updating(graph, stage.program, cost)
        others = min(stage.in_flight, plan.microbatches) - 1
        waiting = others * figures.saved_bytes + stage.delay * figures.waiting_bytes
        parts["saved activations"] = parts["saved activations"] + waiting
        parts["gradients"] = parts["gradients"] + figures.sums_bytes
        parts["communication buffers"] = parts["communication buffers"] + figures.message_bytes
        for place, rank in enumerate(stage.ranks):
            turns = _of_rank(parts, place), _of_rank(update, place)
            found[rank] = max(turns, key=lambda each: sum(each.values()))
    return [found[rank] for rank in range(plan.world_size)]


def _until(made: Simulation) -> list[int]:
    """Per group, the last group that begins before it has ended, as the list scheduler has it."""
    graph, program = made.plan.whole
    bounds = program.bounds(graph)
    begin = [float(made.run.begin_s[first].max()) for first, _ in bounds]
    backward = [program.instructions[first].backward for first, _ in bounds]
    middle = backward.index(True) if True in backward else len(bounds)
    communicating = {span.at for span in made.run.spans if span.stream == COMMUNICATION}
    found = list(range(len(bounds)))
    for at, (first, _) in enumerate(bounds):
        if made.run.overlap and first in communicating:
            done = float(made.run.done_s[first].max())
            last = int(np.searchsorted(begin, done)) - 1
            found[at] = max(at, min(last, middle - 1) if at < middle else last)
    return found
