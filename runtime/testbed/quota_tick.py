"""Make the kernel refresh CPU quotas every millisecond: ``python quota_tick.py CORE``.

The kernel checks a group's quota when a core switches tasks, or at the core's tick, which comes
every 4 ms on many machines: a rank with a tenth of a core then runs for 3 ms and pauses for 27. A
real-time process that only wakes up makes the core switch tasks. It takes about 2 % of the core,
which is charged to no rank's quota.

This file imports nothing of the package, so that it starts quickly as a script.
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
    """Run the helper on a core inside this context, or until this process ends.

    Raises:
        PermissionError: This process may not set a real-time priority.
    """
    command = [sys.executable, "-I", "-S", __file__, str(core)]
    pipe = subprocess.PIPE  # a session of its own, since the owner handles Ctrl-C
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as helper:
        assert helper.stdout is not None
        answer = helper.stdout.readline().strip()
        if answer != _BEGUN:
            raise PermissionError(answer or "the helper that wakes up the cores ended")
        yield  # Popen's exit closes the helper's stdin, which ends it


def _run(core: int) -> None:
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError as error:
        print(f"no real-time priority: {error.strerror or error}", flush=True)
        return
    print(_BEGUN, flush=True)
    closed = select.poll()
    closed.register(sys.stdin, select.POLLIN)
    while not closed.poll(_BEAT_MS):
        pass


if __name__ == "__main__":
    _run(int(sys.argv[1]))
