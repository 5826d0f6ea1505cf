"""Emulate a cluster file on one machine: hosts, speeds, links, memory.

    with Testbed(load_cluster("mixed.yaml")) as bed:
        results = bed.spawn(train, args=(plan,), on_report=print)
        code = bed.run(["python", "train.py"])

:mod:`~hap.runtime.testbed.quotas` limits speeds and memory, :mod:`~hap.runtime.testbed.network`
limits links, and :mod:`~hap.runtime.testbed.scaling` chooses the factor by which the emulated
cluster is slower than the file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, get_args

from hap.cluster.topology import Cluster
from hap.errors import InputError, Terminated
from hap.runtime.launch import Where, spawn
from hap.runtime.testbed import network as net
from hap.runtime.testbed import ownership
from hap.runtime.testbed.host_commands import run_commands
from hap.runtime.testbed.quotas import Quotas, cpu_quotas, remove_leftovers
from hap.runtime.testbed.scaling import Links, choose_scale, core_flops_per_s, scaled

T = TypeVar("T")

INTERPRETER_BYTES = 384 << 20
"""Added to a device's memory: the memory of Python, torch and hap without any tensor."""

MASTER_PORT = 29500  # free, since rank 0 has its own network namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The emulated host of one rank.

    Attributes:
        rank: The rank.
        device: Name of the emulated device.
        node: Node of that device.
        core: Fraction of a core.
        link_bytes_per_s: Rate of the rank's own link; None if it is not limited.
        uplink_bytes_per_s: Rate of the link that it shares with the other ranks of its node;
            None if there is no such link.
        memory_bytes: Memory limit of the rank's process; None if it is not limited.
    """

    rank: int
    device: str
    node: str
    core: float
    link_bytes_per_s: float | None
    uplink_bytes_per_s: float | None
    memory_bytes: int | None


class Testbed(Where):
    """An emulated host for each device of a cluster, on this machine; a context manager.

    Args:
        cluster: The cluster to emulate.
        cores: Number of cores that the ranks may use together; default: all.
        links: ``scaled``: slower by the same factor as the devices, so that flops per byte are
            those of the file. ``as written``: for a file that was written for slow ranks.
            ``unlimited``: without network namespaces, which needs no root.
        core_flops_per_s: Float32 rate of one core; measured by default.

    Attributes:
        scale: Seconds of the cluster file per second here, at most 1.
        cluster: The cluster with its emulated figures, for a planner.
        hosts: The hosts in rank order.
        pace: Current factor on the fraction of a core of every host: see :meth:`hold`.
        notes: Properties that are not emulated, or only approximately; one sentence each.
    """

    __test__ = False  # pytest would collect a class of this name

    def __init__(
        self,
        cluster: Cluster,
        cores: float | None = None,
        *,
        links: Links = "scaled",
        core_flops_per_s: float | None = None,
    ) -> None:
        if links not in get_args(Links):
            hint = f"known: {', '.join(map(repr, get_args(Links)))}"
            raise InputError(f"links={links!r} is unknown", hint=hint)
        rate = core_flops_per_s or _core_rate()
        self.scale = choose_scale(cluster, cores, rate)
        self.cluster = scaled(cluster, self.scale, links)
        self.notes: tuple[str, ...] = ()
        self.hosts = _hosts(self.cluster, rate, links)
        self.pace = 1.0
        self._limited = links != "unlimited"
        self._stack = contextlib.ExitStack()
        self._name = ""
        self._network: net.HostNetwork | None = None
        self._quotas: Quotas | None = None

    def __enter__(self) -> Self:
        """Start the hosts, after removing leftovers of killed owners.

        Raises:
            HapError: Links shall be limited, but this machine cannot do so.
        """
        if self._name:
            raise InputError("this testbed is up already", hint="make another Testbed")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_orderly_end())
            clean()
            self._name = ownership.new_name()
            if self._limited:
                self._network = stack.enter_context(net.network(self.cluster))
            fractions = [host.core for host in self.hosts]
            memory = [host.memory_bytes for host in self.hosts]
            self._quotas = stack.enter_context(cpu_quotas(fractions, memory_bytes=memory))
            stack.callback(ownership.end_ranks, self._name)  # runs first when the stack closes
            self.notes = _notes(self.cluster, self.hosts, self._quotas, self._limited)
            self._stack = stack.pop_all()
        atexit.register(self.close)  # if the caller never leaves the `with`
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks and remove all resources; a second call does nothing."""
        atexit.unregister(self.close)
        self._stack.close()
        self._network = self._quotas = None

    @property
    def address(self) -> str:  # type: ignore[override]
        return net.SWITCH_ADDRESS if self._network else Where.address

    def inside(self, rank: int | None) -> contextlib.AbstractContextManager[None]:
        """Return a context that moves this thread to a rank's host; None: to the switch."""
        return self._network.inside(rank) if self._network else contextlib.nullcontext()

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return environment variables of a rank; they override those of torchrun."""
        ranks = self.cluster.ranks(self.hosts[rank].node)
        return {
            "LOCAL_RANK": str(ranks.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GLOO_SOCKET_IFNAME": net.INTERFACE if self._network else "lo",
            "CUDA_VISIBLE_DEVICES": "",  # ranks emulate devices on the CPU
            # Hosts have no name servers: torch warns of each address that it cannot resolve.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            ownership.VARIABLE: self._name,
        }

    def started(self, rank: int, pid: int) -> None:
        """Limit the memory of a rank whose process has just begun."""
        self._up().charge(rank, pid)

    def spawn(
        self,
        target: Callable[..., T],
        args: tuple[Any, ...] = (),
        *,
        on_report: Callable[[int, Any], None] | None = None,
        timeout_s: float | None = None,
        limited: bool = True,
    ) -> list[T]:
        """Run ``target(*args)`` on every host; see :func:`hap.runtime.launch.spawn`.

        Speeds are limited after a rank's imports. If not ``limited``, speeds and links are limited
        from the call of :meth:`limit` on, so that a long preparation is fast.
        """
        place = self._up().place if limited else None
        self._limit_links(limited)
        try:
            return spawn(
                target, len(self.hosts), args=args, before_rank=place, on_report=on_report,
                timeout_s=timeout_s, where=self,
            )  # fmt: skip
        finally:
            self._limit_links(True)

    def limit(self, rank: int, pid: int) -> None:
        """Limit the speed of a rank's process from now on, and all links."""
        self._limit_links(True)
        self._up().place(rank, pid)

    def hold(self, slower: float) -> None:
        """Keep the ranks' initial speed on a machine that is now slower by the factor ``slower``.

        A shared or hot machine changes its speed, and the emulated devices do not. So ranks get
        ``slower`` times their initial fraction of a core, as far as cores allow. Without the
        kernel's quotas this does nothing.
        """
        self.pace = self._up().pace(slower)

    def slow(self, rank: int, factor: float) -> None:
        """Make one host slower by a factor from now on."""
        self._up().slow(rank, factor)

    def run(self, command: Sequence[str], *, on_line: Callable[[str], None] = print) -> int:
        """Run a command on every host, with torchrun's variables; it is limited from its start.

        Args:
            command: The program and its arguments.
            on_line: Called with each line that a rank prints, ``[rank] line``.

        Returns:
            0 if all ranks returned 0; else the exit code of the first rank that failed, or 128
            plus the number of the signal that ended it. The other ranks are then ended too.

        Raises:
            InputError: There is no command, or no such program.
        """
        quotas, size = self._up(), len(self.hosts)
        at = net.address(0) if self._network else Where.address
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": at, "MASTER_PORT": str(MASTER_PORT),
                  "OMP_NUM_THREADS": "1"}  # fmt: skip

        def begun(rank: int, pid: int) -> None:
            quotas.charge(rank, pid)
            quotas.place(rank, pid)

        name = ownership.new_name()  # a new name, so that only this run's processes are killed
        environments = [
            {**os.environ, **common, "RANK": str(rank), **self.variables(rank),
             ownership.VARIABLE: name}
            for rank in range(size)
        ]  # fmt: skip
        return run_commands(
            command, environments, self.inside, begun, on_line, lambda: ownership.end_ranks(name)
        )

    def _limit_links(self, limited: bool) -> None:
        if self._network:
            self._network.limit(limited)

    def _up(self) -> Quotas:
        if self._quotas is None:
            raise InputError("the testbed is not up", hint="use it in a `with`")
        return self._quotas


