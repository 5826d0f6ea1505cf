"""Control groups of the Linux kernel, versions 1 and 2."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hap.runtime.testbed.ownership import left_over

_PATIENCE_S = 5.0  # a group stays busy for a moment after its last process has ended

Settings = Sequence[tuple[str, str]]
"""(file, text) pairs, to be written in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A usable controller: the parent of new groups, and the group of this process."""

    version: int
    root: Path
    home: Path


def find_controller(
    name: str, mounts: str, memberships: str, otherwise: str
) -> tuple[Controller | None, str]:
    """Return (the controller to use, its description), or (None, why there is none).

    Args:
        name: ``cpu`` or ``memory``.
        mounts: The text of ``/proc/self/mountinfo``.
        memberships: The text of ``/proc/self/cgroup``.
        otherwise: The consequence of having none; it ends the reason.
    """
    own = {}  # controller name, "" for v2 -> path of this process's group
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    reason = f"no {name} controller of control groups is mounted"
    for line in mounts.splitlines():
        left, right = line.split(" - ", 1)
        mount = Path(left.split()[4])
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup" and name in options.split(","):
            # In a container the path may be the host's; the mount is then this process's group.
            home = mount / own.get(name, "/").lstrip("/")
            home = home if home.is_dir() else mount
            found = Controller(version=1, root=home, home=home)
        elif kind == "cgroup2" and name in _words(mount / "cgroup.controllers"):
            if name not in _words(mount / "cgroup.subtree_control"):
                reason = f"the {name} controller is not enabled in {mount}/cgroup.subtree_control"
                continue
            home = mount / own.get("", "/").lstrip("/")
            found = Controller(version=2, root=mount, home=home if home.is_dir() else mount)
        else:
            continue
        if os.access(found.root, os.W_OK) and os.access(found.root / "cgroup.procs", os.W_OK):
            return found, f"control groups, version {found.version}, in {found.root}"
        reason = f"{found.root} is not writable: run as root"
    return None, f"{reason}; {otherwise}"


def join(group: Path, pid: int) -> None:
    """Move a process, with all its threads, into a group.

    Raises:
        ProcessLookupError: There is no such process.
    """
    (group / "cgroup.procs").write_text(str(pid))


def write(group: Path, settings: Settings) -> None:
    for name, value in settings:
        (group / name).write_text(value)


def remove_leftovers(controller: Controller, prefix: str) -> list[Path]:
    """Remove groups with a prefix whose owner has ended; return their paths."""
    found = [file for file in controller.root.glob(f"{prefix}-*") if left_over(file.name, prefix)]
    for group in found:
        remove(group, controller.home)
    return sorted(found)


def remove(group: Path, home: Path) -> None:
    """Remove a group, after moving its processes to the group ``home``, without its limits."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            for pid in _words(group / "cgroup.procs"):
                with contextlib.suppress(ProcessLookupError):
                    (home / "cgroup.procs").write_text(pid)
            group.rmdir()
            return
        except FileNotFoundError:  # another run removed the same leftover
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _words(file: Path) -> list[str]:
    return file.read_text().split()
