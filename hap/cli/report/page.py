"""Render a plan as one page: :func:`page_of_plan` for the command, :func:`report_page` without a log file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hap.cli.plan_screen import NO_GAIN
from hap.cli.report.collective_reasons import collective_rows
from hap.cli.report.device_bars import USES, device_bars
from hap.cli.report.figures_json import shown_with
from hap.cli.report.module_tree import module_tree
from hap.cli.report.run_overlay import FIGURES, HEIGHT, WIDTH, bars, plot, run_json
from hap.cli.report.timeline_data import timeline_data
from hap.cli.simulation import simulation_json
from hap.cli.terminal import alike, runs, shown_time
from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.ir.plan_digest import program_digest, short_digest
from hap.ir.prediction import EVEN_PIPELINE
from hap.plan_simulation import simulate_plan
from hap.run_log import LoggedStep, read_log, steps_of_plan
from hap.synthesizer.cost.peak_memory import KINDS
from hap.units import format_bytes

FORMATS: dict[str, Callable[[Any], str]] = {
    "seconds": shown_time,
    "bytes": format_bytes,
    "percent": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:,}",
    "plain": str,
}


def page_of_plan(plan: Plan, plan_file: str, log_file: str | None = None) -> str:
    """The page of a plan, with the log of a run if one is given.

    Raises:
        PlanError: the plan has no predictions for its ranks.
        InputError: the log cannot be used, or the plan had no part in it.
    """
    if len(plan.prediction.ranks) != plan.world_size:
        raise PlanError(
            f"the plan has predictions for {len(plan.prediction.ranks)} of {plan.world_size} ranks",
            where=plan_file, hint="plan anew",
        )  # fmt: skip
    steps = read_log(log_file) if log_file is not None else None
    return report_page(plan, name=plan_file, steps=steps, log=log_file or "")


def report_page(
    plan: Plan, *, name: str = "", steps: Sequence[LoggedStep] | None = None, log: str = ""
) -> str:
    """The page as text. The same plan and run give the same page.

    Args:
        name: of the plan file, for the title.
        steps: a run, in which other plans may have had a part.
        log: its file, for messages.

    Raises:
        InputError: the plan had no part in the run.
    """
    made = simulate_plan(plan)
    figures: dict[str, Any] = {"plan": shown_with(made), "simulation": simulation_json(made)}
    if steps:
        digest = short_digest(program_digest(plan))
        own = steps_of_plan(steps, digest, plan.world_size, log)
        figures["run"] = run_json(made, steps, own)
    environment = Environment(
        loader=PackageLoader("hap.cli.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {
        "figure": partial(figure, figures),
        "breakable": breakable,
        "json": _script_json,
        "seconds": FORMATS["seconds"],
        "bytes": format_bytes,
        "alike": alike,
        "no_gain": NO_GAIN,
        "even_pipeline": EVEN_PIPELINE,
    }
    seconds = [s.seconds for s in steps or ()]
    return environment.get_template("page.html").render(
        plan=plan, name=name, run=figures.get("run"), data=figures["plan"],
        simulation=figures["simulation"], kinds=KINDS, uses=USES, axes=_axes(plan),
        devices=device_bars(made, figures["plan"]["memory_parts"]),
        timeline=timeline_data(made), collectives=collective_rows(plan), tree=module_tree(made),
        figures=FIGURES, bars=bars, size=(WIDTH, HEIGHT),
        step_plot=plot(seconds, made.run.step_s) if steps else None,
        loss_plot=plot([s.loss for s in steps]) if steps else None,
    )  # fmt: skip


def figure(figures: dict[str, Any], key: str, form: str = "plain") -> Markup:
    """The figure at ``key``, such as ``plan.prediction.step_s``: exact for programs, short for people.

    All figures of the page come from here, so they are those of ``hap show --json`` (``plan``),
    ``hap simulate --json`` (``simulation``) and the run.
    """
    value: Any = figures
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list | tuple) else value[part]
    exact = json.dumps(value) if not isinstance(value, str) else value
    return Markup('<data value="{}" data-key="{}">{}</data>').format(
        exact, key, FORMATS[form](value)
    )


def breakable(name: str) -> Markup:
    """A dotted name that may be broken after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _axes(plan: Plan) -> list[tuple[str, int, str]]:
    """(axis, units, units per place) of all axes in use; those inside the machines come last."""
    if plan.stages:
        return [
            (f"{name}, stage {number}", units, runs(stage.shares[name], len(stage.shares[name])))
            for number, stage in enumerate(plan.stages.stages)
            for name, units in stage.program.used_axes().items()
        ]
    found = [
        (name, units, runs(plan.shares[name], len(plan.shares[name])))
        for name, units in plan.program.used_axes().items()
    ]
    if plan.inside is None:
        return found
    between = [(f"{name}, between machines", units, given) for name, units, given in found]
    inside = plan.inside
    return between + [
        (f"{name}, inside machines", units, runs(inside.shares[name], len(inside.shares[name])))
        for name, units in inside.program.used_axes().items()
    ]


def _script_json(value: Any) -> Markup:
    """JSON inside a ``script`` element, which no text in it can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