def clean() -> list[str]:
    """Remove the leftovers of testbeds whose owners have ended; starting a testbed does so too.

    Returns:
        A description of each removed process, namespace and control group.
    """
    processes = [f"process {pid}" for pid in ownership.end_strays()]
    spaces = [f"namespace {name}" for name in net.remove_leftovers()]
    return [*processes, *spaces, *(f"control group {path}" for path in remove_leftovers())]


def _core_rate() -> float:
    return core_flops_per_s()


def _hosts(cluster: Cluster, rate: float, links: Links) -> tuple[Host, ...]:
    made = net.pipes(cluster)
    own = {pipe.rank: pipe.bytes_per_s for pipe in made}
    uplinks = {pipe.near_bridge: pipe.bytes_per_s for pipe in made if pipe.rank is None}
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limited = links != "unlimited"

    def host(rank: int) -> Host:
        device = cluster.devices[rank]
        memory = device.memory_bytes + INTERPRETER_BYTES
        bridge = f"node{cluster.nodes.index(device.node)}"
        return Host(
            rank=rank,
            device=device.name,
            node=device.node,
            core=min(1.0, device.flops_per_s["float32"] / rate),
            link_bytes_per_s=own[rank] if limited else None,
            uplink_bytes_per_s=uplinks.get(bridge) if limited else None,
            memory_bytes=memory if memory < machine else None,
        )

    return tuple(map(host, range(cluster.world_size)))


def _notes(
    cluster: Cluster, hosts: Sequence[Host], quotas: Quotas, limited: bool
) -> tuple[str, ...]:
    notes = []
    if not quotas.enforced:
        notes.append(f"speeds are a duty cycle: {quotas.reason}")
    if quotas.uneven:
        notes.append(f"slow ranks run jerkily: {quotas.uneven}")
    if limited:
        notes.append("latency is not emulated: links have this machine's own")
    else:
        notes.append("links are not limited: ranks talk over this machine's loopback")
    large = [host.rank for host in hosts if host.memory_bytes is None]
    if large:
        ranks = ", ".join(map(str, large))
        notes.append(f"memory is not limited on rank {ranks}: this machine has less memory")
    if len(large) < len(hosts) and not quotas.limits_memory:
        notes.append(f"memory: {quotas.memory_reason}")
    return tuple(notes)


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Inside this context, SIGTERM and SIGHUP raise :class:`Terminated`, so ``finally`` runs.

    Does nothing outside of the main thread, and for a signal that the program handles itself.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    ours = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)
                ours.append(number)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
