"""Alternatives to a plan's choices, and the step of the cheapest program with each of them.

The search is exact for given shares. So the cost of an alternative is its min-marginal: no program
with that placement and these shares is cheaper before collectives overlap with computing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hap.cluster.device import Device
from hap.cluster.topology import Cluster
from hap.errors import HapError, InputError, NoProgramError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.placement import Placement
from hap.ir.plan import Plan
from hap.ir.prediction import Alternative
from hap.ir.program import Program
from hap.synthesizer.candidate import Candidate, fastest
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.pins import options_of, pinned
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.share_solver import proportional
from hap.synthesizer.synthesize import Synthesizer, proportional_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedChoice:
    """A choice, and the best plan found in which it is forced.

    Attributes:
        level: where it is made: between or inside the machines, in a stage, over time; empty for
            plans with one program for all ranks.
        choice: a placement, shares, or devices; ``chosen``: is it the plan's?
        step_s: seconds of the step; 0 if no program with this choice is known.
        lacking_bytes: of the rank that lacks most memory.
        unknown: why no step is known; empty if there is one.
        changes: parameters that are stored in another placement than in the plan; ``None`` if their
            placements cannot be compared, as between one mesh axis and two.
        collectives: how many the program has; ``None`` if the plan file does not say it.
    """

    choice: str
    chosen: bool
    step_s: float
    level: str = ""
    lacking_bytes: int = 0
    unknown: str = ""
    changes: tuple[str, ...] | None = ()
    collectives: int | None = 0


def explain_tensor(plan: Plan, tensor: str) -> list[ForcedChoice]:
    """Return the plan's placement of a tensor and every other one, the fastest first."""
    space = build_space(plan.graph)
    chosen = placements_in(plan.graph, plan.program, tensor)
    found = [the_plan(plan, both(chosen))]
    for placement in options_of(space, tensor):
        if chosen != (placement,):
            allowed = pinned(space, {tensor: placement})
            part = Synthesizer(space, plan.cluster, plan.optimizer.states, allowed)
            found.append(_forced(plan, part, str(placement), _shares(plan, space)))
    return best_first(found)


def explain_axis(plan: Plan, axis: str) -> list[ForcedChoice]:
    """Return the plan's shares of an axis, even ones and shares by speed, with the plan's program."""
    space = build_space(plan.graph)
    whole = Synthesizer(space, plan.cluster, plan.optimizer.states)
    mine = plan.shares[axis]
    given = {**_shares(plan, space), **plan.shares}
    found = [the_plan(plan, listed(mine))]
    for name, shares in other_shares(mine, whole.hardware.speed):
        pair = whole.judge(plan.program, {**given, axis: shares})
        found.append(_row(plan, name, pair))
    return best_first(found)


def explain_devices(plan: Plan, name: str, ranks: Collection[int]) -> list[ForcedChoice]:
    """Return the plan beside the best one found without some of its devices, over one mesh axis."""
    rest = plan.cluster.keep([r for r in range(plan.world_size) if r not in ranks])
    found, known = _searched(plan, f"without {name}", rest), _row_without(plan, name)
    if known and (known.lacking_bytes, known.step_s) < (found.lacking_bytes, found.step_s):
        found = known
    part = any(name == device.partition(":")[0] for device in plan.left_out)
    mine = f"the {len(ranks)} of {name} in use" if part else name
    return best_first([the_plan(plan, f"with {mine}"), found])


def explain_left_out(plan: Plan, name: str, cluster: Cluster) -> list[ForcedChoice]:
    """Return the plan beside the best one found with devices that it leaves out.

    Args:
        name: a device, a node or a kind. The plan may use a part of these devices.
        cluster: the one that was planned for, or another one with the devices of the plan.

    Raises:
        InputError: the cluster lacks a device of the plan, or has none of the name.
    """
    mine = {d.name for d in plan.cluster.devices}
    more = {d.name for d in devices_named(cluster, name)} - mine
    known = {d.name for d in cluster.devices}
    if not more or not mine <= known:
        lacks = f"no device {name}" if not more else f"no device {min(mine - known)}"
        raise InputError(f"the cluster has {lacks}", hint="give the file that the plan is for")
    used = len(devices_named(plan.cluster, name))
    choices = f"without {name}", f"with {name}"
    if used:
        choices = f"with the {used} of {name} in use", f"with all of {name}"
    both_kinds = [r for r, d in enumerate(cluster.devices) if d.name in mine | more]
    return best_first(
        [the_plan(plan, choices[0]), _searched(plan, choices[1], cluster.keep(both_kinds))]
    )


def devices_named(cluster: Cluster, name: str) -> list[Device]:
    """Return the devices of a name, a node or a kind."""
    return [d for d in cluster.devices if name in (d.name, d.node, d.kind)]


def known_left_out(plan: Plan) -> list[ForcedChoice]:
    """Return the plan beside its row for all devices; no row if the plan has none."""
    rows = [a for a in plan.prediction.alternatives if a.name.startswith("all devices")]
    return best_first(
        [the_plan(plan, "without those left out"), *(_known(f"with {a.name}", a) for a in rows)]
    )


