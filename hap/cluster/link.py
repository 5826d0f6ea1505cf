"""Links, and the implementations of collectives that run over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from hap.errors import ClusterError

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two devices inside a machine, or one machine's adapter to the others.

    ``least_s`` is the measured minimum of a collective over it, for example the time in which
    ranks wait for a processor. It is a floor of the price, and adds nothing to larger transfers.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    source: str = ""
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < float("inf"):
            raise ClusterError(
                f"a link's bandwidth is {self.bandwidth_bytes_per_s} bytes/s",
                hint="it must be above zero and finite",
            )
        if not 0 <= self.latency_s < float("inf"):
            raise ClusterError(
                f"a link's latency is {self.latency_s} s",
                hint="it must be zero or more, and finite",
            )
        if not 0 <= self.least_s < float("inf"):
            raise ClusterError(
                f"the least time of a collective is {self.least_s} s",
                hint="it must be zero or more, and finite",
            )
        if not isinstance(self.source, str):
            raise ClusterError(f"the source of a link's figures is {self.source!r}, not a text")


NOT_USED: Final = "not used: there is one node"
"""The source of the link between nodes of a cluster that has one node and states no such link."""


def unused(link: Link) -> Link:
    """Return the link between nodes of a cluster of one node; nothing is sent over it."""
    return replace(link, source=NOT_USED)


IMPLEMENTATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "all_gather": ("padded", "grouped", "hierarchical"),
    "reduce_scatter": ("padded", "grouped", "hierarchical"),
    "all_reduce": ("one shot", "two step", "hierarchical"),
    "all_reduce_lse": ("terms gathered", "two reductions"),
    "all_to_all": ("exact", "gathered", "hierarchical"),
}
"""Collective -> the implementations that the runtime has."""

_ROUNDS: Final[Mapping[str, int]] = {
    "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_reduce_lse": 4, "all_to_all": 1,
}  # fmt: skip


def messages(kind: str, ranks: int) -> int:
    """Return the number of consecutive messages of a collective around a ring of ranks."""
    return _ROUNDS[kind] * max(1, ranks - 1)


LEVELS: Final = ("inside", "between")
"""Levels of links: between the devices of one machine, and between machines."""

Collectives = Mapping[str, Mapping[str, Mapping[str, Link]]]
"""Collective -> implementation -> level -> the effective link of that implementation."""


def each_link(
    collectives: Mapping[str, Mapping[str, Mapping[str, T]]], made: Callable[[str, T], U]
) -> dict[str, dict[str, dict[str, U]]]:
    """Return collectives with ``made(level, link)`` in place of each link."""
    return {
        kind: {
            how: {level: made(level, link) for level, link in levels.items()}
            for how, levels in ways.items()
        }
        for kind, ways in collectives.items()
    }


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """Collectives measured among some devices of a cluster, while the others idled.

    Attributes:
        devices: the names of these devices.
        links: their effective links.
    """

    devices: frozenset[str]
    links: Collectives = field(hash=False)

    def __post_init__(self) -> None:
        if len(self.devices) < 2:
            raise ClusterError(f"collectives among {len(self.devices)} devices were measured")
        check_collectives(self.links)


def check_collectives(collectives: Collectives) -> None:
    """Raise ``ClusterError`` if a collective, an implementation or a level is unknown."""
    for kind, ways in collectives.items():
        for how, levels in ways.items():
            if how not in IMPLEMENTATIONS.get(kind, ()) or not set(levels) <= set(LEVELS):
                raise ClusterError(f"there is no collective {kind}, {how}, {list(levels)}")
