"""Checks one case: captures and plans it, then verifies the plan and random programs."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn

import hap
from hap.capture import torch_private
from hap.capture.tracing import capture
from hap.errors import InfeasibleError, UnsupportedOpError
from hap.ir.graph import Graph
from hap.ir.plan import Plan
from hap.rule_sources import with_rules
from hap.runtime.one_device import Observed, observe_reference
from hap.runtime.verify import _error, prepared
from hap.synthesizer.search.program_space import build_space
from tests.fuzz.recipe import Recipe
from tests.random_plans import Case, adamw, random_plan, verdict, widened

WISHES: tuple[dict[str, Any] | None, ...] = (
    {}, {"all_devices": True, "mesh": False}, {"all_devices": True, "mesh": False}, None,
)  # fmt: skip
"""Options of the planner, by seed. Leaving devices out and two mesh axes are slow, so half of the
cases skip both. ``None`` checks random programs alone."""

PROGRAMS = 2
"""Random programs per case, in addition to the planned one."""

NOISE = 1e-15
"""Noise relative to the largest element of a result: a few times the rounding of float64."""


class Outcome(StrEnum):
    """The result of a case that does not fail."""

    CLEAN = "clean"
    DISCOVERED = "with discovered rows"
    """An operator has no rule; with discovered rows, the results are right."""
    REFUSED = "refused"
    """An operator has no rule, and discovery found none."""
    INFEASIBLE = "infeasible"
    """No program fits the memory; random programs are right."""
    ROUNDING = "rounding"
    """The results differ, but those of one device differ as much under simulated rounding."""


def check(recipe: Recipe) -> Outcome:
    """Plan and verify a case.

    Raises:
        AssertionError: a program's results differ from those of one device.
        Exception: any error of the capture, the planner or the program.
    """
    model, batch, cluster = recipe.model(), recipe.batch(), recipe.cluster()
    wishes = WISHES[recipe.seed % len(WISHES)]

    outcome, plans = Outcome.CLEAN, []
    if wishes is not None:
        try:
            plans = [
                hap.plan(model, batch, cluster, options=hap.PlanOptions(allow_idle=True, **wishes))
            ]
        except InfeasibleError:
            outcome = Outcome.INFEASIBLE
        except UnsupportedOpError:
            return Outcome.REFUSED
    try:
        graph = plans[0].graph if plans else captured(model, batch)
    except UnsupportedOpError:
        return Outcome.REFUSED
    if outcome is Outcome.CLEAN and graph.rules:
        outcome = Outcome.DISCOVERED
    case = Case(
        model=model, batch=batch, loss=None, optimizer=adamw, captured=partial(build_space, graph)
    )
    for k in range(PROGRAMS):
        plans.append(random_plan(case, cluster.world_size, recipe.seed + k, cluster=cluster))
    for number, plan in enumerate(plans):
        if not _right(case, plan, number):
            return Outcome.ROUNDING
    return outcome


def captured(model: nn.Module, batch: Any) -> Graph:
    """The graph of a step, with discovered rows where the table has none."""
    return with_rules(capture(model, batch), {})


def _right(case: Case, plan: Plan, number: int) -> bool:
    """Return whether a plan matches one device; False if rounding may explain the difference."""
    found = verdict(case, plan)
    if found.ok:
        return True
    if _ill_conditioned(case.model, case.batch, found.tolerance):
        return False
    wrong = [f"{r.what} {r.tensor} off by {r.error:.1e}" for r in found.rows if not r.ok]
    raise AssertionError(
        f"program {number} computes something else, first {found.first_bad}: {'; '.join(wrong)}"
    )


class _Noise(torch_private.TorchDispatchMode):
    """Adds noise of a few units of rounding to every result."""

    def __init__(self) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(5)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        out = func(*args, **(kwargs or {}))
        views = func._schema.is_mutable or any(r.alias_info for r in func._schema.returns)
        if views or not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        if not out.numel():
            return out
        noise = torch.randn(out.shape, generator=self._random, dtype=out.dtype)
        return out + NOISE * out.abs().max() * noise


def _ill_conditioned(model: nn.Module, batch: Any, tolerance: float) -> bool:
    """Return whether rounding changes one device's results by over a tenth of the tolerance."""
    model, batch = prepared(model, widen=True), widened(batch)
    exact = observe_reference(model, batch, None, adamw)
    with _Noise():
        noisy = observe_reference(model, batch, None, adamw)
    return any(
        _error([noisy[what][name]], value, 1e-3 * _largest(exact, what), value.dtype)
        > tolerance / 10
        for what, tensors in exact.items()
        for name, value in tensors.items()
    )


def _largest(seen: Observed, what: str) -> float:
    floats = [t for t in seen[what].values() if t.is_floating_point() and t.numel()]
    return max((float(t.abs().max()) for t in floats), default=0.0)
