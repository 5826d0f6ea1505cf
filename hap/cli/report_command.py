"""The options of ``hap report``, and the option of ``hap run`` that writes its log."""

from __future__ import annotations

import os

import click

import hap
from hap import cli
from hap.errors import InputError, reason_of
from hap.files import check_output, write_whole
from hap.launchers import numbered
from hap.run_log import read_log

log_option = click.option(
    "--log", default="", metavar="FILE",
    help="Write each step's loss and times as a line of JSON, for `hap report --log`.",
)  # fmt: skip
"""The option of ``hap run``."""


def check_log(path: str, plan_file: str) -> None:
    """Check that ``hap run`` can write its log, unless another rank writes it.

    Raises:
        InputError: the reason why not.
    """
    if path and numbered("rank") == 0:
        source = hap.Plan.load(plan_file).source.path if os.path.exists(path) else None
        check_output(path, plan_file, source, hint="change --log")


@click.argument("plan_file", metavar="PLAN")
@click.option("-o", "--output", default="plan.html", show_default=True, help="The page.")
@click.option("--log", "log_file", help="Compare this run, a file of `hap run --log`, with PLAN.")
@click.option(
    "--tensorboard", metavar="DIR", help="Also write that run for `tensorboard --logdir DIR`."
)
def report(plan_file: str, output: str, log_file: str | None, tensorboard: str | None) -> None:
    """Write PLAN as a page for a browser: shares, timeline, collectives, modules, baselines.

    The page is one file that needs no network.
    """
    if tensorboard and not log_file:
        raise InputError("--tensorboard without --log", hint="give the log of a run")
    if tensorboard:
        cli.report.tensorboard_events.check_package()
    plan = hap.Plan.load(plan_file)
    check_output(output, plan_file, log_file, plan.source.path)
    text = cli.report.page.page_of_plan(plan, plan_file, log_file)
    try:
        write_whole(output, [text])
    except OSError as error:
        raise InputError(
            f"the page cannot be written there ({reason_of(error)})",
            where=output, hint="change -o",
        ) from error  # fmt: skip
    if tensorboard and log_file:
        cli.report.tensorboard_events.write_events(read_log(log_file), tensorboard)
    click.echo(f"written to {output}, {len(text.encode()):,} bytes", err=True)
