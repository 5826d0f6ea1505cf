"""What the hardware can do: devices, the links between them, and where each figure comes from.

Pure data with one formula, the roofline of :meth:`Device.seconds`. The figures are *effective*
rates, reached by real layers, not the peaks of a datasheet. Files are read by
:mod:`hap.cluster_file`, so that importing this module costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from hap.errors import ClusterError
from hap.units import format_bandwidth

# How a dtype without a figure of its own is computed. A GPU without bfloat16 units emulates
# them in float32; integers and booleans run on the ordinary (non-tensor) units.
_STAND_IN: Final[Mapping[str, str]] = {
    "bfloat16": "float32",
    "float16": "float32",
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
    "complex64": "float32",
    "complex128": "float64",
}


PRODUCTS: Final = ("matmul", "conv", "conv_backward", "attention", "attention_backward")
"""Kinds of work that run on the units for matrix products, at the rate of their dtype."""

ELEMENTWISE: Final = ("math", "tanh", "loss", "reduce", "pool", "random", "update")
"""Kinds of work that may take longer than their memory traffic: functions such as ``exp``,
losses, sums, pooling, random masks and the optimizer's step. They count elements; see
:mod:`hap.synthesizer.work`."""

# A kind without an efficiency of its own runs like its more general one.
_GENERAL: Final[Mapping[str, str]] = {
    "conv_backward": "conv",
    "attention_backward": "attention",
    "tanh": "math",
    "loss": "math",
}


class Work(NamedTuple):
    """One operator's work, or that of one local shard of it."""

    kind: str  # one of PRODUCTS or ELEMENTWISE, or 'memory'
    dtype: str  # 'float32', 'float16', 'bfloat16', 'float64', 'int64', ...
    flops: float  # a multiplication and an addition count as two
    bytes: float  # read from and written to the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's accelerator (or share of a CPU).

    Attributes:
        name: Unique, ``node:index``.
        kind: Name in the catalogue; ``cpu`` for a processor.
        node: The machine it sits in.
        memory_bytes: What a plan may use.
        flops_per_s: Achieved rate of large matrix products, per dtype.
        memory_bytes_per_s: Achieved rate of operators that only move data.
        launch_s: Constant cost of one operator.
        efficiency: Rate of another kind of work, as a fraction of ``flops_per_s``; for example
            ``{"attention": 0.5, "conv": 0.8}``. A kind that is absent runs like its more general
            one, or at the full rate: elementwise work then takes what its memory traffic does.
        operand_bytes_per_s: Rate at which products take in and give out their tensors, which adds to
            the time of their arithmetic; thin products are slower for it. Infinite where arithmetic
            hides it. ``flops_per_s`` over it is the intensity at which a product has half of its
            rate (Hockney and Curington, 1989).
        interference: Part of the time of a collective among this device and faster ones that
            computing beside it loses; at least 0 and below 1.
        drag: How many times as long a collective among this device and faster ones takes while the
            device computes beside it; at least 1. It takes its own time while all ranks wait for it.
        delay_s: Seconds by which each message of such a collective is later still, however few its
            bytes (:func:`messages`), if the device computes meanwhile: it waits for who computes.
        start: What a collective among this device and faster ones takes to start, as a part of
            what the cluster's measured collectives say; above 0, at most 1. Those are of all
            devices, and a slow one is late to answer.
        traffic: What the bytes of such a collective take, likewise, by the collective's name; 1 for
            those without a figure. A slow device packs and adds up slowly, too.
        relaunch: What an operator that follows a small one takes to start, and the update of a
            parameter, as a part of ``launch_s``; above 0, at most 1. Where the host computes, what is
            large takes everything else out of its caches, code included.
        source: Where each figure comes from, by the name of the figure.
    """

    name: str
    kind: str
    node: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    launch_s: float
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    operand_bytes_per_s: float = math.inf
    interference: float = 0.0
    drag: float = 1.0
    delay_s: float = 0.0
    start: float = 1.0
    traffic: Mapping[str, float] = field(default_factory=dict, hash=False)
    relaunch: float = 1.0
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ClusterError(
                f"device {self.name} has no float32 rate", hint="add flops: {float32: 14 TFLOP/s}"
            )
        positive = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            **{f"flops_per_s[{dtype}]": rate for dtype, rate in self.flops_per_s.items()},
            **{f"efficiency[{kind}]": part for kind, part in self.efficiency.items()},
        }
        for figure, value in positive.items():
            if not 0 < value < float("inf"):
                raise ClusterError(
                    f"{figure} of device {self.name} is {value}", hint="give a positive figure"
                )
        for figure in ("launch_s", "delay_s"):
            if not 0 <= getattr(self, figure) < float("inf"):
                raise ClusterError(f"{figure} of device {self.name} is {getattr(self, figure)}")
        if not self.operand_bytes_per_s > 0:
            what = f"operand_bytes_per_s of device {self.name} is {self.operand_bytes_per_s}"
            raise ClusterError(what, hint="give a positive figure")
        if not 0 <= self.interference < 1:
            raise ClusterError(
                f"interference of device {self.name} is {self.interference}",
                hint="give the part of a collective's time that computing loses, such as 0.1",
            )
        if not 1 <= self.drag < float("inf"):
            raise ClusterError(
                f"drag of device {self.name} is {self.drag}",
                hint="give how many times as long a collective takes beside computing, such as 1.2",
            )
        for figure, hint in (
            ("start", "give the part of a start that is left without slower devices, such as 0.3"),
            (
                "relaunch",
                "give the part of a launch that an operator after a small one takes, such as 0.5",
            ),
        ):
            if not 0 < getattr(self, figure) <= 1:
                what = f"{figure} of device {self.name} is {getattr(self, figure)}"
                raise ClusterError(what, hint=hint)
        for kind, part in self.traffic.items():
            if kind not in IMPLEMENTATIONS or not 0 < part <= 1:
                what = f"traffic[{kind}] of device {self.name} is {part}"
                hint = f"give a part of 1 for any of {', '.join(IMPLEMENTATIONS)}"
                raise ClusterError(what, hint=hint)

    def rate(self, kind: str, dtype: str) -> float:
        """Achieved FLOP/s of a kind of work in a dtype.

        Elementwise work without a figure is as fast as memory: its rate has no limit.
        """
        if kind in ELEMENTWISE and dtype != "float64":
            dtype = "float32"  # on the ordinary units, whatever tensor cores do
        while dtype not in self.flops_per_s:
            dtype = _STAND_IN.get(dtype, "float32")
        if kind not in self.efficiency:
            kind = _GENERAL.get(kind, kind)
        if kind in ELEMENTWISE and kind not in self.efficiency:
            return math.inf
        return self.flops_per_s[dtype] * self.efficiency.get(kind, 1.0)

    def operand_s(self, kind: str) -> float:
        """Seconds that each byte of an operator's tensors adds to its arithmetic."""
        return 1 / self.operand_bytes_per_s if kind in PRODUCTS else 0.0

    def launch_of(self, kind: str) -> float:
        """Constant cost of an operator of a kind of work, in seconds."""
        return self.relaunch_s if kind == "update" else self.launch_s

    @property
    def relaunch_s(self) -> float:
        """Constant cost of an operator that follows a small one, in seconds."""
        return self.launch_s * self.relaunch

    def seconds(self, work: Work) -> float:
        """Time of one operator: launch, then arithmetic or memory traffic, whichever is longer.

        Work without flops and bytes (a zero-length shard, a view) takes no time at all.
        """
        if not work.flops and not work.bytes:
            return 0.0
        compute_s = work.flops / self.rate(work.kind, work.dtype) if work.flops else 0.0
        compute_s += work.bytes * self.operand_s(work.kind)
        return self.launch_of(work.kind) + max(compute_s, work.bytes / self.memory_bytes_per_s)

    @property
    def figures(self) -> tuple[object, ...]:
        """What two devices must share to be alike: everything but name, node and provenance."""
        return (
            self.kind,
            self.memory_bytes,
            tuple(sorted(self.flops_per_s.items())),
            self.memory_bytes_per_s,
            self.launch_s,
            self.operand_bytes_per_s,
            self.interference,
            self.drag,
            self.delay_s,
            self.start,
            tuple(sorted(self.traffic.items())),
            self.relaunch,
            tuple(sorted(self.efficiency.items())),
        )


