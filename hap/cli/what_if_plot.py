"""The plot of ``hap what-if``: samples per second and cost by change."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hap.errors import InputError

if TYPE_CHECKING:  # it imports torch
    from hap.cli.crossovers import Answer

FORMATS = (".svg", ".png")

_COLOURS = {"samples/s": "#4477aa", "cost of 1M samples": "#cc6677"}


def check_plot(path: str) -> None:
    """Check that a plot can be drawn into a file.

    Raises:
        InputError: the file has another ending, or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: the plot is svg or png", hint="write --plot plot.svg")
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib", hint="pip install matplotlib")


def draw(answers: Sequence[Answer], path: str) -> None:
    """Draw a bar per answer and figure; answers without a plan have none."""
    from matplotlib.figure import Figure

    figures = {"samples/s": [answer.samples_per_s for answer in answers]}
    if any(answer.cost for answer in answers):
        figures["cost of 1M samples"] = [answer.cost for answer in answers]
    page = Figure(figsize=(5 * len(figures) + 2, 1 + 0.35 * len(answers)), layout="constrained")
    changes = [answer.change for answer in answers]
    for axes, (name, values) in zip(
        page.subplots(1, len(figures), squeeze=False)[0], figures.items(), strict=True
    ):
        bars = axes.barh(range(len(values)), values, color=_COLOURS[name])
        axes.bar_label(bars, [f"{value:,.4g}" if value else "-" for value in values], padding=3)
        axes.set_yticks(range(len(values)), changes)
        axes.invert_yaxis()
        axes.margins(x=0.2, y=0.01)
        axes.set_xlabel(name)
        axes.spines[["top", "right"]].set_visible(False)
    page.savefig(path, dpi=120)
