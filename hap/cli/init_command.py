"""``hap init``: a model file and a cluster file to begin with."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import click
from jinja2 import Environment, PackageLoader, StrictUndefined

from hap import cli
from hap.errors import InputError, reason_of
from hap.files import check_output, write_whole

ROWS = 64
"""Rows of the model file's batch, or more so that each device has four."""


@click.argument("folder", default=".")
@click.option("--force", is_flag=True, help="Overwrite model.py and cluster.yaml if they exist.")
def init(folder: str, force: bool) -> None:
    """Write model.py and cluster.yaml into FOLDER, as a start for your own.

    The cluster file lists the GPUs of this machine, or its cores if it has none. If one of the
    files exists, nothing is written.
    """
    written, doubts = write_files(Path(folder), force)
    click.echo("\n".join(f"written: {path}" for path in written))
    click.echo("".join(f"to check in {written[1]}: {doubt}\n" for doubt in doubts), nl=False)
    click.echo(f"next: hap plan {written[0]} --cluster {written[1]}")


def write_files(folder: Path, force: bool) -> tuple[list[Path], list[str]]:
    """Write the model file and the cluster file; return their paths, and what to check in the latter.

    Raises:
        InputError: a file exists, or cannot be written; nothing was written then.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        reason = reason_of(error)
        raise InputError(
            f"cannot make the folder: {reason}", where=str(folder), hint="give another folder"
        ) from None
    origin, gpus = cli.machine_devices.devices()
    rows = max(ROWS, 4 * sum(found.count for found in gpus))
    host = re.sub(r"[^\w.-]", "-", platform.node()) or "here"
    environment = Environment(
        loader=PackageLoader("hap.cli"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    texts = {
        name: environment.get_template(f"{name}.j2").render(
            origin=origin, gpus=gpus, rows=rows, host=host
        )
        for name in ("model.py", "cluster.yaml")
    }
    for name in texts:
        if (folder / name).exists() and not force:
            raise InputError(
                "the file exists", where=str(folder / name), hint="give another folder, or --force"
            )
        check_output(str(folder / name), hint="give another folder")
    for name, text in texts.items():
        write_whole(folder / name, [text])
    return [folder / name for name in texts], [found.comment for found in gpus if found.comment]
