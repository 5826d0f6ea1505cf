"""The devices and links of a plan, with the sources of their figures, as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hap.cli.terminal import alike, no_repeats, spans, table
from hap.cluster.link import Link
from hap.ir.plan import Plan
from hap.synthesizer.cost.operator_work import product_operations
from hap.units import format_bandwidth, format_bytes, format_flops, format_seconds


def cluster_table(plan: Plan) -> RenderableType:
    """Return the figures of the plan's devices and links, with their sources."""
    cluster = plan.cluster
    products = product_operations(plan.graph)
    dtypes = dict.fromkeys(("float32", max(products, key=lambda dtype: products[dtype])))
    rows = []
    for ranks in cluster.types():
        device = cluster.devices[ranks[0]]
        who = f"{len(ranks)} {device.kind}, rank {spans(ranks)}"
        figures = (
            ("memory", format_bytes(device.memory_bytes), "memory_bytes"),
            *(
                (dtype, format_flops(device.rate("matmul", dtype)), f"flops_per_s.{dtype}")
                for dtype in dtypes
            ),
            ("memory rate", format_bandwidth(device.memory_bytes_per_s), "memory_bytes_per_s"),
        )
        for name, value, key in figures:
            said = "not given"
            if name in dtypes and name not in device.flops_per_s:
                said = f"no figure for {name}: the rate of another dtype"
            sources = dict.fromkeys(cluster.devices[r].source.get(key, said) for r in ranks)
            rows.append((who, name, value, "; ".join(sources)))
    links: dict[Link, list[str]] = {}
    for node, link in cluster.intra.items():
        if len(cluster.ranks(node)) > 1:
            links.setdefault(link, []).append(node)
    for link, nodes in links.items():
        rows.append((f"inside {', '.join(alike(nodes))}", "link", *_link(link)))
    if len(cluster.nodes) > 1:
        rows.append(("between nodes", "link", *_link(cluster.inter)))
    if cluster.collectives_from:
        rows.append(("collectives", "", "", cluster.collectives_from))
    return Group(Text(str(cluster)), table(("", "", "", "source"), no_repeats(rows), right=(2,)))


def _link(link: Link) -> tuple[str, str]:
    rate = format_bandwidth(link.bandwidth_bytes_per_s)
    return f"{rate}, {format_seconds(link.latency_s)}", link.source or "not given"
