"""The processes that a launcher started say which devices they are, and join in the plan's order.

torchrun numbers machines as they come, and after a loss with other numbers than before. So a process
finds its device by the name of its machine and its place there, not by its rank.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hap.cluster.topology import Cluster
from hap.errors import InputError
from hap.runtime.launch import World, env_int, join_group
from hap.runtime.peer_errors import meeting_told

NODE = "HAP_NODE"
"""Environment variable: the machine's name in the cluster file, if it is not its host name."""

_GOODBYE = timedelta(minutes=1)
"""The longest time for which the process that serves the store waits for the others' end."""

_WAIT = timedelta(hours=1)
"""The longest time that one process plans while the others wait for it."""

_LOOK_S = 1.0
"""Seconds between two looks for what may be told in days."""


def own_device(cluster: Cluster) -> str:
    """Return the name of this process's device.

    Raises:
        InputError: the cluster has no such machine, or fewer devices there.
    """
    host = socket.gethostname()
    named = [os.environ[NODE]] if NODE in os.environ else [host, host.partition(".")[0]]
    node = next((name for name in named if name in cluster.nodes), None)
    if node is None:
        raise InputError(
            f"the plan has no machine {named[0]!r}, only {', '.join(cluster.nodes)}",
            hint=f"set {NODE} to this machine's name in the cluster file",
        )
    ranks, place = cluster.ranks(node), env_int("LOCAL_RANK")
    if place >= len(ranks):
        raise InputError(
            f"process {place} of {node!r} has no device: the plan has {len(ranks)} there",
            hint=f"start torchrun with --nproc-per-node={len(ranks)}",
        )
    return cluster.devices[ranks[place]].name


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The processes of one start.

    Attributes:
        store: shared by all.
        names: the devices that are here, in the order of the cluster.
        own: this process's device.
    """

    store: Store
    names: tuple[str, ...]
    own: str

    @property
    def first(self) -> bool:
        """Is this the process that decides for all?"""
        return self.own == self.names[0]

    def connection(self) -> Store:
        """Return another connection to the store, for another thread."""
        return connect()

    def tell(self, key: str, text: str) -> None:
        """Set what the others :meth:`hear`."""
        self.store.set(key, text)

    def hear(self, key: str) -> str:
        """Wait for what another process tells, and return it."""
        self.store.wait([key], _WAIT)
        return str(self.store.get(key).decode())

    def hear_at_last(self, key: str) -> str:
        """Wait for what another process tells, however long it takes; heartbeats notice its loss."""
        while not self.store.check([key]):
            time.sleep(_LOOK_S)
        return self.hear(key)

    def leave(self) -> None:
        """Wait until all have come to their end: one of them serves the store."""
        self.store.set(f"left/{self.own}", "")
        if env_int("RANK") == 0:
            self.store.wait([f"left/{name}" for name in self.names], _GOODBYE)

    def join(self, names: Sequence[str], backend: str | None = None) -> World:
        """Join the process group of some of the devices, numbered in their order."""
        group = PrefixStore("group", self.store)
        return join_group(
            names.index(self.own), len(names), env_int("LOCAL_RANK"), backend, group,
            devices=self.names, own=self.own,
        )  # fmt: skip


def meet(cluster: Cluster) -> Meeting:
    """Meet all processes that the launcher started.

    Raises:
        InputError: two processes are the same device, or one is none of the cluster's.
    """
    size, own = env_int("WORLD_SIZE"), own_device(cluster)
    store = connect(env_int("RANK") == 0)
    store.set(f"device/{env_int('RANK')}", own)
    here = [store.get(f"device/{rank}").decode() for rank in range(size)]
    twice = next((name for name in here if here.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"two processes have the device {twice}",
            hint=f"give each machine a name of its own in {NODE}",
        )
    names = tuple(d.name for d in cluster.devices if d.name in here)
    return Meeting(store=store, names=names, own=own)


def connect(serves: bool = False) -> Store:
    """Connect to the launcher's store, or to one that the first process serves."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with meeting_told():
        made = TCPStore(
            os.environ["MASTER_ADDR"], env_int("MASTER_PORT"),
            is_master=serves and not agents, wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    return PrefixStore("hap", made)
