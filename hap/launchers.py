"""How a process was started: numbered by torchrun or srun, and with which arguments."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hap.errors import InputError


class Launcher(NamedTuple):
    """Names of the variables that hold a process's rank, the number of ranks, and its place on its machine."""

    rank: str
    world_size: str
    local_rank: str


TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK")
SRUN = Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # as mpirun sets them


def launcher() -> Launcher | None:
    """Return what started this process as one of several; torchrun inside of srun is torchrun."""
    return next((one for one in (TORCHRUN, SRUN) if one.rank in os.environ), None)


def refuse_mpirun() -> None:
    """Check that mpirun did not start several processes, each of which would act as the only one.

    Raises:
        InputError: it did, and neither torchrun nor srun numbers them.
    """
    size = next((os.environ[name] for name in _MPI_SIZES if name in os.environ), "1")
    if launcher() is None and size != "1":
        raise InputError(
            f"mpirun started {size} processes, but hap does not read the rank numbers of mpirun",
            hint="start them by torchrun or srun; on one machine start hap run once, without mpirun",
        )


def numbered(name: str, default: int = 0) -> int:
    """Return a field of :class:`Launcher` for this process; without a launcher, or its variable, the default."""
    found = launcher()
    return int(os.environ.get(getattr(found, name), default)) if found else default


@contextlib.contextmanager
def started_as(argv: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv``, which a model file may read, inside of the context."""
    before, sys.argv = sys.argv, [*argv]
    try:
        yield
    finally:
        sys.argv = before
