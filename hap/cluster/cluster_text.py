"""Writes a cluster as a yaml file that :mod:`hap.cluster.cluster_file` reads back."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster

_FIGURES = {
    "memory": "memory_bytes",
    "flops": "flops_per_s.float32",
    "memory_bandwidth": "memory_bytes_per_s",
    "launch": "launch_s",
    "operands": "operand_bytes_per_s",
    "interference": "interference",
    "drag": "drag",
    "delay": "delay_s",
    "start": "start",
    "relaunch": "relaunch",
    "traffic": "traffic",
    "efficiency": "efficiency",
}
"""Key of the file -> figure whose provenance stands for it."""


def cluster_yaml(cluster: Cluster, comment: str = "") -> str:
    """The text of a cluster file; figures keep five digits, and their provenance.

    Args:
        comment: lines for the top of the file.
    """
    data = CommentedMap(name=cluster.name)
    if len(cluster.nodes) > 1:
        data["links"] = {"between": _link(cluster.inter)}
    if cluster.collectives:
        data["collectives"] = {
            kind: {
                how: {level: _link(link) for level, link in levels.items()}
                for how, levels in ways.items()
            }
            for kind, ways in cluster.collectives.items()
        }
    data["nodes"] = [
        {"name": node, "inside": _link(cluster.intra[node]), "gpus": _gpus(cluster, node)}
        for node in cluster.nodes
    ]
    yaml, text = YAML(), io.StringIO()
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(data, text)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + text.getvalue()


def _gpus(cluster: Cluster, node: str) -> list[CommentedMap]:
    """The devices of a node; alike neighbours are one entry."""
    found: list[tuple[Device, int]] = []
    for rank in cluster.ranks(node):
        device = cluster.devices[rank]
        if found and found[-1][0].figures == device.figures:
            found[-1] = device, found[-1][1] + 1
        else:
            found.append((device, 1))
    return [_gpu(device, count) for device, count in found]


def _gpu(device: Device, count: int) -> CommentedMap:
    told = {
        key: device.source[figure] for key, figure in _FIGURES.items() if figure in device.source
    }
    entry = CommentedMap(type=device.kind)
    if count > 1:
        entry["count"] = count
    entry["memory"] = f"{device.memory_bytes} B"
    entry["flops"] = {
        dtype: _quantity(rate, 1e9, "GFLOP/s") for dtype, rate in device.flops_per_s.items()
    }
    entry["memory_bandwidth"] = _quantity(device.memory_bytes_per_s, 1e9, "GB/s")
    entry["launch"] = _quantity(device.launch_s, 1e-6, "us")
    if device.operand_bytes_per_s < math.inf:
        entry["operands"] = _quantity(device.operand_bytes_per_s, 1e9, "GB/s")
    if device.delay_s or "delay" in told:
        entry["delay"] = _quantity(device.delay_s, 1e-6, "us")
    for key, default in (("interference", 0.0), ("drag", 1.0), ("start", 1.0), ("relaunch", 1.0)):
        if getattr(device, key) != default or key in told:
            entry[key] = getattr(device, key)
    for key in ("traffic", "efficiency"):
        if parts := getattr(device, key):
            entry[key] = {k: float(f"{part:.4g}") for k, part in parts.items()}
    if told:
        entry["source"] = told
    return entry


def _link(link: Link) -> Mapping[str, Any]:
    entry = CommentedMap(
        bandwidth=_quantity(link.bandwidth_bytes_per_s, 1e6, "MB/s"),
        latency=_quantity(link.latency_s, 1e-6, "us"),
    )
    if link.least_s:
        entry["least"] = _quantity(link.least_s, 1e-6, "us")
    if link.source:
        entry["source"] = link.source
    entry.fa.set_flow_style()
    return entry


def _quantity(value: float, unit: float, name: str) -> str:
    return f"{value / unit:.5g} {name}"
