"""Links, and the implementations of collectives that run over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hap.errors import ClusterError


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
