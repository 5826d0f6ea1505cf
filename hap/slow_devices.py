"""Devices that are slower than predicted while a run goes on, and the plan for their speeds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hap.api import plan_again
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan
from hap.run_log import RankFigures
from hap.synthesizer.plan_options import PlanOptions
from hap.units import format_seconds

WINDOW = 20
"""Steps whose median counts: shorter disturbances do not."""

CHANGE = 1.25
"""Ratio of a device's speed to the one that was planned with, above or below which it has changed.
Predictions of the parts of a step are off by less on real devices."""

GAIN = 1.05
"""Ratio of predicted steps, old over new, below which no plan is worth a switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from a change of speeds: a new plan, or the reason for none."""

    plan: Plan | None
    text: str


class SlowDevices:
    """Watches the computing times of a run; the same on every rank, since the figures are.

    A device's slowness is the ratio of measured to predicted computing time, relative to the least
    such ratio of all devices: what all have in common changes no share.

    Args:
        plan: the plan that the run began with.
    """

    def __init__(self, plan: Plan) -> None:
        self._original = plan.cluster
        self._planned = (1.0,) * plan.world_size
        self._declined: tuple[float, ...] = self._planned
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        on_original = simulate_plan(replace(plan, cluster=self._original))
        self._plan = plan
        self._predicted = tuple(map(float, on_original.usage.compute_s))
        self._measured: list[list[float]] = []

    def changed(self, ranks: Sequence[RankFigures]) -> tuple[float, ...] | None:
        """Return each device's slowness if it has changed over a whole window, else ``None``.

        Args:
            ranks: of one step, in rank order.
        """
        seconds = [rank.computing_s for rank in ranks]
        if None in seconds:
            return None
        self._measured.append([s for s in seconds if s is not None])
        if len(self._measured) < WINDOW:
            return None
        medians = [statistics.median(column) for column in zip(*self._measured, strict=True)]
        self._measured = []
        ratios = [m / p if p else None for m, p in zip(medians, self._predicted, strict=True)]
        least = min(ratio for ratio in ratios if ratio is not None)
        now = tuple(1.0 if ratio is None else ratio / least for ratio in ratios)
        return now if _apart(now, self._planned) and _apart(now, self._declined) else None

    def decide(self, slowness: tuple[float, ...], steps_left: int, switch_s: float) -> Decision:
        """Plan for the present speeds, and compare.

        Args:
            slowness: of each device, from :meth:`changed`.
            switch_s: what saving, loading and compiling anew takes.

        Returns:
            The decision; without a plan if there is none for these speeds, or it is not worth the switch.
        """
        cluster = slowed(self._original, slowness)
        at = max(range(len(slowness)), key=lambda r: abs(slowness[r] - self._planned[r]))
        name = cluster.devices[at].name
        who = f"{name} computes {slowness[at]:.2f} times as long as predicted"
        begun = time.perf_counter()
        try:
            new = plan_again(
                self._plan, cluster,
                PlanOptions(
                    all_devices=True, allow_idle=True, stages=self._plan.stages is not None
                ),
            )  # fmt: skip
        except HapError as error:
            return Decision(plan=None, text=f"{who}; there is no other plan: {error.what}")
        took = time.perf_counter() - begun
        old_s = simulate_plan(replace(self._plan, cluster=cluster)).run.step_s
        new_s = simulate_plan(new).run.step_s
        steps = f"{format_seconds(new_s)} a step instead of {format_seconds(old_s)}"
        text = f"{who}; planned anew in {format_seconds(took)}: {steps}"
        if old_s < GAIN * new_s:
            return Decision(plan=None, text=f"{text}: too small a gain to switch")
        if (old_s - new_s) * steps_left < switch_s:
            why = f"{steps_left} more steps save less than a switch takes"
            return Decision(plan=None, text=f"{text}; {why}, {format_seconds(switch_s)}")
        return Decision(plan=new, text=text)

    def follow(self, slowness: tuple[float, ...], plan: Plan | None) -> None:
        """Go on with a new plan; ``None``: with the old one, at these speeds."""
        self._declined = slowness
        if plan is not None:
            self._planned = slowness
            self._follow(plan)


def slowed(cluster: Cluster, slowness: Sequence[float]) -> Cluster:
    """Return the cluster with each device slower by a factor."""
    devices = tuple(
        device.slower(factor, f"in the run slower by {factor:.4g}") if factor != 1 else device
        for device, factor in zip(cluster.devices, slowness, strict=True)
    )
    return replace(cluster, devices=devices)


def _apart(now: Sequence[float], before: Sequence[float]) -> bool:
    return any(max(a / b, b / a) > CHANGE for a, b in zip(now, before, strict=True))