def _row_without(plan: Plan, device: str) -> ForcedChoice | None:
    """Return the plan's own row for all of its devices but one, if there is such a row."""
    note = f"without {device}"
    rows = [] if plan.left_out else [a for a in plan.prediction.alternatives if a.note == note]
    return _known(note, rows[0]) if rows else None


def _known(choice: str, row: Alternative) -> ForcedChoice:
    """Return a row of the plan file, which has neither the program nor its collectives."""
    return ForcedChoice(
        choice=choice, chosen=False, step_s=row.step_s, lacking_bytes=row.lacking_bytes,
        changes=None, collectives=None,
    )  # fmt: skip


def _searched(plan: Plan, choice: str, cluster: Cluster) -> ForcedChoice:
    """Return the best plan found on a cluster over one mesh axis, by the planner's search."""
    search = Synthesizer(build_space(plan.graph), cluster, plan.optimizer.states)
    row = _row(plan, choice, search.best())
    return replace(row, changes=None) if plan.inside or plan.stages else row


def placements_in(graph: Graph, program: Program, tensor: str) -> tuple[Placement, ...]:
    """The placements in which a program stores an input, or has another tensor."""
    if tensor in program.inputs:
        return (program.inputs[tensor],)
    found = [
        v.placement for s in program.instructions for v in s.writes(graph) if v.tensor == tensor
    ]
    return tuple(dict.fromkeys(found))


def the_plan(plan: Plan, choice: str, level: str = "") -> ForcedChoice:
    """Return the row of the plan itself."""
    if plan.stages:
        count = sum(
            count_collectives(stage.program, len(stage.ranks)) for stage in plan.stages.stages
        )
    else:
        programs = [plan.program, *([plan.inside.program] if plan.inside else [])]
        count = sum(count_collectives(program, plan.world_size) for program in programs)
    return ForcedChoice(
        choice=choice, chosen=True, step_s=plan.prediction.step_s, level=level, collectives=count
    )


def count_collectives(program: Program, ranks: int) -> int:
    """Return how many collectives a program has; on one device they move nothing and do not count."""
    return len(program.collectives) if ranks > 1 else 0


def impossible(choice: str, error: HapError | None = None, level: str = "") -> ForcedChoice:
    """Return the row of a choice that no program has, or whose search ended with another error."""
    unknown = "no program has it"
    if error is not None and not isinstance(error, NoProgramError):
        unknown = error.what
    return ForcedChoice(choice=choice, chosen=False, step_s=0.0, level=level, unknown=unknown)


def other_shares(mine: tuple[int, ...], speed: PerRank) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shares): even ones and shares by speed, unless they are ``mine``."""
    for name, weights in {"even": np.ones(len(mine)), "by speed": speed}.items():
        shares = proportional(sum(mine), weights)
        if shares != mine:
            yield f"{name}: {listed(shares)}", shares


def _forced(plan: Plan, part: Synthesizer, choice: str, shares: Shares) -> ForcedChoice:
    try:
        pair = part.search(shares)
    except HapError as error:
        return impossible(choice, error)
    return _row(plan, choice, fastest([pair, part.judge(pair.program, part.balance(pair))]))


def _row(plan: Plan, choice: str, pair: Candidate) -> ForcedChoice:
    return ForcedChoice(
        choice=choice, chosen=False, step_s=pair.timeline.step_s,
        lacking_bytes=round(float(pair.lacking_bytes.max())),
        changes=changed(plan.graph, plan.program, pair.program),
        collectives=count_collectives(pair.program, len(pair.room)),
    )  # fmt: skip


def changed(graph: Graph, before: Program, after: Program) -> tuple[str, ...]:
    """Return the parameters that two programs store in other placements."""
    stored = [(i.target, before.inputs[i.tensor], after.inputs[i.tensor])
              for i in graph.role("parameter")]  # fmt: skip
    return tuple(f"{target} {old} -> {new}" for target, old, new in stored if old != new)


def _shares(plan: Plan, space: Space) -> Shares:
    """The plan's shares of the axes of computing."""
    even = proportional_shares(space.axes, np.ones(plan.world_size))
    return {
        axis: plan.shares[axis] if sum(plan.shares.get(axis, ())) == sum(even[axis]) else even[axis]
        for axis in space.axes.axes
    }


def listed(shares: tuple[int, ...]) -> str:
    """Return shares as text."""
    return " ".join(map(str, shares))


def both(placements: Iterable[Placement]) -> str:
    """Return placements as text, such as ``P and R``."""
    return " and ".join(map(str, placements))


def best_first(rows: Iterable[ForcedChoice]) -> list[ForcedChoice]:
    """Return the rows of each level in order: those that fit the memory, the fastest first."""
    return sorted(rows, key=lambda r: (r.level, r.step_s == 0, r.lacking_bytes, r.step_s))
