"""Owners of emulated hosts: detect leftovers, and end stray ranks.

All that a testbed makes on a machine (control groups, network namespaces, processes) carries a
name: the pid namespace, pid and start time of its owner, and a number. A pid may have gone to another process
since; pid and start time together have not. Owners in another pid namespace cannot be seen from
here, so what they made is never touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hap.errors import HapError

VARIABLE = "HAP_TESTBED"
"""Holds the testbed's name in the environment of every rank, and of what the ranks start."""

_NAME_OF_OWNER = re.compile(r"(\d+)-(\d+)-(\d+)(-.*)?")
_serial = itertools.count()
_PATIENCE_S = 5.0


def new_name() -> str:
    """The owner's tag and a number: unlike any that this process or another has had."""
    pid = os.getpid()
    return f"{_pid_namespace()}-{pid}-{start_time(pid)}-{next(_serial)}"


def left_over(name: str, prefix: str) -> bool:
    """Whether a prefix and a name made by :func:`new_name` are of an owner that has ended."""
    return name.startswith(f"{prefix}-") and _ended(name.removeprefix(f"{prefix}-"))


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def end_strays() -> list[int]:
    """Kill the processes that testbeds of ended owners started and that still run: their pids."""
    return _kill(_ended)


def end_ranks(name: str) -> list[int]:
    """Kill the processes that the testbed of this name started and that still run: their pids."""
    return _kill(lambda found: found == name)


def _kill(doomed: Callable[[str], bool]) -> list[int]:
    """Kill all processes of testbeds whose names are doomed, and wait until none is left."""
    end, killed = time.monotonic() + _PATIENCE_S, set()
    while pids := [pid for pid, name in _processes() if doomed(name)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise HapError(
                f"processes of a testbed cannot be killed: {pids}",
                hint="they may hang in the kernel (state D in ps): wait, and start again",
            )
        killed.update(pids)
        time.sleep(0.01)
    return sorted(killed)


def _processes() -> Iterator[tuple[int, str]]:
    """Running processes of any testbed, with its name; those of other users stay unseen."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in (folder / "environ").read_bytes().split(b"\0"):
                name, _, value = line.partition(b"=")
                if name == VARIABLE.encode():
                    yield int(folder.name), value.decode(errors="replace")


def _ended(name: str) -> bool:
    """Whether the owner of a name is gone. False for what is no name, or cannot be known here."""
    match = _NAME_OF_OWNER.fullmatch(name)
    if match is None or int(match[1]) != _pid_namespace():
        return False
    return start_time(int(match[2])) != int(match[3])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
