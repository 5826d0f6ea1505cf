"""Owners of emulated hosts: detect leftovers, and end stray ranks.

All resources of a testbed (control groups, network namespaces, processes) carry a name: the pid
namespace, pid and start time of the owner, and a number. A pid may be reused; pid and start time
together are unique. Owners in another pid namespace are not visible here, so their resources are
never removed.
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
"""Environment variable with the testbed's name, in every rank and its child processes."""

_NAME_OF_OWNER = re.compile(r"(\d+)-(\d+)-(\d+)(-.*)?")
_serial = itertools.count()
_PATIENCE_S = 5.0


def new_name() -> str:
    """Return a unique name: the owner's pid namespace, pid and start time, and a number."""
    pid = os.getpid()
    return f"{_pid_namespace()}-{pid}-{start_time(pid)}-{next(_serial)}"


def left_over(name: str, prefix: str) -> bool:
    """Return whether ``prefix-`` and a name of :func:`new_name` belong to an ended owner."""
    return name.startswith(f"{prefix}-") and _ended(name.removeprefix(f"{prefix}-"))


def start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def end_strays() -> list[int]:
    """Kill running processes of testbeds whose owners have ended; return their pids."""
    return _kill(_ended)


def end_ranks(name: str) -> list[int]:
    """Kill running processes of the testbed with this name; return their pids."""
    return _kill(lambda found: found == name)


def _kill(doomed: Callable[[str], bool]) -> list[int]:
    """Kill all processes of testbeds whose names are ``doomed``; raise if some do not end."""
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
    """Yield (pid, testbed name) of running processes of testbeds, except those of other users."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for line in (folder / "environ").read_bytes().split(b"\0"):
                name, _, value = line.partition(b"=")
                if name == VARIABLE.encode():
                    yield int(folder.name), value.decode(errors="replace")


def _ended(name: str) -> bool:
    """Return whether a name's owner has ended; False for other texts and other pid namespaces."""
    match = _NAME_OF_OWNER.fullmatch(name)
    if match is None or int(match[1]) != _pid_namespace():
        return False
    return start_time(int(match[2])) != int(match[3])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
