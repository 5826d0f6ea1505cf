"""The simulated step of a plan. Nothing here reads a clock or needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.plan_rows import check_rows
from hap.stage_simulation import pipeline_schedule
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.mesh_cost import Between, mesh_cost
from hap.synthesizer.schedule.event_simulator import COMPUTE, Schedule, Usage, schedule, usage
from hap.synthesizer.schedule.memory_timeline import Curve, memory_over_time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """One step of a plan; ``memory`` has one curve per rank."""

    plan: Plan
    run: Schedule
    usage: Usage
    memory: tuple[Curve, ...]

    @property
    def issuing_s(self) -> tuple[float, ...]:
        """Per rank, the seconds in which the host issues the step; 0 if unknown, as in stages."""
        if self.plan.stages:
            return (0.0,) * self.plan.world_size
        issued = np.zeros(self.plan.world_size)
        for span in self.run.spans:
            issued += span.end_s > span.start_s if span.stream == COMPUTE else 1.0
        return tuple(
            float(n * d.host_s) for n, d in zip(issued, self.plan.cluster.devices, strict=True)
        )


def simulate_plan(plan: Plan, *, overlap: bool = True) -> Simulation:
    """Simulate one training step.

    Args:
        overlap: collectives overlap computing, as in the runtime; else they run in turn.

    Raises:
        PlanError: the plan lacks the number of optimizer states, or has an unknown implementation.
    """
    check_rows(plan)
    if plan.stages:
        if not overlap:
            raise PlanError(
                "transfers between pipeline stages are never in turn with computing",
                hint="leave --in-turn out",
            )
        run, seconds, memory = pipeline_schedule(plan)
        return Simulation(plan=plan, run=run, usage=seconds, memory=memory)
    cost = plan_costs(plan)
    try:
        run = schedule(*plan.whole, cost, overlap=overlap)
    except ValueError as error:
        raise PlanError(f"the plan cannot be simulated: {error}", hint="plan anew") from error
    return Simulation(
        plan=plan, run=run, usage=usage(run),
        memory=memory_over_time(*plan.whole, cost, run),
    )  # fmt: skip


def without_hosts(plan: Plan) -> Plan:
    """Return a plan for devices that never wait for their hosts, as in steps that are CUDA graphs.

    Raises:
        PlanError: the plan has stages, which do not run as CUDA graphs.
    """
    if plan.stages:
        raise PlanError("pipelines do not run as CUDA graphs", hint="leave --cudagraphs out")
    devices = tuple(replace(device, host_s=0.0) for device in plan.cluster.devices)
    return replace(plan, cluster=replace(plan.cluster, devices=devices))


def plan_costs(plan: Plan) -> CostModel:
    """Return the cost model under a plan's shares."""
    hardware, states = HardwareModel(plan.cluster), plan.optimizer.states
    if plan.mesh is None or plan.inside is None:
        axes = plan.program.own_axes()
        return CostModel(plan.graph, axes, hardware, plan.shares, states)
    between = Between(mesh=plan.mesh, graph=plan.graph, program=plan.program, shares=plan.shares)
    graph, program = plan.whole
    return mesh_cost(between, graph, program.own_axes(), hardware, plan.inside.shares, states)
