"""Make the kernel refresh CPU quotas every millisecond: ``python quota_tick.py CORE``.

It looks whether a group has used up its quota when a core switches tasks, or else at its tick, which
comes every 4 ms on many machines: a rank with a tenth of a core then runs for 3 ms and stands still
for 27. A process that goes before all others, and does nothing but wake up, makes the core switch.
It takes some 2 % of the core, for which no rank's quota is charged.

This file is run as it is, so that it starts at once: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

_BEAT_MS = 1
_BEGUN = "begun"


@contextlib.contextmanager
def beat(core: int) -> Iterator[None]:
    """Have a core beat while inside, or until this process ends.

    Raises:
        PermissionError: This process may not give others a priority in real time.
    """
    command = [sys.executable, "-I", "-S", __file__, str(core)]
    pipe = subprocess.PIPE  # a session of its own, for Ctrl-C is the owner's to handle
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as it:
        assert it.stdout is not None
        said = it.stdout.readline().strip()
        if said != _BEGUN:
            raise PermissionError(said or "the helper that was to wake up the cores ended")
        yield  # leaving the process closes its stdin, which ends it


def _run(core: int) -> None:
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError as error:
        print(f"no priority in real time: {error.strerror}", flush=True)
        return
    print(_BEGUN, flush=True)
    closed = select.poll()
    closed.register(sys.stdin, select.POLLIN)
    while not closed.poll(_BEAT_MS):
        pass


if __name__ == "__main__":
    _run(int(sys.argv[1]))
