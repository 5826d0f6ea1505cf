"""The options of ``hap report``."""

from __future__ import annotations

import click

from hap import cli
from hap.errors import InputError
from hap.files import check_output, write_whole


@click.argument("plan_file", metavar="PLAN")
@click.option("-o", "--output", default="plan.html", show_default=True, help="The page.")
@click.option("--log", "log_file", help="Lay this run, a file of `hap run --log`, beside the plan.")
def report(plan_file: str, output: str, log_file: str | None) -> None:
    """Write PLAN as a page for a browser: shares, timeline, collectives, modules, baselines.

    The page is one file that needs no network.
    """
    check_output(output, plan_file, log_file)
    text = cli.report.page.page_of_files(plan_file, log_file)
    try:
        write_whole(output, [text])
    except OSError as error:
        raise InputError(
            f"the page cannot be written there ({error.strerror or error})",
            where=output, hint="change -o",
        ) from error  # fmt: skip
    click.echo(f"written to {output}, {len(text.encode()):,} bytes", err=True)
