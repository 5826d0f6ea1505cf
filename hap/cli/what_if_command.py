"""The options of ``hap what-if``."""

from __future__ import annotations

import json

import click

import hap
from hap import cli
from hap.errors import InputError
from hap.files import check_output
from hap.launchers import started_as


@click.argument("model")
@click.option("--cluster", required=True, help="yaml file, hostfile, `local` or `local:4`.")
@click.option("--rows", metavar="N,N,...", help="Rows of the global batch.")
@click.option("--link", metavar="RATE,...", help="Rates between nodes: `10 Gbit/s,25 Gbit/s`.")
@click.option("--add", multiple=True, metavar="NxTYPE", help="One more node, such as 2xA100-40.")
@click.option("--without", multiple=True, metavar="NAME", help="Without this node, device or kind.")
@click.option(
    "--replace", "swap", multiple=True, metavar="NAME=NxTYPE",
    help="A new node in place of a node, device or kind, such as old=2xA100-40.",
)  # fmt: skip
@click.option(
    "--memory", metavar="[NAME=]SIZE,...",
    help="Memory of every device, or of a node, device or kind: `P100=16 GiB,P100=32 GiB`.",
)  # fmt: skip
@click.option(
    "--refine", type=click.IntRange(min=0), default=4, show_default=True, metavar="N",
    help="Most plans to locate each crossover, where the devices in use or the fit change.",
)  # fmt: skip
@click.option(
    "--cache/--no-cache", default=True, help="Cache plans, and use cached ones.  [default: on]"
)
@click.option("--all-devices", is_flag=True, help="Leave out no device that slows the step down.")
@click.option("--allow-idle", is_flag=True, help="Accept a batch with fewer rows than devices.")
@click.option(
    "--by", type=click.Choice(["change", "cost"]), default="change", show_default=True,
    help="Order of the lines. cost: of a million samples, by the cluster file's price_per_hour.",
)  # fmt: skip
@click.option("--plot", metavar="FILE", help="Draw samples/s and costs: an .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.argument("extra", nargs=-1)
def what_if(
    model: str, cluster: str, rows: str | None, link: str | None, add: tuple[str, ...],
    without: tuple[str, ...], swap: tuple[str, ...], memory: str | None, refine: int, cache: bool,
    all_devices: bool, allow_idle: bool, by: str, plot: str | None, as_json: bool,
    extra: tuple[str, ...],
) -> None:  # fmt: skip
    """Plan MODEL for other batches, links, memory and devices, one change at a time.

    Arguments after `--` are sys.argv of the model file.

    Without a change: half and twice the rows, a quarter of and four times the rate between nodes,
    and without each kind of device.
    """
    changes = cli.what_if_changes.Changes(
        rows=_rows(rows), links=_listed(link), memory=_listed(memory), add=add, without=without,
        swap=swap,
    )  # fmt: skip
    options = hap.PlanOptions(all_devices=all_devices, allow_idle=allow_idle)
    if plot is not None:
        check_output(plot, model, cluster, hint="change --plot")
        cli.what_if_plot.check_plot(plot)
    if by == "cost":  # before the long work
        devices = hap.load_cluster(cluster).devices
        cli.what_if.check_prices(device.price_per_hour for device in devices)
    with cli.terminal.sweep_progress() as progress:
        kept = hap.plan_cache.PlanCache(_told) if cache else None
        asking = cli.what_if.Asking(refine=refine, options=options, cache=kept)
        with started_as([model.rpartition(":")[0] or model, *extra]):
            answers = cli.what_if.what_if(model, cluster, changes, asking, progress)
    if kept and kept.found:
        _told(
            f"{kept.found} of {len(answers)} plans are from this run or from the cache, {kept.folder}"
        )
    if plot is not None:
        cli.what_if_plot.draw(answers, plot)
        _told(f"written to {plot}")
    if as_json:
        click.echo(json.dumps(cli.what_if.what_if_json(answers), indent=1, allow_nan=False))
    else:
        cli.terminal.emit(cli.what_if.what_if_screen(answers, by=by))


def _told(text: str) -> None:
    click.echo(text, err=True)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _rows(text: str | None) -> tuple[int, ...]:
    found = _listed(text)
    wrong = next((part for part in found if not part.isdecimal() or not int(part)), None)
    if wrong is not None:
        raise InputError(f"--rows: {wrong!r} is no number of rows", hint="write --rows 64,128")
    if any(len(part) > 12 for part in found):
        raise InputError("--rows: that is too many rows", hint="write --rows 64,128")
    return tuple(map(int, found))
