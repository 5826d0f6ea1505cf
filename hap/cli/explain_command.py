"""The options of ``hap explain``."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

import hap
from hap import cli


@click.argument("plan_file", metavar="PLAN")
@click.argument("what", required=False, metavar="[TENSOR|OPERATOR|AXIS|DEVICE]")
@click.option("--cluster", help="The cluster file, to search with devices that PLAN leaves out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def explain(plan_file: str, what: str | None, cluster: str | None, as_json: bool) -> None:
    """Compare a choice of PLAN with its alternatives.

    A parameter, an operator or another tensor: its placement. An axis: its shares. A device, a
    node or a kind: the plan without it, or with it if PLAN leaves it out. Without an argument: the
    names of all of these.
    """
    plan = hap.Plan.load(plan_file)
    if what is None:
        cli.terminal.emit(cli.explain_screen.names(plan))
        return
    given = hap.load_cluster(cluster) if cluster else None
    rows = cli.explain_screen.alternatives(plan, what, given)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False))
    else:
        cli.terminal.emit(cli.explain_screen.explain_screen(what, rows))
