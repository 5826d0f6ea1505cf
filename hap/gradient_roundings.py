"""Choose between exact gradients and the roundings that the user allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, InputError
from hap.ir.graph import Graph
from hap.ir.half_gradients import ROUNDINGS
from hap.synthesizer.device_selection import CLOSE
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.plan_prediction import row_of
from hap.synthesizer.planner import PlannedPair, Progress
from hap.synthesizer.recompute_modes import choose_for_model

EXACT = "exact gradients"


def choose_with_roundings(
    captured: Callable[[str, str], Graph], modes: Iterable[str], cluster: Cluster,
    optimizer_states: int, options: PlanOptions, progress: Progress = lambda text: None,
) -> tuple[Graph, tuple[str, str], PlannedPair]:  # fmt: skip
    """(graph, (recompute mode, rounding), best pair): round only if the step is clearly shorter.

    Args:
        captured: captures the graph of a training step in a recompute mode, with a rounding of
            :data:`hap.ir.half_gradients.ROUNDINGS` or none.
        modes: modes to try one after the other if ``options`` names none.

    Raises:
        InfeasibleError: nothing fits in any mode.
        InputError: a rounding is unknown, or gradients are to be rounded in stages.
    """
    if unknown := [name for name in options.allow if name not in ROUNDINGS]:
        raise InputError(
            f"unknown rounding allow={unknown[0]!r}", hint=f"use one of {', '.join(ROUNDINGS)}"
        )
    if options.allow and options.stages:
        raise InputError(
            "gradients can't be rounded in plans with stages, which sum them over microbatches",
            hint="leave out --stages or --allow",
        )
    found: dict[str, tuple[Graph, str, PlannedPair]] = {}
    failed: InfeasibleError | None = None
    for rounding in ("", *options.allow):
        if options.allow:
            progress(f"planning with {rounding or EXACT}")
        try:
            found[rounding] = choose_for_model(
                partial(_captured, captured, rounding), tuple(modes), cluster, optimizer_states,
                options, progress,
            )  # fmt: skip
        except InfeasibleError as error:
            failed = failed or error
    if not found:
        assert failed is not None
        raise failed
    slack = {name: CLOSE if name else 1.0 for name in found}
    best = min(found, key=lambda name: found[name][2].prediction.step_s * slack[name])
    graph, mode, chosen = found.pop(best)
    if options.allow:
        rows = [row_of(name or EXACT, other.prediction) for name, (_, _, other) in found.items()]
        rows += chosen.prediction.alternatives
        chosen = replace(chosen, prediction=replace(chosen.prediction, alternatives=tuple(rows)))
    return graph, (mode, best), chosen


def _captured(captured: Callable[[str, str], Graph], rounding: str, mode: str) -> Graph:
    return captured(mode, rounding)
