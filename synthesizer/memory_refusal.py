"""Refuse a plan that does not fit the devices' memory: where, how much, for what, and the remedy."""

from __future__ import annotations

import numpy as np

from hap.errors import InfeasibleError
from hap.synthesizer.axis_roles import batch_axis
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.peak_memory import memory, update_bytes, while_updating
from hap.synthesizer.plan_prediction import largest_batch, peak_kinds
from hap.synthesizer.search.program_space import Space
from hap.units import format_bytes


def check_memory(pair: Candidate, cost: CostModel, space: Space | None = None) -> None:
    """Raise ``InfeasibleError`` if a pair lacks memory.

    Args:
        space: that of the pair; with it, the message has the largest batch that would fit.
    """
    if pair.fits:
        return
    devices = cost.hardware.cluster.devices
    lacking = [
        f"{d.name} ({d.kind}) lacks {format_bytes(round(float(b)))} ({round(float(b))} bytes)"
        for d, b in zip(devices, pair.lacking_bytes, strict=True) if b > 0
    ]  # fmt: skip
    shown = "; ".join(lacking[:4]) + (f"; and {len(lacking) - 4} more" if lacking[4:] else "")
    fullest = int(np.argmax(pair.lacking_bytes))
    kinds = peak_kinds(cost.graph, pair, cost, fullest)
    held = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds[:4])
    shown += f"; at its fullest {devices[fullest].name} would hold {held}"
    remedy = _fused(pair, cost, fullest) or f"use more devices, or {_otherwise(kinds[0][0])}"
    raise InfeasibleError(
        f"no program fits the devices' memory: {shown}",
        hint=_smaller_batch(pair, cost, space) + remedy,
    )


def _fused(pair: Candidate, cost: CostModel, fullest: int) -> str:
    """Return the advice to fuse the optimizer, if a rank is fullest in its step, and that fits without a copy."""
    graph, program = cost.graph, pair.program
    workspace = update_bytes(graph, program, cost)
    before = memory(graph, program, cost, updating=False)[1]
    during = np.sum(list(while_updating(graph, program, cost).values()), axis=0)
    if before[fullest] > during[fullest] or (during - workspace > pair.room).any():
        return ""
    sure = (before <= pair.room).all()  # otherwise another program may fit
    return (
        f"{'make' if sure else 'use more devices, or make'} the optimizer fused, as "
        "torch.optim.AdamW(params, fused=True): its step then holds no copy of a state, which takes "
        f"{format_bytes(round(float(workspace.max())))}"
    )


def _otherwise(kind: str) -> str:
    if kind == "optimizer states":
        return "an optimizer with fewer states"
    return "devices with more memory"


def _smaller_batch(pair: Candidate, cost: CostModel, space: Space | None) -> str:
    """Return a sentence on the largest batch that would fit, before another remedy."""
    axis = batch_axis(space) if space else None
    if axis is None:
        return ""
    units = largest_batch(axis, pair, cost)
    if not units:
        return "no smaller batch fits with this program either: "
    total = cost.axes.axes[axis].units
    return f"reduce the global batch to about {units} (of {total}); or "
