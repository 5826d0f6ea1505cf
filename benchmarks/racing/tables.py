"""Tables of a race as Markdown, JSON and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.contenders import OURS, OURS_STAGED, PAPER, ROUNDED
from benchmarks.racing.results import Cell, Entry
from benchmarks.racing.summary import (
    PLAN,
    Figure,
    best_by_hand,
    distance,
    geometric_mean,
    headroom,
    memory_errors,
    prediction_errors,
    ratio,
    steady_errors,
    summary,
)  # fmt: skip
from hap.files import write_whole
from hap.units import format_seconds


def write(folder: Path, cells: Sequence[Cell]) -> None:
    """Write ``race.md``, ``race.json`` and, if matplotlib is installed, ``race.png``."""
    parts = [summary_text(cells), *(cell_text(cell) for cell in cells)]
    write_whole(folder / "race.md", ["\n\n".join(["# The race", *parts]) + "\n"])
    data = {
        "summary": [asdict(figure) for figure in summary(cells)],
        "cells": [asdict(cell) for cell in cells],
    }
    write_whole(folder / "race.json", [json.dumps(data, indent=1) + "\n"])
    plot(folder / "race.png", cells)


def summary_text(cells: Sequence[Cell]) -> str:
    """Return the summary's table and a table with a row per cell."""
    lines = ["| figure | seen | aim | | over |", "|---|---|---|---|---|"]
    for f in summary(cells):
        lines.append(
            f"| {f.name} | {_value(f)} | {f.aim} | {'met' if f.met else 'missed'} | {f.cells} |"
        )
    lines += [*_headroom_lines(cells), "",
              "| cell | ours | best by hand | over it | at most | over hap-paper | over its products "
              "| over the limit | with stages |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for cell in cells:
        ours, best, paper = cell.entry(OURS), best_by_hand(cell), cell.entry(PAPER)
        far, most = distance(cell), headroom(cell)
        products = ours.median_s / cell.arithmetic_s if ours and cell.arithmetic_s else 0.0
        lines.append(
            f"| {cell.slot} | {_seconds(ours)} "
            f"| {best.name if best else 'none'} {_seconds(best)} | {_times(best, ours)} "
            f"| {f'{most:.2f}x' if most else ''} | {_times(paper, ours)} | {f'{products:.2f}x' if products else ''} "
            f"| {f'{far:.2f}x' if far else ''} | {_seconds(cell.entry(OURS_STAGED))} |"
        )
    return "\n".join([*lines, *_drift_lines(cells)])


def _headroom_lines(cells: Sequence[Cell]) -> list[str]:
    """Return how much faster than the best by hand a program over one mesh axis could be."""
    found = [most for cell in cells if cell.unlike and cell.run == 1 if (most := headroom(cell))]
    if not found:
        return []
    return [
        "",
        f"On unlike clusters no program over one mesh axis could be more than {geometric_mean(found):.2f} times as "
        f"fast as the best by hand, in the geometric mean of {len(found)} cells ({min(found):.2f} to {max(found):.2f}; "
        "column *at most*): that is the step of the best by hand over the limit, a proved lower bound of the "
        "[step](race.md#reading-it) by the profile's figures. Pipelines of stages may be faster.",
    ]


def _drift_lines(cells: Sequence[Cell]) -> list[str]:
    known = [cell for cell in cells if cell.drift]
    errors = [abs(error) for cell in known for error in steady_errors(cell).values()]
    if not errors:
        return []
    drifts = sorted(statistics.median(cell.drift) for cell in known)
    lines = [
        "",
        f"The probes before a round took {drifts[0]:.2f} to {drifts[-1]:.2f} times as long as in the profile. "
        "A larger share of a core made up for a part of this drift. Predictions scaled by the remaining drift are off by "
        f"{statistics.median(errors):.1%} in the median and {max(errors):.1%} at worst.",
    ]
    if held := [cell for cell in known if cell.pace]:
        off = [abs(error) for cell in held for error in prediction_errors(cell).values()]
        lines[-1] += (
            f" In the {len(held)} cells whose devices the testbed held at their speed, unscaled predictions "
            f"are off by {statistics.median(off):.1%} and {max(off):.1%}."
        )
    return lines


def cell_text(cell: Cell) -> str:
    """Return one cell's table of all contenders, with the reasons of void entries."""
    ours = cell.entry(OURS)
    steps, peaks = prediction_errors(cell), memory_errors(cell)
    lines = [
        f"## {cell.slot}", "",
        "| contender | median step | spread | ours is faster by | predicted | error "
        "| peak memory | error | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for e in sorted(cell.entries, key=lambda e: (not e.counts, e.median_s if e.counts else 0.0)):
        if not e.counts:
            lines.append(f"| {e.name} | {missing(e)} | | | | | {_peak(e)} | | {e.void} |")
            continue
        lines.append(
            f"| {e.name} | {_seconds(e)} | {_spread(e)} | {_times(e, ours)} "
            f"| {format_seconds(e.predicted_s) if e.predicted_s else ''} | {_part(steps.get(e.name))} "
            f"| {_peak(e)} | {_part(peaks.get(e.name))} | {e.note} |"
        )
    lines.append("")
    floors = [
        f"all products at the summed speed of all devices: {format_seconds(cell.arithmetic_s)}"
    ]
    if cell.bound_s:
        floors.append(f"proved for {cell.covers}: {format_seconds(cell.bound_s)}")
    if ours and cell.limit_s:
        which = "the proved one" if cell.bound_s > cell.arithmetic_s else "the products"
        floors.append(f"ours is {distance(cell):.2f}x the larger one, {which}")
    lines.append("Floors of the step. " + "; ".join(floors) + ".")
    if cell.drift:
        drift = statistics.median(cell.drift)
        lines.append(
            f"The model's kinds of work took {drift:.2f} times as long as when the cluster was profiled"
            + (
                f", and ranks had {statistics.median(cell.pace):.2f} times the core."
                if cell.pace
                else "."
            )
        )
    return "\n".join(lines)


def missing(entry: Entry | None) -> str:
    """Return why a contender has no counted step: ``void``, or its step in the warm-up."""
    if entry is None or entry.void or not entry.warm_up:
        return "void"
    return f"sat out after {format_seconds(min(entry.warm_up))}"


def _value(figure: Figure) -> str:
    return f"{figure.value:.1%}" if figure.kind == "%" else f"{figure.value:.3f}{figure.kind}"


def _seconds(entry: Entry | None) -> str:
    return format_seconds(entry.median_s) if entry else ""


def _spread(entry: Entry) -> str:
    return format_seconds(entry.spread_s) if len(entry.seconds) > 1 else "one round"


def _times(other: Entry | None, ours: Entry | None) -> str:
    return f"{ratio(other, ours):.2f}x" if other and ours else ""


def _part(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _peak(entry: Entry) -> str:
    return f"{max(entry.peak_bytes) / 2**20:.0f} MiB" if entry.peak_bytes else ""


def plot(path: Path, cells: Sequence[Cell]) -> None:
    """Plot median steps over ours, a panel per cluster; void entries have no bar."""
    try:
        import matplotlib
    except ImportError:  # optional: hap[bench]
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    clusters = list(dict.fromkeys(cell.cluster for cell in cells))
    if not clusters:
        return
    columns = min(3, len(clusters))
    rows = math.ceil(len(clusters) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.5 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys(
        e.name for c in cells for e in c.entries
        if e.counts and e.name not in (OURS, *ROUNDED) and not e.name.startswith(PLAN)
    ))  # fmt: skip
    for axis in axes.flat[len(clusters) :]:
        axis.set_visible(False)
    for axis, cluster in zip(axes.flat, clusters, strict=False):
        here = [cell for cell in cells if cell.cluster == cluster and cell.run == 1]
        for k, name in enumerate(names):
            pairs = [(cell.entry(name), cell.entry(OURS)) for cell in here]
            heights = [ratio(e, ours) if e and ours else math.nan for e, ours in pairs]
            places = [m + (k + 0.5) / len(names) * 0.8 - 0.4 for m in range(len(here))]
            axis.bar(places, heights, width=0.8 / len(names), label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        labels = [f"{cell.model} x{cell.rows}" if cell.rows > 1 else cell.model for cell in here]
        axis.set_xticks(range(len(here)), labels, fontsize=7)
        axis.set_title(cluster)
    axes.flat[0].set_ylabel("step over ours")
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(len(names), 4),
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
