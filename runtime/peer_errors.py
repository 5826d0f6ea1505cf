"""Errors of torch.distributed whose cause is another rank, or the network between the ranks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import ClassVar

from torch.distributed import DistError

from hap.errors import HapError, InputError

LOST = 75
"""Exit code of a rank whose peer was lost: EX_TEMPFAIL of <sysexits.h>."""

_GLOO = re.compile(r"\bgloo/")  # gloo raises plain errors with the place in its sources


class PeerLostError(HapError):
    """A collective failed because another rank is lost or does not take part."""

    exit_code: ClassVar[int] = LOST


def of_peer(error: BaseException) -> bool:
    """Return whether another rank, or the network, caused an error of this rank."""
    if isinstance(error, PeerLostError | DistError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


@contextlib.contextmanager
def losses_told(who: str) -> Iterator[None]:
    """Raise errors that other ranks cause as ``PeerLostError``.

    Args:
        who: this process, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        if not of_peer(error):
            raise
        raise PeerLostError(
            f"another rank is lost ({_first_line(error)})", where=who,
            hint="the outputs of the other ranks have the cause: look for the first error there",
        ) from error  # fmt: skip


@contextlib.contextmanager
def meeting_told() -> Iterator[None]:
    """Raise errors of the store at MASTER_ADDR and MASTER_PORT as ``InputError``."""
    try:
        yield
    except DistError as error:
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"MASTER_PORT {port} is in use on this machine",
                hint="give all ranks another free port, for example by --master-port of torchrun",
            ) from error
        raise InputError(
            f"the ranks did not meet at MASTER_ADDR {address}, MASTER_PORT {port} ({_first_line(error)})",
            hint="start all ranks, with the name of rank 0's machine as MASTER_ADDR; the others must "
            "reach this port there",
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
