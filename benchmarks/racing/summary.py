"""Summary figures of a race: speed ratios, prediction errors, distances to the limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.contenders import EVEN, OURS, OURS_HALF, OURS_STAGED, PAPER, PLANNED, ROUNDED
from benchmarks.racing.results import Cell, Entry

PLAN = "plan: "
"""Prefix of the names of baselines that run as plans."""

SLOW_LINKS = ("paper", "two_sites")
AIM_EVEN = 2.41  # HAP's headline


def ratio(other: Entry, ours: Entry) -> float:
    """Return the median over rounds of the other's step over ours in the same round."""
    pairs = zip(other.seconds, ours.seconds, strict=False)
    return statistics.median(a / b for a, b in pairs)


def best_by_hand(cell: Cell) -> Entry | None:
    """Return the fastest contender that no plan runs, and that sums gradients exactly."""
    others = [
        e for e in cell.entries
        if e.counts and e.name not in (*PLANNED, *ROUNDED) and not e.name.startswith(PLAN)
    ]  # fmt: skip
    return min(others, key=lambda e: e.median_s, default=None)


def best_rounded(cell: Cell) -> Entry | None:
    """Return the fastest contender that sums gradients in bfloat16, ours left out."""
    others = [e for e in cell.entries if e.counts and e.name in ROUNDED and e.name != OURS_HALF]
    return min(others, key=lambda e: e.median_s, default=None)


def prediction_errors(cell: Cell) -> dict[str, float]:
    """Return plan -> predicted over measured step, less one."""
    return {
        e.name: e.predicted_s / e.median_s - 1 for e in cell.entries if e.counts and e.predicted_s
    }


def steady_errors(cell: Cell) -> dict[str, float]:
    """Return :func:`prediction_errors` corrected by the devices' slowdown since the profile."""
    return {name: (error + 1) * cell.slower - 1 for name, error in prediction_errors(cell).items()}


def memory_errors(cell: Cell) -> dict[str, float]:
    """Return plan -> predicted over measured peak, less one, of the rank predicted fullest."""
    found = {}
    for e in cell.entries:
        if e.counts and any(e.predicted_bytes):
            rank = max(range(len(e.predicted_bytes)), key=e.predicted_bytes.__getitem__)
            found[e.name] = e.predicted_bytes[rank] / e.peak_bytes[rank] - 1
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Spearman's correlation, ties at their mean rank; nan for fewer than two pairs."""
    if len(xs) < 2 or len(set(xs)) < 2 or len(set(ys)) < 2:
        return math.nan
    return statistics.correlation(_ranks(xs), _ranks(ys))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {v: ordered.index(v) for v in values}
    return [first[v] + (ordered.count(v) - 1) / 2 for v in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the summary: a figure, its target, and the number of values behind it."""

    name: str
    value: float
    aim: str
    met: bool
    cells: int
    kind: str = "x"  # unit: "x" ratio, "%" percentage, "" plain number


def summary(cells: Sequence[Cell]) -> list[Figure]:
    """Return all figures for which the cells have values."""
    figures: list[Figure] = []

    def add(name: str, values: Sequence[float], of: Callable[[Sequence[float]], float], aim: float,
            *, least: bool, kind: str = "x") -> None:  # fmt: skip
        if values:
            value = of(values)
            shown = f"{'>=' if least else '<='} {aim:.0%}" if kind == "%" else (
                f"{'>=' if least else '<='} {aim:g}{kind}"
            )  # fmt: skip
            met = value >= aim if least else value <= aim
            figures.append(
                Figure(name=name, value=value, aim=shown, met=met, cells=len(values), kind=kind)
            )

    first = [c for c in cells if c.run == 1]
    best = [(c, r) for c in first if (r := _against(c, best_by_hand(c))) is not None]
    paper = [r for c in first if c.unlike and (r := _against(c, c.entry(PAPER))) is not None]
    even = [r for c in first if c.unlike and (r := _against(c, c.entry(EVEN))) is not None]
    unlike = [r for c, r in best if c.unlike]
    add("over the best by hand, unlike clusters, geometric mean", unlike, geometric_mean, 1.4,
        least=True)  # fmt: skip
    add("over the best by hand, unlike clusters, worst cell", unlike, min, 0.98, least=True)
    add("with stages, over the best by hand, unlike clusters, geometric mean",
        [ratio(hand, own) for c in first if c.unlike
         and (own := c.entry(OURS_STAGED)) and (hand := best_by_hand(c))],
        geometric_mean, 1.4, least=True)  # fmt: skip
    add("over the best by hand, equal devices, geometric mean",
        [r for c, r in best if not c.unlike], geometric_mean, 1.1, least=True)  # fmt: skip
    add("over hap-paper, unlike clusters, geometric mean", paper, geometric_mean, 1.2, least=True)
    add(f"unlike cells at {AIM_EVEN}x over equal-share DDP or more", even,
        lambda v: sum(r >= AIM_EVEN for r in v) / len(v), 0.5, least=True, kind="%")  # fmt: skip
    slow = [c for c in first if c.cluster in SLOW_LINKS and c.entry(OURS_STAGED)]
    staged = [1 / r for c in slow if (r := _against(c, c.entry(OURS_STAGED))) is not None]
    add("with stages, over without, slow links, geometric mean", staged, geometric_mean, 1.4,
        least=True)  # fmt: skip
    halves = [
        ratio(other, own) for c in first
        if (own := c.entry(OURS_HALF)) and (other := best_rounded(c))
    ]  # fmt: skip
    add("gradients in bfloat16, over the best DDP with its hook, geometric mean", halves,
        geometric_mean, 1.0, least=True)  # fmt: skip
    steps = [abs(e) for c in cells for e in prediction_errors(c).values()]
    add("predicted step, median error", steps, statistics.median, 0.05, least=False, kind="%")
    add("predicted step, worst error", steps, max, 0.15, least=False, kind="%")
    peaks = [abs(e) for c in cells for e in memory_errors(c).values()]
    add("predicted peak memory, median error", peaks, statistics.median, 0.06, least=False,
        kind="%")  # fmt: skip
    plans = [e for c in cells for e in c.entries if e.counts and e.predicted_s]
    pairs = [e.predicted_s for e in plans], [e.median_s for e in plans]
    if not math.isnan(correlation := rank_correlation(*pairs)):
        add("rank correlation of predicted and measured", [correlation] * len(plans), min, 0.95,
            least=True, kind="")  # fmt: skip
    far = [(c, d) for c in first if (d := distance(c)) is not None]
    add("measured over the limit, more rows, worst cell", [d for c, d in far if c.rows > 1], max,
        1.15, least=False)  # fmt: skip
    add("measured over the limit, median", [d for _, d in far], statistics.median, 1.35,
        least=False)  # fmt: skip
    return figures


def distance(cell: Cell) -> float | None:
    """Return our measured step over the cell's floor."""
    ours = cell.entry(OURS)
    return ours.median_s / cell.limit_s if ours and cell.limit_s else None


def headroom(cell: Cell) -> float | None:
    """Return the step of the best by hand over the cell's floor.

    No program over one mesh axis is faster than the best by hand by more.
    """
    hand = best_by_hand(cell)
    return hand.median_s / cell.limit_s if hand and cell.limit_s else None


def _against(cell: Cell, other: Entry | None) -> float | None:
    ours = cell.entry(OURS)
    return ratio(other, ours) if ours and other else None
