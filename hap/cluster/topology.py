"""The cluster: all devices in rank order, and the links between them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from hap.cluster.device import Device
from hap.cluster.link import Collectives, Link, MeasuredSet, check_collectives, each_link
from hap.errors import ClusterError
from hap.units import format_bandwidth

MOST_DEVICES = 16_384
"""Most devices of a cluster; a file with more is a mistake, and would exhaust the memory."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All devices in rank order, and the links between them.

    Attributes:
        name: A name for people.
        devices: One device per rank.
        intra: Node -> the link between two devices of that node.
        inter: Node -> its adapter, shared by all traffic that leaves or enters the node.
        collectives: Measured links of single implementations among all devices, which replace
            the ones above. Implementations without an entry use those.
        among: The same among some of the devices alone.
    """

    name: str
    devices: tuple[Device, ...]
    intra: Mapping[str, Link] = field(hash=False)
    inter: Link
    collectives: Collectives = field(default_factory=dict, hash=False)
    among: tuple[MeasuredSet, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError("the cluster has no devices", hint="give at least one node a GPU")
        twice = [name for name, n in Counter(d.name for d in self.devices).items() if n > 1]
        if twice:
            raise ClusterError(f"two devices are named {twice[0]}", hint="rename a node")
        missing = [node for node in self.nodes if node not in self.intra]
        if missing:
            raise ClusterError(f"node {missing[0]} has no link between its devices")
        check_collectives(self.collectives)

    def measured(self, kind: str, implementation: str) -> Mapping[str, Link]:
        """Return level -> the effective link of one implementation of a collective among these
        devices; empty if it was not measured.

        If it was not measured among exactly these, it is that of the smallest measured set which
        contains them: the slowest of a set decides when all have answered.
        """
        for links in self._measured_sets():
            if levels := links.get(kind, {}).get(implementation):
                return levels
        return {}

    def _measured_sets(self) -> list[Collectives]:
        """Return the collectives of the sets that contain these devices, the smallest set first."""
        mine = {device.name for device in self.devices}
        holding = [each for each in self.among if mine <= each.devices]
        holding.sort(key=lambda each: len(each.devices))
        return [*(each.links for each in holding), self.collectives]

    @property
    def collectives_from(self) -> str:
        """How the figures of collectives came about; empty if none was measured."""
        mine = {device.name for device in self.devices}
        if any(each.devices == mine for each in self.among):
            return "measured among these devices"
        if larger := [len(each.devices) for each in self.among if mine < each.devices]:
            return f"derived by the link model from those among {min(larger)} devices"
        return "measured among all devices of the file" if self.collectives else ""

    def seen_by(self, kind: str, implementation: str) -> Self:
        """Return the cluster with the effective links of one implementation of a collective."""
        levels = self.measured(kind, implementation)
        if not levels:
            return self
        inside = levels.get("inside")
        return replace(
            self,
            intra=dict.fromkeys(self.intra, inside) if inside else self.intra,
            inter=levels.get("between", self.inter),
            collectives={},
            among=(),
        )

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machines, in the order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    def ranks(self, node: str) -> tuple[int, ...]:
        """Return the ranks of a node."""
        return tuple(rank for rank, device in enumerate(self.devices) if device.node == node)

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each machine; empty if the ranks of some machine are not consecutive."""
        runs = [len([*run]) for _, run in itertools.groupby(d.node for d in self.devices)]
        return tuple(runs) if len(runs) == len(self.nodes) else ()

    def types(self) -> tuple[tuple[int, ...], ...]:
        """Ranks grouped by equal figures, ignoring the node; groups by their first rank."""
        groups: dict[object, list[int]] = {}
        for rank, device in enumerate(self.devices):
            groups.setdefault(device.figures, []).append(rank)
        return tuple(map(tuple, groups.values()))

    def machine_types(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of one machine of each type: machines with the same figures are of one type."""
        found: dict[object, tuple[int, ...]] = {}
        for node in self.nodes:
            ranks = self.ranks(node)
            found.setdefault(tuple(self.devices[r].figures for r in ranks), ranks)
        return tuple(found.values())

    def without(self, rank: int) -> Self:
        """Return the cluster without one device; the ranks above it move down by one."""
        self._check_rank(rank)
        return self._keep(self.devices[:rank] + self.devices[rank + 1 :])

    def only(self, rank: int) -> Self:
        """Return the cluster of one device alone."""
        self._check_rank(rank)
        return self._keep((self.devices[rank],))

    def keep(self, ranks: Sequence[int]) -> Self:
        """Return a part of the cluster, with its ranks renumbered in their order."""
        for rank in ranks:
            self._check_rank(rank)
        return self._keep(tuple(self.devices[rank] for rank in ranks))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ClusterError(
                f"there is no rank {rank}", hint=f"ranks are 0..{self.world_size - 1}"
            )

    def _keep(self, devices: tuple[Device, ...]) -> Self:
        nodes = {device.node for device in devices}
        intra = {node: link for node, link in self.intra.items() if node in nodes}
        return replace(self, devices=devices, intra=intra)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all that a plan depends on: neither the title nor provenance."""
        return digest_of(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; inverse of :meth:`from_dict`."""
        plain: dict[str, Any] = {
            "name": self.name,
            "devices": [device.to_dict() for device in self.devices],
            "intra": {node: _plain(node, link) for node, link in self.intra.items()},
            "inter": _plain("between", self.inter),
        }
        if self.collectives:
            plain["collectives"] = each_link(self.collectives, _plain)
        if self.among:
            plain["among"] = [
                {"devices": sorted(each.devices), "collectives": each_link(each.links, _plain)}
                for each in self.among
            ]
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the data of :meth:`to_dict`.

        Raises:
            ClusterError: A figure is missing, unknown, of another type, or out of range.
        """
        try:
            return cls(
                name=str(data["name"]),
                devices=tuple(map(Device.from_dict, data["devices"])),
                intra={node: Link(**link) for node, link in data["intra"].items()},
                inter=Link(**data["inter"]),
                collectives=each_link(data.get("collectives", {}), _read),
                among=tuple(
                    MeasuredSet(frozenset(each["devices"]), each_link(each["collectives"], _read))
                    for each in data.get("among", ())
                ),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ClusterError(
                f"the stored cluster is damaged: {error!r}", hint="make the plan again"
            ) from error

    def __str__(self) -> str:
        """``hap-testbed: 16 V100-16 + 48 P100 on 8 nodes, 1.3 GB/s between``."""
        kinds = Counter(device.kind for device in self.devices)
        text = f"{self.name}: " + " + ".join(f"{n} {kind}" for kind, n in kinds.items())
        if len(self.nodes) == 1:
            return f"{text} on 1 node"
        between = format_bandwidth(self.inter.bandwidth_bytes_per_s)
        return f"{text} on {len(self.nodes)} nodes, {between} between"


def check_size(devices: int, where: str) -> None:
    """Raise ``ClusterError`` if a file asks for more than :data:`MOST_DEVICES`."""
    if devices > MOST_DEVICES:
        raise ClusterError(
            f"{devices:,} devices, but hap plans for {MOST_DEVICES:,} at most",
            where=where,
            hint="describe one replica of the cluster, or fewer devices",
        )


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a cluster's plain data, without its title and provenance.

    The data omit figures with their defaults, so that a new figure leaves the digests of clusters
    without it unchanged.
    """
    kept = _without_sources({key: value for key, value in content.items() if key != "name"})
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_sources(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _without_sources(value) for key, value in data.items() if key != "source"}
    return [_without_sources(entry) for entry in data] if isinstance(data, list) else data


def _plain(level: str, link: Link) -> dict[str, Any]:
    """Return a level's link as plain data for JSON, without default values."""
    values = {f.name: getattr(link, f.name) for f in fields(link)}
    return {f.name: values[f.name] for f in fields(link) if values[f.name] != f.default}


def _read(level: str, data: Mapping[str, Any]) -> Link:
    return Link(**data)
