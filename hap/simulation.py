"""A plan on a timeline: the simulated step, what people read of it, and its trace file.

Nothing here looks at a clock or needs torch: the same plan gives the same screen and trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from hap.axes import Axes, Axis
from hap.errors import PlanError
from hap.plan import Plan
from hap.synthesizer.cost import CostModel, Machine
from hap.synthesizer.residency import Curve, memory_over_time
from hap.synthesizer.timeline import Schedule, Usage, schedule, usage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """One step of a plan; ``memory`` has one curve per rank."""

    plan: Plan
    run: Schedule
    usage: Usage
    memory: tuple[Curve, ...]


def simulate_plan(plan: Plan, *, overlap: bool = False) -> Simulation:
    """Simulate one training step.

    Args:
        overlap: let collectives run beside computing, which the runtime does not do.

    Raises:
        PlanError: the plan names no number of optimizer states, or an unknown implementation.
    """
    cost = plan_costs(plan)
    try:
        run = schedule(plan.graph, plan.program, cost, overlap=overlap)
    except ValueError as error:
        raise PlanError(f"the plan cannot be simulated: {error}", hint="plan anew") from error
    return Simulation(
        plan=plan, run=run, usage=usage(run),
        memory=memory_over_time(plan.graph, plan.program, cost, run),
    )  # fmt: skip


def plan_costs(plan: Plan) -> CostModel:
    """The prices under a plan's shares, of all that its program does."""
    axes = {name: Axis(name=name, units=units) for name, units in plan.program.used_axes().items()}
    of = {}
    for dim, (axis, _) in plan.program.axes.items():
        tensor, _, number = dim.rpartition(":")
        of[tensor, int(number)] = axis
    return CostModel(
        plan.graph, Axes(axes=axes, of=of), Machine(plan.cluster), plan.shares,
        plan.optimizer_states,
    )  # fmt: skip
