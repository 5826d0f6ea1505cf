"""The alternatives to a choice of a plan, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hap.cli.terminal import no_repeats, pattern, table
from hap.cluster.topology import Cluster
from hap.errors import InputError
from hap.explanation.forced_choices import (
    ForcedChoice,
    devices_named,
    explain_axis,
    explain_devices,
    explain_left_out,
    explain_tensor,
    known_left_out,
)
from hap.explanation.mesh_choices import explain_mesh_axis, explain_mesh_device, explain_mesh_tensor
from hap.explanation.stage_choices import (
    explain_staged_axis,
    explain_staged_device,
    explain_staged_tensor,
)
from hap.ir.plan import Plan
from hap.synthesizer.pins import tensor_named
from hap.units import format_bytes, format_seconds

_MOST_CHANGES = 3
ALONE = "No alternative: no other placement, or the plan has the even shares and those by speed."


def alternatives(plan: Plan, what: str, cluster: Cluster | None = None) -> list[ForcedChoice]:
    """The plan's choice and its alternatives, the fastest of each level first.

    Args:
        cluster: the one that was planned for, to search with devices that the plan leaves out.

    Raises:
        InputError: the plan has no such name; or it runs on one device, where nothing is placed.
    """
    devices = plan.cluster.devices
    used = [rank for rank, d in enumerate(devices) if what in (d.name, d.node, d.kind)]
    left = {name for device in plan.left_out for name in (device, device.partition(":")[0])}
    others = bool(used) and len(used) < len(devices)
    if cluster is not None:
        names = {d.name for d in devices_named(cluster, what)}
        if not used or names - {d.name for d in devices}:
            return explain_left_out(plan, what, cluster)
    elif not others and what in left:
        return _left_out(plan, what)
    if others:
        return _device(plan, what, used)
    if plan.world_size == 1:
        raise InputError(
            "the plan runs on one device, where nothing is placed",
            hint="hap plan --all-devices plans for all devices",
        )
    if used:
        raise InputError(f"all devices of the plan are {what}", hint="name one of them")
    if what in axes_of(plan):
        axis_rows = explain_mesh_axis if plan.inside else explain_axis
        return (explain_staged_axis if plan.stages else axis_rows)(plan, what)
    tensor_rows = explain_mesh_tensor if plan.inside else explain_tensor
    explain = explain_staged_tensor if plan.stages else tensor_rows
    try:
        return explain(plan, tensor_named(plan.graph, what))
    except InputError as error:
        if not plan.left_out:
            raise
        hint = f"{error.hint}; for a kind of devices that the plan leaves out, give --cluster"
        raise InputError(error.what, hint=hint) from error


def axes_of(plan: Plan) -> tuple[str, ...]:
    """The names of the axes of all levels."""
    shares = [plan.shares]
    shares += [plan.inside.shares] if plan.inside else []
    shares += [stage.shares for stage in plan.stages.stages] if plan.stages else []
    return tuple(dict.fromkeys(axis for each in shares for axis in each))


def _device(plan: Plan, what: str, ranks: Sequence[int]) -> list[ForcedChoice]:
    if len(ranks) == 1 and plan.inside:
        return explain_mesh_device(plan, ranks[0])
    if len(ranks) == 1 and plan.stages:
        return explain_staged_device(plan, ranks[0])
    return explain_devices(plan, what, ranks)


def _left_out(plan: Plan, what: str) -> list[ForcedChoice]:
    rows = known_left_out(plan)
    if len(rows) == 1:
        raise InputError(
            f"the plan leaves {what} out, and its file does not say what that gains",
            hint=f"hap explain PLAN {what} --cluster FILE searches with it",
        )
    return rows


def names(plan: Plan) -> RenderableType:
    """The names that can be explained."""
    parameters = [i.target for i in plan.graph.role("parameter")]
    return Group(
        Text(f"axes: {', '.join(axes_of(plan))}"),
        Text(f"devices: {', '.join(d.name for d in plan.cluster.devices)}"),
        Text(f"left out: {', '.join(plan.left_out) or 'none'}"),
        Text(f"parameters: {', '.join(parameters)}"),
    )


def explain_screen(what: str, rows: Sequence[ForcedChoice]) -> RenderableType:
    """A line per alternative, relative to the plan; the plan's levels one after the other."""
    mine = next(row for row in rows if row.chosen)
    lines = []
    for row in rows:
        if not row.step_s:
            lines.append((row.level, row.choice, "-", "-", "", "", row.unknown))
            continue
        ratio = "the plan" if row.chosen else f"{row.step_s / mine.step_s:.3f}x"
        lacks = f"lacks {format_bytes(row.lacking_bytes)}" if row.lacking_bytes else ""
        count = "" if row.collectives is None else str(row.collectives)
        lines.append((row.level, row.choice, format_seconds(row.step_s), ratio, count,
                      lacks, _changes(row.changes)))  # fmt: skip
    head = ("where", what, "step", "relative", "collectives", "memory",
            "parameters stored otherwise")  # fmt: skip
    made = (
        table(head, no_repeats(lines), right=(2, 3, 4)) if any(row.level for row in rows)
        else table(head[1:], [line[1:] for line in lines], right=(1, 2, 3))
    )  # fmt: skip
    return made if len(rows) > 1 else Group(made, Text(ALONE))


def _changes(changes: Sequence[str] | None) -> str:
    """Return changes as text; those of similar layers together."""
    if changes is None:
        return "not compared"
    groups: dict[tuple[str, str], list[str]] = {}
    for name, _, how in (change.partition(" ") for change in changes):
        groups.setdefault((pattern(name), how), []).append(name)
    lines = [
        f"{alike} {how} ({len(names)}x)" if len(names) > 1 else f"{names[0]} {how}"
        for (alike, how), names in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    shown = lines[:_MOST_CHANGES] + [f"and {len(lines) - _MOST_CHANGES} more kinds"] * (
        len(lines) > _MOST_CHANGES
    )
    return "\n".join(shown)
