"""CPU quotas: each rank gets a fraction of a core.

    with cpu_quotas([0.8, 0.8, 0.2, 0.2]) as quotas:
        spawn(train, 4, before_rank=quotas.place)

Each rank gets a control group (v1 ``cpu.cfs_quota_us`` or v2 ``cpu.max``) with a period of 10 ms,
so that steps are smooth, and a weight above that of other work. A helper on each core
(:mod:`~hap.runtime.testbed.quota_tick`) makes the kernel check quotas often. This needs root and a
writable cpu controller. Without them ``quotas.enforced`` is False, ``quotas.reason`` says why, and
the fallback is a duty cycle: a helper process per rank stops and continues it, with a period of
50 ms. The ratio of speeds is still right, with two differences: time in which a rank waits counts
against its share, and a stopped rank does not serve the network.

The memory controller can limit memory as well; there is no fallback for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from hap.errors import InputError
from hap.runtime.testbed import cgroups, ownership
from hap.runtime.testbed.cgroups import Controller, Settings
from hap.runtime.testbed.quota_tick import beat

_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000  # the kernel's minimum: smaller fractions get a longer period
_LONGEST_PERIOD_US = 1_000_000
_WEIGHT = 20  # relative to an ordinary process or group
_CYCLE_S = 0.05
_PREFIX = "hap-quota"

_MOUNTS = Path("/proc/self/mountinfo")


class Quotas:
    """The result of :func:`cpu_quotas`; ``place`` fits ``before_rank`` of ``spawn``.

    Attributes:
        fractions: Fraction of one core, by rank.
        reason: The kernel's mechanism that enforces them, or why there is none.
        memory_reason: Likewise for memory limits.
        uneven: Why ranks run and pause in longer intervals than necessary; empty if they do not.
    """

    def __init__(self, fractions: Sequence[float], reason: str, memory_reason: str) -> None:
        self.fractions = tuple(fractions)
        self.reason = reason
        self.memory_reason = memory_reason
        self.uneven = ""
        self._version = 0
        self._cpu: dict[int, tuple[Path, Settings]] = {}
        self._memory: dict[int, Path] = {}
        self._helpers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    @property
    def enforced(self) -> bool:
        """Whether the kernel enforces the fractions; otherwise a duty cycle does."""
        return bool(self._cpu)

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel limits the memory of at least one rank."""
        return bool(self._memory)

    def place(self, rank: int, pid: int) -> None:
        """Limit a process, with all its threads, to the fraction of ``rank`` from now on."""
        if self.enforced:
            group, settings = self._cpu[rank]
            cgroups.write(group, settings)
            cgroups.join(group, pid)
            return
        os.kill(pid, 0)  # raises ProcessLookupError if there is no such process, as above
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_duty_cycle, args=(pid, self.fractions[rank], theirs))
        process.start()
        theirs.close()
        self._helpers.append((process, ours))
        ours.recv()  # it has begun

    def pace(self, factor: float) -> float:
        """Give every rank ``factor`` times its fraction from now on, as far as cores allow.

        Returns:
            The factor in effect; always 1 if the kernel does not enforce fractions.
        """
        if not self.enforced:
            return 1.0
        cores = len(os.sched_getaffinity(0))
        factor = min(factor, 1 / max(self.fractions), cores / sum(self.fractions))
        for rank, (group, _) in self._cpu.items():
            settings = quota_settings(self._version, self.fractions[rank] * factor)
            self._cpu[rank] = group, settings
            cgroups.write(group, settings)
        return factor

    def slow(self, rank: int, factor: float) -> None:
        """Divide one rank's fraction by a factor from now on.

        Raises:
            InputError: the kernel does not enforce fractions here.
        """
        if not self.enforced:
            raise InputError("a rank cannot be slowed by a duty cycle", hint="run it with cgroups")
        group, _ = self._cpu[rank]
        settings = quota_settings(self._version, self.fractions[rank] / factor)
        self._cpu[rank] = group, settings
        cgroups.write(group, settings)

    def charge(self, rank: int, pid: int) -> None:
        """Limit the memory that a process allocates from now on to that of ``rank``.

        Memory that it already holds is not counted: call this for a process that has just begun.
        Its speed is unchanged until :meth:`place`.
        """
        if rank in self._memory:
            cgroups.join(self._memory[rank], pid)

    def _stop_helpers(self) -> None:
        for process, pipe in self._helpers:
            pipe.close()
            process.join()