@dataclass(frozen=True, slots=True)
class Link:
    """Inside a machine: between two of its devices. Between machines: one machine's adapter.

    ``least_s`` is what a collective over it takes, however small it is: where ranks must wait for
    processor time, say, which costs nothing more where bytes take longer. Where measured.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < float("inf"):
            raise ClusterError(f"a link's bandwidth is {self.bandwidth_bytes_per_s} bytes/s")
        if not 0 <= self.latency_s < float("inf"):
            raise ClusterError(f"a link's latency is {self.latency_s} s")
        if not 0 <= self.least_s < float("inf"):
            raise ClusterError(f"the least time of a collective is {self.least_s} s")


IMPLEMENTATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "all_gather": ("padded", "grouped", "hierarchical"),
    "reduce_scatter": ("padded", "grouped", "hierarchical"),
    "all_reduce": ("one shot", "two step", "hierarchical"),
    "all_reduce_lse": ("terms gathered", "two reductions"),
    "all_to_all": ("exact", "gathered", "hierarchical"),
}
"""Collective -> the ways in which the runtime can do it."""

_ROUNDS: Final[Mapping[str, int]] = {
    "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_reduce_lse": 4, "all_to_all": 1,
}  # fmt: skip


def messages(kind: str, ranks: int) -> int:
    """How many messages of a collective go one after the other, each around a ring of ranks."""
    return _ROUNDS[kind] * max(1, ranks - 1)


LEVELS: Final = ("inside", "between")
"""Between the devices of one machine, and between machines."""

Collectives = Mapping[str, Mapping[str, Mapping[str, Link]]]
"""Collective -> implementation -> level -> the links as that implementation sees them."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All the devices in rank order, and how they are joined.

    Attributes:
        name: For people.
        devices: One per rank.
        intra: Node -> the link between two devices of that node.
        inter: Each node's adapter: what leaves or enters the node shares it.
        collectives: Measured figures of single implementations, in place of the links'. What
            is absent costs what the links say.
    """

    name: str
    devices: tuple[Device, ...]
    intra: Mapping[str, Link] = field(hash=False)
    inter: Link
    collectives: Collectives = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError("the cluster has no devices", hint="give at least one node a GPU")
        twice = [name for name, n in Counter(d.name for d in self.devices).items() if n > 1]
        if twice:
            raise ClusterError(f"two devices are named {twice[0]}", hint="name the nodes apart")
        missing = [node for node in self.nodes if node not in self.intra]
        if missing:
            raise ClusterError(f"node {missing[0]} has no inner link")
        for kind, ways in self.collectives.items():
            for how, levels in ways.items():
                if how not in IMPLEMENTATIONS.get(kind, ()) or not set(levels) <= set(LEVELS):
                    raise ClusterError(f"there is no collective {kind}, {how}, {list(levels)}")

    def measured(self, kind: str, implementation: str) -> Mapping[str, Link]:
        """Level -> the links as one implementation of a collective sees them among these devices;
        empty if it was not measured."""
        levels = self.collectives.get(kind, {}).get(implementation, {})
        start = max(device.start for device in self.devices)
        traffic = max(device.traffic.get(kind, 1.0) for device in self.devices)
        return levels if start == traffic == 1 else {
            level: replace(
                link, latency_s=start * link.latency_s, least_s=start * link.least_s,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / traffic,
            )
            for level, link in levels.items()
        }  # fmt: skip

    def seen_by(self, kind: str, implementation: str) -> Self:
        """The cluster with the links as one implementation of a collective sees them."""
        levels = self.measured(kind, implementation)
        if not levels:
            return self
        inside = levels.get("inside")
        return replace(
            self,
            intra=dict.fromkeys(self.intra, inside) if inside else self.intra,
            inter=levels.get("between", self.inter),
            collectives={},
        )

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machines, in the order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    def ranks(self, node: str) -> tuple[int, ...]:
        """The ranks that sit in a node."""
        return tuple(rank for rank, device in enumerate(self.devices) if device.node == node)

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each machine; empty if the ranks of some machine are not consecutive."""
        runs = [node for node, _ in itertools.groupby(d.node for d in self.devices)]
        return tuple(len(self.ranks(n)) for n in runs) if len(runs) == len(self.nodes) else ()

    def types(self) -> tuple[tuple[int, ...], ...]:
        """Ranks grouped by alike devices (same figures, whatever the node), first rank first."""
        groups: dict[object, list[int]] = {}
        for rank, device in enumerate(self.devices):
            groups.setdefault(device.figures, []).append(rank)
        return tuple(map(tuple, groups.values()))

    def without(self, rank: int) -> Self:
        """The cluster after the loss of one device; the ranks above it move down by one."""
        self._check_rank(rank)
        return self._keep(self.devices[:rank] + self.devices[rank + 1 :])

    def only(self, rank: int) -> Self:
        """The cluster of one device alone."""
        self._check_rank(rank)
        return self._keep((self.devices[rank],))

    def keep(self, ranks: Sequence[int]) -> Self:
        """A part of the cluster, its ranks numbered anew in their order."""
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
        """SHA-256 (hex) of what a plan depends on: not the title, nor where figures come from."""
        content = self.to_dict()
        del content["name"]
        for device in content["devices"]:
            del device["source"]
        measured = [
            link
            for ways in content.get("collectives", {}).values()
            for levels in ways.values()
            for link in levels.values()
        ]
        for link in (*content["intra"].values(), content["inter"], *measured):
            del link["source"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; :meth:`from_dict` is its inverse."""
        plain: dict[str, Any] = {
            "name": self.name,
            "devices": [_plain(device) for device in self.devices],
            "intra": {node: _plain(link) for node, link in self.intra.items()},
            "inter": _plain(self.inter),
        }
        if self.collectives:
            plain["collectives"] = {
                kind: {
                    how: {level: _plain(link) for level, link in levels.items()}
                    for how, levels in ways.items()
                }
                for kind, ways in self.collectives.items()
            }
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            ClusterError: A figure is missing, unknown, of another type, or out of range.
        """
        try:
            return cls(
                name=str(data["name"]),
                devices=tuple(Device(**device) for device in data["devices"]),
                intra={node: Link(**link) for node, link in data["intra"].items()},
                inter=Link(**data["inter"]),
                collectives={
                    kind: {
                        how: {level: Link(**link) for level, link in levels.items()}
                        for how, levels in ways.items()
                    }
                    for kind, ways in data.get("collectives", {}).items()
                },
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


def load_cluster(text_or_path: str | Path) -> Cluster:
    """Reads a cluster: a yaml file, a typed hostfile, their text, or ``local`` / ``local:4``.

    Raises:
        ClusterError: Says the line, what is wrong with it, and what to write instead.
    """
    # Here, not at the top: the parser pulls in ruamel.yaml, and most readers of this module
    # never parse a file.
    from hap.cluster_file import read_cluster

    return read_cluster(text_or_path)


def _plain(record: Device | Link) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    if values.get("start") == 1:
        del values["start"]  # so that plans from before there was one are still what they were
    return {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}
