"""Write a cluster as the text of a yaml file."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hap.cluster.catalogue import catalogue, typical_host_s
from hap.cluster.device import Device
from hap.cluster.figures import FIGURES, Figure
from hap.cluster.link import Link, each_link
from hap.cluster.topology import Cluster


def cluster_yaml(cluster: Cluster, comment: str = "") -> str:
    """Return the text of a cluster file; figures keep five digits and their provenance.

    Args:
        comment: lines for the top of the file.
    """
    data = CommentedMap(name=cluster.name)
    if len(cluster.nodes) > 1:
        data["links"] = {"between": _link(cluster.inter)}
    if cluster.collectives or cluster.among:
        data["collectives"] = each_link(cluster.collectives, _level)
    if cluster.among:
        data["collectives"]["among"] = [
            CommentedMap(devices=_flow(sorted(each.devices)), **each_link(each.links, _level))
            for each in cluster.among
        ]
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


def _flow(names: list[str]) -> CommentedSeq:
    entry = CommentedSeq(names)
    entry.fa.set_flow_style()
    return entry


def _gpus(cluster: Cluster, node: str) -> list[CommentedMap]:
    """Return the devices of a node; equal neighbours share one entry."""
    found: list[tuple[Device, int]] = []
    for rank in cluster.ranks(node):
        device = cluster.devices[rank]
        if found and found[-1][0].figures == device.figures:
            found[-1] = device, found[-1][1] + 1
        else:
            found.append((device, 1))
    return [_gpu(device, count) for device, count in found]


def _gpu(device: Device, count: int) -> CommentedMap:
    entry = CommentedMap(type=device.kind)
    if count > 1:
        entry["count"] = count
    told = {}
    known = catalogue().get(device.kind)
    host_s = known.device.host_s if known else typical_host_s()  # of a file that gives none
    for figure in FIGURES:
        value = figure.of(device)
        name = "flops_per_s.float32" if figure.key == "flops" else figure.name
        if name in device.source:
            told[figure.key] = device.source[name]
        usual = host_s if figure.key == "host" else figure.default
        if value == usual and (isinstance(value, Mapping) or figure.key not in told):
            continue
        if isinstance(value, Mapping):
            entry[figure.key] = {entry: _written(figure, part) for entry, part in value.items()}
        elif value < math.inf:
            entry[figure.key] = _written(figure, value)
    if told:
        entry["source"] = told
    return entry


def _written(figure: Figure, value: float) -> str | float:
    if figure.key == "memory":
        return f"{value} B"
    if figure.unit:
        return _quantity(value, *figure.unit)
    return float(f"{value:.4g}") if figure.by else value


def _level(level: str, link: Link) -> Mapping[str, Any]:
    return _link(link)


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
