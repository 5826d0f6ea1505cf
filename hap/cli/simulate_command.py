"""The options of ``hap simulate``."""

from __future__ import annotations

import json

import click

import hap
from hap import cli
from hap.files import check_output


@click.argument("plan_file", metavar="PLAN")
@click.option("--trace", help="Write the timeline to this file, for Perfetto or chrome://tracing.")
@click.option(
    "--in-turn", is_flag=True,
    help="Let computing wait for each collective; not for plans with stages.",
)  # fmt: skip
@click.option(
    "--cudagraphs", is_flag=True,
    help="Simulate the backend cudagraphs, with which no device waits for its host.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the screen.")
def simulate(
    plan_file: str, trace: str | None, in_turn: bool, cudagraphs: bool, as_json: bool
) -> None:
    """Show how each rank would spend a step of PLAN, and when its memory is fullest."""
    plan = hap.Plan.load(plan_file)
    if trace is not None:
        check_output(trace, plan_file, plan.source.path, hint="change --trace")
    if cudagraphs:
        plan = hap.plan_simulation.without_hosts(plan)
    made = hap.plan_simulation.simulate_plan(plan, overlap=not in_turn)
    if trace is not None:
        cli.simulation.write_trace(made, trace)
        click.echo(f"written to {trace}", err=True)
    if as_json:
        click.echo(json.dumps(cli.simulation.simulation_json(made), indent=1, allow_nan=False))
    else:
        cli.terminal.emit(cli.simulation.simulation_screen(made))
