"""The page's bars per device: work, storage, memory by its parts, and the step by its uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hap.cli.simulation import RankUse, rank_uses
from hap.cli.terminal import MANY_RANKS, spans
from hap.plan_simulation import Simulation
from hap.synthesizer.cost.peak_memory import KINDS
from hap.units import format_bytes, format_seconds

USES = ("computing", "both at once", "communicating", "waiting", "idle")
"""The uses of a step, which they fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """A part of a bar: ``style`` names its colour and pattern, ``width`` is in percent."""

    style: str
    width: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBars:
    """One line of bars for ranks with equal figures; ``rank`` is the first of them."""

    rank: int
    ranks: str
    count: int
    device: str
    note: str
    work: float
    stored: float
    filled: float
    memory: tuple[BarPart, ...]
    time: tuple[BarPart, ...]


def device_bars(made: Simulation, parts: Sequence[dict[str, int]]) -> list[DeviceBars]:
    """A line per rank; above 16 ranks, a line per alike device with alike figures."""
    predicted = made.plan.prediction.ranks
    most_work = max(r.work for r in predicted) or 1.0
    most_stored = max(r.stored for r in predicted) or 1.0
    most_bytes = max(r.peak_bytes for r in predicted) or 1
    groups: dict[object, list[int]] = {}
    uses = rank_uses(made)
    for rank, (use, r) in enumerate(zip(uses, predicted, strict=True)):
        key: object = rank
        if made.plan.world_size > MANY_RANKS:
            shown = (f"{r.work:.3f}", f"{r.stored:.3f}", format_bytes(r.peak_bytes))
            times = (format_seconds(use.compute_s), format_seconds(use.communicate_s))
            key = made.plan.cluster.devices[rank].figures, shown, times
        groups.setdefault(key, []).append(rank)
    lines = []
    for ranks in groups.values():
        first = ranks[0]
        r, use = predicted[first], uses[first]
        lines.append(
            DeviceBars(
                rank=first, ranks=spans(ranks), count=len(ranks),
                device=use.kind if len(ranks) > 1 else f"{use.kind} {use.device}",
                note="idle, without a share" if first in made.plan.idle else "",
                work=100 * r.work / most_work, stored=100 * r.stored / most_stored,
                filled=100 * min(1.0, r.peak_bytes / max(r.memory_bytes, 1)),
                memory=_memory(parts[first], most_bytes), time=_time(use, made.run.step_s),
            )
        )  # fmt: skip
    return lines


def _memory(parts: dict[str, int], most_bytes: int) -> tuple[BarPart, ...]:
    return tuple(
        BarPart(
            style=f"m{KINDS.index(kind)}", width=100 * nbytes / most_bytes,
            label=f"{kind} {format_bytes(nbytes)}",
        )
        for kind, nbytes in parts.items()
    )  # fmt: skip


def _time(use: RankUse, step_s: float) -> tuple[BarPart, ...]:
    seconds = (
        use.compute_s - use.overlapped_s, use.overlapped_s,
        use.communicate_s - use.overlapped_s, use.waiting_s, use.idle_s,
    )  # fmt: skip
    return tuple(
        BarPart(
            style=f"u{at}", width=100 * each / (step_s or 1.0),
            label=f"{name} {format_seconds(each)}",
        )
        for at, (name, each) in enumerate(zip(USES, seconds, strict=True))
        if each > 0
    )  # fmt: skip
