"""The log of a run as files that TensorBoard shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hap.errors import InputError, reason_of
from hap.run_log import LoggedStep


def check_package() -> None:
    """Check that the package is installed, before anything is written.

    Raises:
        InputError: it is not.
    """
    _summary_writer()


def write_events(steps: Sequence[LoggedStep], folder: str) -> None:
    """Write loss, seconds and each rank's figures into a folder for ``tensorboard --logdir``.

    Raises:
        InputError: the package ``tensorboard`` is not installed, or the folder cannot be made.
    """
    try:
        with _summary_writer()(folder) as writer:
            for step in steps:
                figures = {"loss": step.loss, "seconds": step.seconds}
                for rank, measured in enumerate(step.ranks):
                    figures |= {
                        f"{name}/rank {rank}": value
                        for name, value in asdict(measured).items()
                        if value is not None
                    }
                for name, value in figures.items():
                    writer.add_scalar(name, value, step.step)
    except OSError as error:
        raise InputError(
            f"files for TensorBoard cannot be written there ({reason_of(error)})",
            where=folder, hint="change --tensorboard",
        ) from error  # fmt: skip


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            f"files for TensorBoard need its package ({error})", hint="pip install tensorboard"
        ) from None
    return SummaryWriter
