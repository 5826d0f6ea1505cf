"""Unlike CPUs on one machine: each rank gets a fraction of a core, enforced by the kernel.

    with cpu_quotas([0.8, 0.8, 0.2, 0.2]) as quotas:
        spawn(train, 4, before_rank=quotas.place)

Each rank gets a control group (v1 ``cpu.cfs_quota_us`` or v2 ``cpu.max``) of its own, with a
period of 10 ms, so that steps are smooth. That needs root and a writable cpu controller.
Without them ``quotas.enforced`` is False, ``quotas.reason`` says why, and a duty cycle stands
in: a helper process per rank stops and continues it, period 50 ms. The ratio of speeds is
then right as well, with two differences to know of: a rank pays for the time that it spends
waiting, since its clock runs on while it sleeps, and while stopped it does not serve the network.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from hap.errors import InputError

_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000  # the kernel takes no less: smaller fractions get a longer period
_LONGEST_PERIOD_US = 1_000_000
_CYCLE_S = 0.05
_PREFIX = "hap-quota"  # followed by the owner's pid and start time, and a serial number
_PATIENCE_S = 5.0  # a group stays busy for a moment after its last process has ended

_MOUNTS = Path("/proc/self/mountinfo")
_serial = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A usable cpu controller: where groups are made, and the group this process is in."""

    version: int
    root: Path
    home: Path


class Quotas:
    """What :func:`cpu_quotas` yields; ``place`` fits ``before_rank`` of ``spawn``."""

    def __init__(self, fractions: Sequence[float], groups: list[Path], reason: str) -> None:
        self.fractions = tuple(fractions)
        self.reason = reason
        self._groups = groups
        self._helpers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    @property
    def enforced(self) -> bool:
        """Whether the kernel's quotas do it, rather than the duty cycle."""
        return bool(self._groups)

    def place(self, rank: int, pid: int) -> None:
        """Give a process, with all its threads, the share of ``rank`` from now on."""
        if self.enforced:
            (self._groups[rank] / "cgroup.procs").write_text(str(pid))
            return
        os.kill(pid, 0)  # ProcessLookupError, as above, if there is none
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_duty_cycle, args=(pid, self.fractions[rank], theirs))
        process.start()
        theirs.close()
        self._helpers.append((process, ours))
        ours.recv()  # it has begun

    def _stop_helpers(self) -> None:
        for process, pipe in self._helpers:
            pipe.close()
            process.join()


@contextlib.contextmanager
def cpu_quotas(fractions: Sequence[float]) -> Iterator[Quotas]:
    """Make one CPU quota per rank, as fractions of one core; take them away at the end.

    Processes that are still there at the end run on unthrottled. Groups that a killed run of
    this function left behind are removed first. Linux only.

    Raises:
        InputError: A fraction outside (0, 1], or more in sum than there are cores: the ranks
            would then slow each other, and their speeds not be those asked for.
    """
    cores = len(os.sched_getaffinity(0))
    least = _LEAST_QUOTA_US / _LONGEST_PERIOD_US
    if not fractions or not all(least <= fraction <= 1 for fraction in fractions):
        hint = f"give each rank between {least} and 1 of a core; one rank has one thread"
        raise InputError(f"cannot give ranks {list(fractions)} of a core", hint=hint)
    if sum(fractions) > cores + 1e-9:
        what = f"{sum(fractions):g} cores asked for, and this process may use {cores}"
        raise InputError(what, hint="scale all fractions down: only their ratio matters")
    controller, reason = find_controller(_MOUNTS.read_text(), Path("/proc/self/cgroup").read_text())
    groups: list[Path] = []
    quotas = Quotas(fractions, groups, reason)
    try:
        if controller is not None:
            _remove_leftovers(controller)
            owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"
            for fraction in fractions:
                group = controller.root / f"{owner}-{next(_serial)}"
                group.mkdir()
                groups.append(group)
                for name, value in quota_settings(controller.version, fraction):
                    (group / name).write_text(value)
        yield quotas
    finally:
        quotas._stop_helpers()
        for group in groups:
            assert controller is not None
            _remove(group, controller.home)


def find_controller(mounts: str, memberships: str) -> tuple[Controller | None, str]:
    """The cpu controller to use and why, or None and why not.

    Args:
        mounts: The text of ``/proc/self/mountinfo``.
        memberships: The text of ``/proc/self/cgroup``.
    """
    own = {}  # controller name, "" for v2 -> path of this process's group
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    reason = "no cpu controller of control groups is mounted"
    for line in mounts.splitlines():
        left, right = line.split(" - ", 1)
        mount = Path(left.split()[4])
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup" and "cpu" in options.split(","):
            # In a container the path may be seen from outside; the mount is then the home.
            home = mount / own.get("cpu", "/").lstrip("/")
            home = home if home.is_dir() else mount
            found = Controller(version=1, root=home, home=home)
        elif kind == "cgroup2" and "cpu" in _words(mount / "cgroup.controllers"):
            if "cpu" not in _words(mount / "cgroup.subtree_control"):
                reason = f"the cpu controller is not enabled in {mount}/cgroup.subtree_control"
                continue
            home = mount / own.get("", "/").lstrip("/")
            found = Controller(version=2, root=mount, home=home if home.is_dir() else mount)
        else:
            continue
        if os.access(found.root, os.W_OK) and os.access(found.root / "cgroup.procs", os.W_OK):
            return found, f"quotas of control groups, version {found.version}, in {found.root}"
        reason = f"{found.root} is not writable: run as root"
    return None, f"{reason}; ranks are stopped and continued instead"


def quota_settings(version: int, fraction: float) -> list[tuple[str, str]]:
    """The (file, text) pairs that limit a new group to a fraction of one core, in order."""
    period_us = max(_PERIOD_US, round(_LEAST_QUOTA_US / fraction))
    quota_us = max(_LEAST_QUOTA_US, round(fraction * period_us))
    if version == 2:
        return [("cpu.max", f"{quota_us} {period_us}")]
    return [("cpu.cfs_period_us", str(period_us)), ("cpu.cfs_quota_us", str(quota_us))]


def _remove_leftovers(controller: Controller) -> None:
    """Remove the groups whose owner has ended; its pid may have gone to another process since."""
    for group in controller.root.glob(f"{_PREFIX}-*"):
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+)-\d+", group.name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _remove(group, controller.home)


def _remove(group: Path, home: Path) -> None:
    """Remove a group; processes in it go home first, where their quota ends."""
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


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _duty_cycle(pid: int, fraction: float, owner: Connection) -> None:
    """Let a process run for a fraction of each cycle, until the owner closes the pipe or dies.

    A process of its own: it outlives a killed owner for long enough to leave nothing stopped,
    and a busy owner does not disturb its clock. It holds a pidfd, which no later process inherits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        process = os.pidfd_open(pid)
        try:
            owner.send("begun")
            while True:
                signal.pidfd_send_signal(process, signal.SIGCONT)
                if owner.poll(fraction * _CYCLE_S):
                    return
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                if owner.poll((1 - fraction) * _CYCLE_S):
                    return
        finally:
            signal.pidfd_send_signal(process, signal.SIGCONT)
