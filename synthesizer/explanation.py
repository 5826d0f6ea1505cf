"""Alternatives to a plan's choices, and the step of the cheapest program with each of them.

The search is exact for given shares. So the cost of an alternative is its min-marginal: no program
with that placement and these shares is cheaper before collectives overlap with computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hap.errors import HapError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.placement import Placement
from hap.ir.plan import Plan
from hap.ir.program import Program
from hap.synthesizer.candidate import Candidate, fastest
from hap.synthesizer.pins import options_of, pinned
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.share_solver import proportional
from hap.synthesizer.synthesize import Synthesizer, proportional_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedChoice:
    """A choice, and the best plan found in which it is forced.

    Attributes:
        choice: a placement, shares, or devices; ``chosen``: is it the plan's?
        step_s: seconds of the step; 0 if no program has this choice.
        lacking_bytes: of the rank that lacks most memory.
        changes: parameters that are stored in another placement than in the plan.
        collectives: how many the program has.
    """

    choice: str
    chosen: bool
    step_s: float
    lacking_bytes: int = 0
    changes: tuple[str, ...] = ()
    collectives: int = 0


def explain_tensor(plan: Plan, tensor: str) -> list[ForcedChoice]:
    """Return the plan's placement of a tensor and every other one, the fastest first."""
    space = build_space(plan.graph)
    chosen = placements_in(plan.graph, plan.program, tensor)
    found = [_of_plan(plan, " and ".join(map(str, chosen)))]
    for placement in options_of(space, tensor):
        if chosen != (placement,):
            allowed = pinned(space, {tensor: placement})
            part = Synthesizer(space, plan.cluster, plan.optimizer.states, allowed)
            found.append(_forced(plan, part, str(placement), _shares(plan, space)))
    return sorted(found, key=_order)


def explain_axis(plan: Plan, axis: str) -> list[ForcedChoice]:
    """Return the plan's shares of an axis, even ones and shares by speed, with the plan's program."""
    space = build_space(plan.graph)
    whole = Synthesizer(space, plan.cluster, plan.optimizer.states)
    mine = plan.shares[axis]
    given = {**_shares(plan, space), **plan.shares}
    found = [_of_plan(plan, _listed(mine))]
    for name, weights in {"even": np.ones(len(mine)), "by speed": whole.machine.speed}.items():
        shares = proportional(sum(mine), weights)
        if shares != mine:
            pair = whole.judge(plan.program, {**given, axis: shares})
            found.append(_row(plan, f"{name}: {_listed(shares)}", pair))
    return sorted(found, key=_order)


def explain_device(plan: Plan, rank: int) -> list[ForcedChoice]:
    """Return the plan beside the best one found without a device."""
    cluster = plan.cluster
    whole = Synthesizer(build_space(plan.graph), cluster.without(rank), plan.optimizer.states)
    name = cluster.devices[rank].name
    found = [_of_plan(plan, f"with {name}")]
    pair = whole.search(next(whole.starts()))
    pair = fastest([pair, whole.judge(pair.program, whole.balance(pair))])
    found.append(_row(plan, f"without {name}", pair))
    return sorted(found, key=_order)


def placements_in(graph: Graph, program: Program, tensor: str) -> tuple[Placement, ...]:
    """The placements in which a program stores an input, or has another tensor."""
    if tensor in program.inputs:
        return (program.inputs[tensor],)
    found = [
        v.placement for s in program.instructions for v in s.writes(graph) if v.tensor == tensor
    ]
    return tuple(dict.fromkeys(found))


def _of_plan(plan: Plan, choice: str) -> ForcedChoice:
    return ForcedChoice(
        choice=choice, chosen=True, step_s=plan.prediction.step_s,
        collectives=len(plan.program.collectives),
    )  # fmt: skip


def _forced(plan: Plan, part: Synthesizer, choice: str, shares: Shares) -> ForcedChoice:
    try:
        pair = part.search(shares)
    except HapError:
        return ForcedChoice(choice=choice, chosen=False, step_s=0.0)
    return _row(plan, choice, fastest([pair, part.judge(pair.program, part.balance(pair))]))


def _row(plan: Plan, choice: str, pair: Candidate) -> ForcedChoice:
    return ForcedChoice(
        choice=choice, chosen=False, step_s=pair.timeline.step_s,
        lacking_bytes=round(float(pair.lacking_bytes.max())),
        changes=tuple(_changed(plan, pair.program)), collectives=len(pair.program.collectives),
    )  # fmt: skip


def _changed(plan: Plan, program: Program) -> Iterator[str]:
    for i in plan.graph.role("parameter"):
        before, after = plan.program.inputs[i.tensor], program.inputs[i.tensor]
        if before != after:
            yield f"{i.target} {before} -> {after}"


def _shares(plan: Plan, space: Space) -> Shares:
    """The plan's shares of the axes of computing."""
    even = proportional_shares(space.axes, np.ones(plan.world_size))
    return {
        axis: plan.shares[axis] if sum(plan.shares.get(axis, ())) == sum(even[axis]) else even[axis]
        for axis in space.axes.axes
    }


def _listed(shares: tuple[int, ...]) -> str:
    return " ".join(map(str, shares))


def _order(row: ForcedChoice) -> tuple[bool, int, float]:
    return row.step_s == 0, row.lacking_bytes, row.step_s