@contextlib.contextmanager
def cpu_quotas(
    fractions: Sequence[float], *, memory_bytes: Sequence[int | None] = ()
) -> Iterator[Quotas]:
    """Create one CPU quota per rank, as a fraction of one core; remove them at the end.

    Processes that still exist at the end continue without limits. Groups left behind by a killed
    run of this function are removed first. Linux only.

    Args:
        fractions: Fraction of one core, by rank.
        memory_bytes: Memory limit of a process, by rank; None for no limit. The kernel kills a
            process that exceeds it.

    Raises:
        InputError: A fraction is outside (0, 1], or their sum exceeds the number of cores: the
            ranks would slow each other, and their speeds would not be the requested ones.
    """
    _check(fractions)
    cpu, reason = _controller("cpu", "ranks are stopped and continued instead")
    memory, memory_reason = _controller("memory", "memory is not limited")
    quotas = Quotas(fractions, reason, memory_reason)
    name = f"{_PREFIX}-{ownership.new_name()}"
    made: list[tuple[Path, Controller]] = []
    beats = contextlib.ExitStack()

    def group(controller: Controller, rank: int, settings: Settings) -> Path:
        path = controller.root / f"{name}-{rank}"
        if (path, controller) not in made:  # version 2 has both controllers in one group
            path.mkdir()
            made.append((path, controller))
        cgroups.write(path, settings)
        return path

    try:
        remove_leftovers()
        if cpu is not None:
            quotas._version = cpu.version
            for rank, fraction in enumerate(fractions):
                settings = quota_settings(cpu.version, fraction)
                quotas._cpu[rank] = (group(cpu, rank, weight_settings(cpu.version)), settings)
            try:
                for core in sorted(os.sched_getaffinity(0)):
                    beats.enter_context(beat(core))
            except PermissionError as error:
                quotas.uneven = str(error)
        for rank, limit in enumerate(memory_bytes):
            if memory is not None and limit is not None:
                settings = memory_settings(memory.version, limit)
                quotas._memory[rank] = group(memory, rank, settings)
        yield quotas
    finally:
        beats.close()
        quotas._stop_helpers()
        for path, controller in made:
            cgroups.remove(path, controller.home)


def remove_leftovers() -> list[Path]:
    """Remove groups left behind by killed runs of :func:`cpu_quotas`; return their paths."""
    found = (_controller(name, "")[0] for name in ("cpu", "memory"))
    return [
        path for one in found if one is not None for path in cgroups.remove_leftovers(one, _PREFIX)
    ]


def quota_settings(version: int, fraction: float) -> list[tuple[str, str]]:
    """Return (file, text) pairs, in order, that limit a new group to a fraction of one core."""
    period_us = max(_PERIOD_US, round(_LEAST_QUOTA_US / fraction))
    quota_us = max(_LEAST_QUOTA_US, round(fraction * period_us))
    if version == 2:
        return [("cpu.max", f"{quota_us} {period_us}")]
    return [("cpu.cfs_period_us", str(period_us)), ("cpu.cfs_quota_us", str(quota_us))]


def weight_settings(version: int) -> list[tuple[str, str]]:
    """Return the pairs that let a group use all of its quota in competition with other work."""
    return [("cpu.weight", str(_WEIGHT * 100)) if version == 2 else
            ("cpu.shares", str(_WEIGHT * 1024))]  # fmt: skip


def memory_settings(version: int, limit_bytes: int) -> list[tuple[str, str]]:
    """Return the pairs that limit the memory of a group."""
    if version == 2:
        return [("memory.max", str(limit_bytes))]
    return [("memory.limit_in_bytes", str(limit_bytes))]


def _check(fractions: Sequence[float]) -> None:
    cores = len(os.sched_getaffinity(0))
    least = _LEAST_QUOTA_US / _LONGEST_PERIOD_US
    if not fractions or not all(least <= fraction <= 1 for fraction in fractions):
        hint = f"give each rank between {least} and 1 of a core; one rank has one thread"
        raise InputError(f"cannot give ranks {list(fractions)} of a core", hint=hint)
    if sum(fractions) > cores + 1e-9:
        what = f"{sum(fractions):g} cores asked for, and this process may use {cores}"
        raise InputError(what, hint="scale all fractions down: only their ratio matters")


def _controller(name: str, otherwise: str) -> tuple[Controller | None, str]:
    memberships = Path("/proc/self/cgroup").read_text()
    return cgroups.find_controller(name, _MOUNTS.read_text(), memberships, otherwise)


def _duty_cycle(pid: int, fraction: float, parent: Connection) -> None:
    """Let a process run for a fraction of each cycle, until the owner closes the pipe or dies.

    This runs in its own process: it outlives a killed owner long enough to continue the stopped
    process, and a busy owner does not delay it. A pidfd never refers to a later process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        process = os.pidfd_open(pid)
        try:
            parent.send("begun")
            while True:
                signal.pidfd_send_signal(process, signal.SIGCONT)
                if parent.poll(fraction * _CYCLE_S):
                    return
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                if parent.poll((1 - fraction) * _CYCLE_S):
                    return
        finally:
            signal.pidfd_send_signal(process, signal.SIGCONT)
