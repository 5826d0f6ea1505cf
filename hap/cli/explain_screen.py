"""The alternatives to a choice of a plan, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hap.cli.terminal import table
from hap.errors import InputError
from hap.ir.plan import Plan
from hap.synthesizer.explanation import ForcedChoice, explain_axis, explain_device, explain_tensor
from hap.synthesizer.pins import tensor_named
from hap.units import format_bytes, format_seconds

_MOST_CHANGES = 3


def alternatives(plan: Plan, what: str) -> list[ForcedChoice]:
    """The plan's choice and its alternatives, the fastest first.

    Raises:
        InputError: the plan has no such name, or two mesh axes, or one device.
    """
    if plan.inside is not None:
        raise InputError(
            "the plan has two mesh axes; alternatives are searched over one",
            hint="plan with --no-mesh to explain it",
        )
    devices = [d.name for d in plan.cluster.devices]
    if what in plan.left_out:
        raise InputError(
            f"the plan leaves {what} out",
            hint=f"hap plan --keep {what} plans with it; compare the steps",
        )
    if plan.world_size == 1:
        raise InputError(
            "the plan runs on one device, where nothing is placed",
            hint="hap plan --all-devices plans for all devices",
        )
    if what in devices:
        return explain_device(plan, devices.index(what))
    if what in plan.shares:
        return explain_axis(plan, what)
    return explain_tensor(plan, tensor_named(plan.graph, what))


def names(plan: Plan) -> RenderableType:
    """The names that can be explained."""
    parameters = [i.target for i in plan.graph.role("parameter")]
    return Group(
        Text(f"axes: {', '.join(plan.shares)}"),
        Text(f"devices: {', '.join(d.name for d in plan.cluster.devices)}"),
        Text(f"left out: {', '.join(plan.left_out) or 'none'}"),
        Text(f"parameters: {', '.join(parameters)}"),
    )


def explain_screen(plan: Plan, what: str, rows: Sequence[ForcedChoice]) -> RenderableType:
    """A line per alternative, relative to the plan."""
    mine = next(row for row in rows if row.chosen)
    lines = []
    for row in rows:
        if not row.step_s:
            lines.append((row.choice, "-", "-", "", "", "no program has it"))
            continue
        ratio = "the plan" if row.chosen else f"{row.step_s / mine.step_s:.3f}x"
        lacks = f"lacks {format_bytes(row.lacking_bytes)}" if row.lacking_bytes else ""
        lines.append((row.choice, format_seconds(row.step_s), ratio, str(row.collectives),
                      lacks, _changes(row.changes)))  # fmt: skip
    head = (what, "step", "relative", "collectives", "memory", "parameters stored elsewhere")
    return table(head, lines, right=(1, 2, 3))


def _changes(changes: Sequence[str]) -> str:
    shown = ", ".join(changes[:_MOST_CHANGES])
    return shown + (f" and {len(changes) - _MOST_CHANGES} more" if changes[_MOST_CHANGES:] else "")
