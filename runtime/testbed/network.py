"""Hosts as network namespaces, joined by links with limited rates.

A rank has its own namespace with a loopback and one interface. All bridges are in one more
namespace, the switch: a core, and a bridge for each node with several ranks. Nothing is created
in the namespace of this process, so that no interface can clash.

    rank 0 --inside-- node0 --between-- core --between-- rank 2      (rank 2: alone on its node)
    rank 1 --inside--/

Every ``--`` is a pair of virtual Ethernet interfaces with a token bucket (``tc ... tbf``) on
each end, so that each direction has its own limit. All traffic that leaves a node shares its
uplink, as does all that enters it. Latency is that of the kernel, about ten microseconds.

Deleting a namespace deletes everything in it, so leftovers are removed by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hap.cluster.topology import Cluster
from hap.errors import HapError, InputError
from hap.runtime.testbed.ownership import left_over, new_name

INTERFACE = "net0"
"""A rank's interface."""

SWITCH_ADDRESS = "10.77.0.1"

_PREFIX = "hap-bed"
_NAMES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000  # from <sched.h>
_PER_SUBNET = 250
_MOST_RANKS = 250 * _PER_SUBNET

# An idle bucket fills up, and its content is sent as an unlimited burst. 2 ms of the rate keeps
# bursts small, and still covers the delay until a busy machine serves the bucket.
_BURST_S = 2e-3
_LEAST_BURST_BYTES = 4_000  # more than two packets
# The kernel forwards packets of a stream in trains. A train that does not fit into the bucket,
# with all its headers, is split, which costs ten times the processor time.
_MOST_TRAIN_BYTES = 65_536
_TRAIN_OF_BURST = 0.9
# The bucket counts frames of 1514 bytes; a cluster file counts the 1448 bytes of data in each.
_FRAME_OF_DATA = 1514 / 1448
_QUEUE_S = 0.02  # queue of a link before packets are lost; ACKs wait in it as well
_LEAST_QUEUE_BYTES = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """A limited link: interface ``near`` in namespace ``where``, ``far`` a port of ``bridge``."""

    near: str
    rank: int | None  # the rank whose namespace contains `near`; None: the switch
    near_bridge: str  # the bridge that has the port `near`; "" in a rank's namespace
    far: str
    bridge: str
    bytes_per_s: float


class HostNetwork:
    """The running, connected namespaces of a cluster's ranks; see :func:`network`."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self._name = name
        self._pipes = pipes(cluster)
        self._limited = False

    def namespace(self, rank: int | None) -> str:
        """Return the name of a rank's namespace (None: the switch), for ``ip netns exec``."""
        return f"{self._name}-{'switch' if rank is None else f'rank{rank}'}"

    def limit(self, limited: bool = True) -> None:
        """Limit all links to their rates; if not ``limited``, remove the limits."""
        if limited == self._limited:
            return
        lines: dict[str, list[str]] = {}
        for pipe in self._pipes:
            ends = (None, pipe.far), (pipe.rank, pipe.near)
            for rank, interface in ends:
                at = f"dev {interface} root"
                line = f"add {at} {tbf(pipe.bytes_per_s)}" if limited else f"del {at}"
                lines.setdefault(self.namespace(rank), []).append(f"qdisc {line}")
        for space, there in lines.items():
            _batch("tc", space, there)
        self._limited = limited

    @contextlib.contextmanager
    def inside(self, rank: int | None) -> Iterator[None]:
        """Move this thread to a namespace: new sockets and processes belong to it."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(descriptor: int) -> None:
            if libc.setns(descriptor, _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), "setns")

        with open("/proc/thread-self/ns/net") as home:
            with open(_NAMES / self.namespace(rank)) as there:
                enter(there.fileno())
            try:
                yield
            finally:
                enter(home.fileno())


def address(rank: int) -> str:
    """Return the IP address of a rank's interface."""
    return f"10.77.{1 + rank // _PER_SUBNET}.{1 + rank % _PER_SUBNET}"


def pipes(cluster: Cluster) -> list[Pipe]:
    """Return the links of a cluster: those of ranks, and uplinks of nodes with several ranks."""
    between = cluster.inter.bandwidth_bytes_per_s
    found: list[Pipe] = []
    for at, node in enumerate(cluster.nodes):
        ranks = cluster.ranks(node)
        inside = cluster.intra[node].bandwidth_bytes_per_s
        own = len(ranks) > 1 and len(cluster.nodes) > 1
        if own:
            found.append(Pipe(near=f"up{at}", rank=None, near_bridge=f"node{at}",
                              far=f"down{at}", bridge="core", bytes_per_s=between))  # fmt: skip
        rate = inside if len(ranks) > 1 else between
        found += [
            Pipe(near=INTERFACE, rank=rank, near_bridge="", far=f"rank{rank}",
                 bridge=f"node{at}" if own else "core", bytes_per_s=rate)
            for rank in ranks
        ]  # fmt: skip
    return found


