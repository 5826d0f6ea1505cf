"""Seconds of messages between devices that are sent at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hap.cluster.topology import Cluster


def messages_s(cluster: Cluster, sent: Iterable[tuple[int, int, float]]) -> float:
    """Return the seconds of messages that are sent at once, given as (sender, receiver, bytes).

    A message inside a machine loads its sender's and its receiver's link, each in one direction. One between
    machines loads the adapters of both machines, which all messages from or to a machine share.
    """
    latency_s, loads = link_loads(cluster, sent)
    return latency_s + max(loads.values(), default=0.0)


Loads = dict[tuple[object, str, bool], float]
"""(device or node, direction, inside a machine) -> seconds."""


def link_loads(cluster: Cluster, sent: Iterable[tuple[int, int, float]]) -> tuple[float, Loads]:
    """Return the largest latency of some messages, and what they load."""
    loads: Loads = {}
    latency_s, devices = 0.0, cluster.devices
    for src, dst, nbytes in sent:
        here, there = devices[src].node, devices[dst].node
        inside = here == there
        link = cluster.intra[here] if inside else cluster.inter
        latency_s = max(latency_s, link.latency_s)
        for end, direction in ((src if inside else here, "out"), (dst if inside else there, "in")):
            key = end, direction, inside
            loads[key] = loads.get(key, 0.0) + nbytes / link.bandwidth_bytes_per_s
    return latency_s, loads


def least_send(cluster: Cluster) -> tuple[float, float]:
    """Return (latency, seconds per byte) that a message between two devices does not fall below."""
    links = [cluster.intra[node] for node in cluster.nodes if len(cluster.ranks(node)) > 1]
    links += [cluster.inter] * (len(cluster.nodes) > 1)
    fastest = max((link.bandwidth_bytes_per_s for link in links), default=math.inf)
    return min((link.latency_s for link in links), default=0.0), 1 / fastest
