"""Alternatives to the choices of a plan over two mesh axes, between the machines and inside them.

Between the machines, an alternative is searched as the plan was: several programs between machines,
each with the cheapest program inside. Inside them, the plan's program between machines stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hap.errors import HapError, NoProgramError
from hap.explanation.forced_choices import (
    ForcedChoice,
    best_first,
    both,
    changed,
    explain_devices,
    impossible,
    listed,
    other_shares,
    placements_in,
    the_plan,
)
from hap.ir.mesh import Mesh, is_mesh, origin
from hap.ir.plan import Plan
from hap.ir.program import Program
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.mesh_cost import Between
from hap.synthesizer.pins import options_of, pinned
from hap.synthesizer.search.engines import eliminate_or_bound
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.shares.share_solver import proportional
from hap.synthesizer.two_axes import InsideSynthesizer, MeshCandidate, best_on_mesh

BETWEEN_MACHINES, INSIDE_MACHINES = "between machines", "inside machines"


def explain_mesh_tensor(plan: Plan, tensor: str) -> list[ForcedChoice]:
    """Return a tensor's placements between the machines and inside them, the fastest first."""
    return best_first([*_tensor_between(plan, tensor), *_tensor_inside(plan, tensor)])


def explain_mesh_axis(plan: Plan, axis: str) -> list[ForcedChoice]:
    """Return shares of an axis between the machines and inside them, with the plan's programs."""
    return best_first([*_axis_between(plan, axis), *_axis_inside(plan, axis)])


def explain_mesh_device(plan: Plan, rank: int) -> list[ForcedChoice]:
    """Return the plan beside those without a device, and without its machine."""
    device = plan.cluster.devices[rank]
    rows = explain_devices(plan, device.name, [rank])
    machine = plan.cluster.ranks(device.node)
    rest = [r for r in range(plan.world_size) if r not in machine]
    rows += [r for r in explain_devices(plan, device.node, machine) if not r.chosen]
    cluster = plan.cluster.keep(rest)
    if is_mesh(cluster):
        two = best_on_mesh(
            build_space(plan.graph), cluster, plan.optimizer.states, eliminate_or_bound
        )
        if two:
            row = _row_between(plan, f"without {device.node}, two mesh axes", two)
            rows.append(replace(row, level="", changes=None))
    return best_first(
        replace(r, choice=f"{r.choice}, two mesh axes") if r.chosen else r for r in rows
    )


def _inside(plan: Plan) -> Program:
    assert plan.inside is not None
    return plan.inside.program


def _mesh(plan: Plan) -> Mesh:
    assert plan.mesh is not None
    return plan.mesh


def _between(plan: Plan, axis: str = "", shares: tuple[int, ...] = ()) -> Between:
    """Return the plan's program between machines, with other shares of an axis."""
    given = {**plan.shares, axis: shares} if axis else plan.shares
    return Between(mesh=_mesh(plan), graph=plan.graph, program=plan.program, shares=given)


def _tensor_between(plan: Plan, tensor: str) -> Iterator[ForcedChoice]:
    space, states = build_space(plan.graph), plan.optimizer.states
    chosen = placements_in(plan.graph, plan.program, tensor)
    yield the_plan(plan, both(chosen), BETWEEN_MACHINES)
    for placement in options_of(space, tensor):
        if chosen != (placement,):
            allowed = pinned(space, {tensor: placement})
            two = best_on_mesh(space, plan.cluster, states, eliminate_or_bound, allowed=allowed)
            yield (
                _row_between(plan, str(placement), two) if two
                else impossible(str(placement), level=BETWEEN_MACHINES)
            )  # fmt: skip


def _tensor_inside(plan: Plan, tensor: str) -> Iterator[ForcedChoice]:
    graph, program = plan.whole
    name = next(t for t in graph.tensors if origin(t).tensor == tensor)
    chosen = placements_in(graph, program, name)
    yield the_plan(plan, both(chosen), INSIDE_MACHINES)
    space = build_space(graph)
    for placement in options_of(space, name):
        if chosen == (placement,):
            continue
        try:
            search = InsideSynthesizer(
                _between(plan), plan.cluster, plan.optimizer.states, eliminate_or_bound,
                pins={name: placement},
            )  # fmt: skip
            pair = search.search(next(search.starts()))
        except HapError as error:
            yield impossible(str(placement), error, INSIDE_MACHINES)
        else:
            yield _row_inside(plan, str(placement), pair)


def _axis_between(plan: Plan, axis: str) -> Iterator[ForcedChoice]:
    if axis not in plan.shares:
        return
    mine = plan.shares[axis]
    yield the_plan(plan, listed(mine), BETWEEN_MACHINES)
    for name, shares in other_shares(mine, HardwareModel(_mesh(plan).between).speed):
        try:
            if not all(shares):
                raise NoProgramError("a machine has no part of the step")
            search = _inside_search(_between(plan, axis, shares), plan)
            pair = search.judge(_inside(plan), next(search.starts()))
        except HapError as error:
            yield impossible(name, error, BETWEEN_MACHINES)
        else:
            yield replace(_row_inside(plan, name, pair), level=BETWEEN_MACHINES)


def _axis_inside(plan: Plan, axis: str) -> Iterator[ForcedChoice]:
    assert plan.inside is not None
    if axis not in plan.inside.shares:
        return
    mine = plan.inside.shares[axis]
    yield the_plan(plan, listed(mine), INSIDE_MACHINES)
    search = _inside_search(_between(plan), plan)
    given = {**next(search.starts()), **plan.inside.shares}
    ways = {"even": np.ones(len(mine)), "by speed": search.hardware.speed}
    for name, weights in ways.items():
        shares = _per_machine(_mesh(plan), mine, weights)
        if shares != mine:
            pair = search.judge(_inside(plan), {**given, axis: shares})
            yield _row_inside(plan, f"{name}: {listed(shares)}", pair)


def _per_machine(mesh: Mesh, mine: tuple[int, ...], weights: PerRank) -> tuple[int, ...]:
    """Return shares in which each machine keeps its units, in proportion to the weights."""
    own = [
        proportional(sum(mine[r] for r in ranks), weights[list(ranks)]) for ranks in mesh.machines
    ]
    return tuple(n for machine in own for n in machine)


def _inside_search(between: Between, plan: Plan) -> InsideSynthesizer:
    return InsideSynthesizer(between, plan.cluster, plan.optimizer.states, eliminate_or_bound)


def _collectives(between: Program, inside: Program) -> int:
    return len(between.collectives) + len(inside.collectives)


def _row_between(plan: Plan, choice: str, two: MeshCandidate) -> ForcedChoice:
    program = two.between.program
    return ForcedChoice(
        choice=choice, chosen=False, step_s=two.pair.timeline.step_s, level=BETWEEN_MACHINES,
        lacking_bytes=round(float(two.pair.lacking_bytes.max())),
        changes=changed(plan.graph, plan.program, program),
        collectives=_collectives(program, two.pair.program),
    )  # fmt: skip


def _row_inside(plan: Plan, choice: str, pair: Candidate) -> ForcedChoice:
    graph, program = plan.whole
    return ForcedChoice(
        choice=choice, chosen=False, step_s=pair.timeline.step_s, level=INSIDE_MACHINES,
        lacking_bytes=round(float(pair.lacking_bytes.max())),
        changes=changed(graph, program, pair.program),
        collectives=_collectives(plan.program, pair.program),
    )  # fmt: skip