@contextlib.contextmanager
def network(cluster: Cluster) -> Iterator[HostNetwork]:
    """Create the hosts and links of a cluster; remove them at the end.

    Raises:
        InputError: There are more ranks than addresses.
        HapError: This machine cannot limit links; the message names the reason and a way out.
    """
    if why_not := missing():
        hint = 'links="unlimited" (--links unlimited) emulates speeds alone'
        raise HapError(f"links cannot be limited here: {why_not}", hint=hint)
    if cluster.world_size > _MOST_RANKS:
        raise InputError(
            f"{cluster.world_size} ranks on one machine, and {_MOST_RANKS} are possible",
            hint="use a cluster file with fewer devices",
        )
    made = HostNetwork(f"{_PREFIX}-{new_name()}", cluster)
    spaces = [made.namespace(None), *map(made.namespace, range(cluster.world_size))]
    try:
        _ip("", [f"netns add {space}" for space in spaces])
        for space in spaces:
            _settle(space)
        _join(made, cluster)
        made.limit()
        yield made
    finally:
        _remove(spaces)


_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""Settings that otherwise depend on the machine: bbr pauses each connection every ten seconds to
measure its latency. Every kernel has reno."""

_SETTLE = " && ".join(f"echo {v} > /proc/sys/net/ipv4/{name}" for name, v in _TCP.items())


def _settle(space: str) -> None:
    """Make TCP connections of a namespace behave the same on all machines."""
    command = ["ip", "netns", "exec", space, "sh", "-c", _SETTLE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise HapError(f"cannot set the namespace's TCP settings: {ran.stderr.strip()}")


def missing() -> str:
    """Return the reason why this machine cannot limit links; empty if it can."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    # Root in a container may lack the capability, and a kernel the modules: try in a child.
    trial = "ip link add hap0 type veth peer name hap1 && tc qdisc add dev hap0 root tbf "
    trial += "rate 1mbit burst 4kb limit 64kb && ip link add hap2 type bridge && "
    trial += _SETTLE
    command = ["unshare", "--net", "sh", "-c", trial]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unshare not found: install util-linux"
    return tried.stderr.strip() if tried.returncode else ""


def remove_leftovers() -> list[str]:
    """Remove the namespaces of ended owners; return their names. Without root there are none."""
    if os.geteuid() != 0 or not _NAMES.is_dir():
        return []
    found = sorted(file.name for file in _NAMES.iterdir() if left_over(file.name, _PREFIX))
    _remove(found)
    return found


def _remove(spaces: Sequence[str]) -> None:
    for space in spaces:
        try:
            if (_NAMES / space).exists():
                _ip("", [f"netns delete {space}"])
        except HapError:
            if (_NAMES / space).exists():  # otherwise another run removed the same leftover
                raise


def _join(made: HostNetwork, cluster: Cluster) -> None:
    """Create interfaces, bridges and addresses."""
    switch, links = made.namespace(None), pipes(cluster)
    bridges = sorted({"core"} | {link.bridge for link in links})
    _ip(switch, [line for name in bridges for line in (
        f"link add name {name} type bridge", f"link set dev {name} up")])  # fmt: skip
    _ip(switch, [f"address add {SWITCH_ADDRESS}/16 dev core", "link set dev lo up"])
    for link in links:
        there = "" if link.rank is None else f" netns {made.namespace(link.rank)}"
        train = min(_MOST_TRAIN_BYTES, round(_TRAIN_OF_BURST * _burst(link.bytes_per_s)))
        most = f"gso_max_size {train}"
        lines = [f"link add name {link.far} {most} type veth peer name {link.near} {most}{there}",
                 f"link set dev {link.far} master {link.bridge} up"]  # fmt: skip
        if link.rank is None:
            lines.append(f"link set dev {link.near} master {link.near_bridge} up")
        _ip(switch, lines)
        if link.rank is not None:
            _ip(made.namespace(link.rank), [
                "link set dev lo up",
                f"address add {address(link.rank)}/16 dev {link.near}",
                f"link set dev {link.near} up",
            ])  # fmt: skip


def tbf(bytes_per_s: float) -> str:
    """Return ``tc`` arguments of a link's token bucket; its rate includes headers."""
    bits_per_s = round(bytes_per_s * _FRAME_OF_DATA * 8)
    burst = _burst(bytes_per_s)
    queue = burst + max(_LEAST_QUEUE_BYTES, round(bytes_per_s * _QUEUE_S))
    return f"tbf rate {bits_per_s}bit burst {burst} limit {min(queue, 1 << 30)}"


def _burst(bytes_per_s: float) -> int:
    return min(max(_LEAST_BURST_BYTES, round(bytes_per_s * _BURST_S)), 1 << 24)


def _ip(space: str, lines: Sequence[str]) -> None:
    _batch("ip", space, lines)


def _batch(tool: str, space: str, lines: Sequence[str]) -> None:
    """Run command lines of a tool in a namespace, in one process.

    Raises:
        HapError: A line failed; the message has the tool's output.
    """
    command = [tool, *(("-n", space) if space else ()), "-batch", "-"]
    ran = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise HapError(f"{' '.join(command)}: {ran.stderr.strip()}", hint=f"of: {lines}")
