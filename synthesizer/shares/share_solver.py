"""Integer shares for a given program, by an integer program over types of devices.

:func:`solve_shares` alternates: solve, simulate the integer split, add its tangents, until nothing
new or better comes. Without exchanges (all-to-alls, gathers in stages) the result is the optimum, to
the gap of the solver; with them it is a local one. docs/formulas.md states the integer program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph
from hap.ir.program import Program
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.shares.linearize import Plane, exchange_plane, padded_slopes, tangents_of
from hap.synthesizer.shares.share_model import COARSE, FINE, SCALE, Model
from hap.synthesizer.shares.share_task import Simulated, Split, Task, alike_axes, proportional

__all__ = ["ShareResult", "alike_axes", "proportional", "solve_shares"]

_PATIENCE = 2
"""Rounds in a row, each with a gain below the gap :data:`COARSE`, after which the alternation ends
if exchanges are in it.

Without them it is left to converge: every round adds tangents until its split was tried.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResult:
    """Shares of all axes, and their simulated step; if nothing fits, those that lack the fewest bytes."""

    fits: bool
    shares: Shares
    step_s: float


def solve_shares(
    graph: Graph, axes: Axes, program: Program, hardware: HardwareModel, optimizer_states: int,
    start: Shares,
) -> ShareResult:  # fmt: skip
    """The fastest integer shares for ``program`` that fit every device's memory.

    Axes that the program does not use keep their shares of ``start``.
    """
    task = Task(
        graph=graph, axes=axes, program=program, hardware=hardware,
        optimizer_states=optimizer_states, start=start,
        types=hardware.types, groups=alike_axes(graph, program),
    )  # fmt: skip
    best = first = task.simulated(start)
    new = task.first_splits()
    tangents = None
    planes: dict[Split, Plane] = {}  # of all splits that were tried
    rounds = stalled = 0
    gap = COARSE
    while task.groups:
        if new:
            more = tangents_of(task, new)
            tangents = tangents.joined(more) if tangents else more
            planes.update((split, exchange_plane(task, split)) for split in new)
        assert tangents is not None, "there are first splits"
        found = min([best, *(task.simulated(task.shares(s)) for s in new)], key=Simulated.rank)
        lacking, step_s = best.rank()
        stalled = 0 if found.rank() < (lacking, step_s * (1 - COARSE)) else stalled + 1
        best = found
        here = planes[best.split]
        convex = not here.slopes.any()
        if stalled >= _PATIENCE and not convex:
            break
        model = Model(
            task=task, tangents=tangents, padded=padded_slopes(task),
            exchange=[p for p in planes.values() if p.at(here.totals) <= here.value * (1 + 1e-9)],
            scale=SCALE / first.step_s, gap=gap,
        )  # fmt: skip
        elastic = False
        if (whole := model.solve(hint=best.split)) is None:
            elastic, whole = True, model.solve(elastic=True)
        solved = [whole]
        if not rounds:
            solved.append(model.solve(elastic=elastic, relaxed=True))
        if len(model.exchange) > 1 and not convex:
            solved.append(replace(model, exchange=[here]).solve(elastic=elastic, hint=best.split))
        rounds += 1
        new = [s for s in dict.fromkeys(solved) if s is not None and s not in planes]
        if not new:
            if gap == FINE:
                break
            gap = FINE
    return ShareResult(fits=not best.lack_bytes.any(), shares=best.shares, step_s=best.step_s)
