"""CPU quotas: each rank gets a fraction of a core.

    with cpu_quotas([0.8, 0.8, 0.2, 0.2]) as quotas:
        spawn(train, 4, before_rank=quotas.place)

Each rank gets a control group (v1 ``cpu.cfs_quota_us`` or v2 ``cpu.max``) of its own, with a
period of 10 ms, so that steps are smooth, and a weight that puts it before other work; cores
:mod:`~hap.runtime.testbed.quota_tick`, so that it is not exceeded for long before the kernel looks. That
needs root and a writable cpu controller. Without them ``quotas.enforced`` is False,
``quotas.reason`` says why, and a duty cycle stands in: a helper process per rank stops and
continues it, period 50 ms. The ratio of speeds is then right as well, with two differences to
know of: a rank pays for the time that it spends waiting, since its clock runs on while it
sleeps, and while stopped it does not serve the network.

Memory can be limited as well, through the memory controller; there is no stand-in for it.
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
_LEAST_QUOTA_US = 1_000  # the kernel takes no less: smaller fractions get a longer period
_LONGEST_PERIOD_US = 1_000_000
_WEIGHT = 20  # times that of an ordinary process or group
_CYCLE_S = 0.05
_PREFIX = "hap-quota"

_MOUNTS = Path("/proc/self/mountinfo")


class Quotas:
    """The result of :func:`cpu_quotas`; ``place`` fits ``before_rank`` of ``spawn``.

    Attributes:
        fractions: Of one core, by rank.
        reason: The mechanism that enforces them, or why nothing in the kernel does.
        memory_reason: Likewise for limits on memory.
        uneven: Why ranks run, and stand still, for longer at a time than need be; else empty.
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
        """Whether the kernel's quotas do it, rather than the duty cycle."""
        return bool(self._cpu)

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel limits the memory of some rank."""
        return bool(self._memory)

    def place(self, rank: int, pid: int) -> None:
        """Give a process, with all its threads, the share of ``rank`` from now on."""
        if self.enforced:
            group, settings = self._cpu[rank]
            cgroups.write(group, settings)
            cgroups.join(group, pid)
            return
        os.kill(pid, 0)  # ProcessLookupError, as above, if there is none
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_duty_cycle, args=(pid, self.fractions[rank], theirs))
        process.start()
        theirs.close()
        self._helpers.append((process, ours))
        ours.recv()  # it has begun

    def pace(self, factor: float) -> float:
        """Give every rank ``factor`` times its fraction from now on, or as much of that as there is.

        Returns:
            The factor that they have; always 1 where the kernel does not enforce fractions.
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

    def charge(self, rank: int, pid: int) -> None:
        """Limit the memory that a process takes from now on to that of ``rank``.

        Memory that it holds already is not counted: call this in a process that has just begun.
        Its speed stays as it is until :meth:`place`.
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
    """Make one CPU quota per rank, as fractions of one core; take them away at the end.

    Processes that are still there at the end run on unthrottled. Groups that a killed run of
    this function left behind are removed first. Linux only.

    Args:
        fractions: Of one core, by rank.
        memory_bytes: The most that a process may hold, by rank; None for no limit. A process
            that asks for more is killed by the kernel.

    Raises:
        InputError: A fraction outside (0, 1], or more in sum than there are cores: the ranks
            would then slow each other, and their speeds not be those asked for.
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
    """Remove the groups that killed runs of :func:`cpu_quotas` left behind, and say which."""
    found = (_controller(name, "")[0] for name in ("cpu", "memory"))
    return [
        path for one in found if one is not None for path in cgroups.remove_leftovers(one, _PREFIX)
    ]


def quota_settings(version: int, fraction: float) -> list[tuple[str, str]]:
    """The (file, text) pairs that limit a new group to a fraction of one core, in order."""
    period_us = max(_PERIOD_US, round(_LEAST_QUOTA_US / fraction))
    quota_us = max(_LEAST_QUOTA_US, round(fraction * period_us))
    if version == 2:
        return [("cpu.max", f"{quota_us} {period_us}")]
    return [("cpu.cfs_period_us", str(period_us)), ("cpu.cfs_quota_us", str(quota_us))]


def weight_settings(version: int) -> list[tuple[str, str]]:
    """The pairs that let a group's quota be used up although other work wants the core."""
    return [("cpu.weight", str(_WEIGHT * 100)) if version == 2 else
            ("cpu.shares", str(_WEIGHT * 1024))]  # fmt: skip


def memory_settings(version: int, limit_bytes: int) -> list[tuple[str, str]]:
    """The pairs that limit the memory of a group."""
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

    A process of its own: it outlives a killed owner for long enough to leave nothing stopped,
    and a busy owner does not disturb its clock. It holds a pidfd, which no later process inherits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
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
