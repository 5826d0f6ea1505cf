"""The screen of ``hap profile``: devices, links, and residuals of the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hap.cli.profiling import Profile
from hap.cli.terminal import no_repeats, spans, table
from hap.profiler.link_figures import LinkResidual
from hap.units import format_bandwidth, format_bytes, format_flops, format_seconds


def profile_screen(profile: Profile, path: str) -> RenderableType:
    """Return the screen of a measured cluster in the file ``path``."""
    sections = (
        ("Devices", _devices(profile)),
        ("Rates of other work, relative to products or memory traffic", _efficiencies(profile)),
        ("Links, measured by messages", _links(profile)),
        ("Collectives", _collectives(profile.exchanges)),
        ("Collectives among some ranks, while the others idle", _among_some(profile.among)),
        ("Operators with the largest errors of the fit", _worst(profile)),
        ("Next", Text(f"hap plan model.py --cluster {path}")),
    )
    parts: list[RenderableType] = []
    for title, body in sections:
        parts += [Text(title, style="bold"), Padding(body, (0, 0, 1, 2))]
    return Group(*parts)


def _devices(profile: Profile) -> RenderableType:
    head = (
        "ranks",
        "device",
        "memory",
        "products",
        "memory rate",
        "operands",
        "launch",
        "fit off by",
        "spread",
    )
    rows = [
        (
            spans(kind.ranks), kind.device.kind, format_bytes(kind.device.memory_bytes),
            ", ".join(f"{d} {format_flops(r)}" for d, r in kind.device.flops_per_s.items()),
            format_bandwidth(kind.device.memory_bytes_per_s),
            format_bandwidth(kind.device.operand_bytes_per_s), format_seconds(kind.device.launch_s),
            f"{median(abs(r.error) for r in kind.residuals):.0%}",
            f"{median(r.spread for r in kind.residuals):.0%}",
        )
        for kind in profile.types
    ]  # fmt: skip
    return table(head, rows)


def _efficiencies(profile: Profile) -> RenderableType:
    kinds = list(dict.fromkeys(k for t in profile.types for k in t.device.efficiency))
    rows = [
        (spans(t.ranks), *(f"{t.device.efficiency.get(k, 1):.3g}" for k in kinds))
        for t in profile.types
    ]
    return table(("ranks", *kinds), rows, right=range(1, len(kinds) + 1))


def _links(profile: Profile) -> RenderableType:
    cluster = profile.cluster
    found = [(f"inside {n}", cluster.intra[n]) for n in cluster.nodes if len(cluster.ranks(n)) > 1]
    if len(cluster.nodes) > 1:
        found.append(("between machines", cluster.inter))
    rows = [
        (name, format_bandwidth(k.bandwidth_bytes_per_s), format_seconds(k.latency_s), k.source)
        for name, k in found
    ]
    return table(("", "bandwidth", "latency", ""), rows) if rows else Text("none: one rank")


def _collectives(residuals: Sequence[LinkResidual]) -> RenderableType:
    def rows() -> Iterator[tuple[str, ...]]:
        ways = dict.fromkeys((r.record.kind, r.record.how) for r in residuals)
        for kind, how in ways:
            own = [r for r in residuals if (r.record.kind, r.record.how) == (kind, how)]
            largest = max(own, key=lambda r: r.record.nbytes)
            errors = [abs(r.error) for r in own]
            yield (
                kind, how, str(len(own)), format_bytes(largest.record.nbytes),
                format_seconds(largest.measured_s), f"{median(errors):.0%}", f"{max(errors):.0%}",
            )  # fmt: skip

    found = no_repeats(list(rows()))
    head = ("", "by", "samples", "largest", "measured", "fit off by", "worst")
    return table(head, found, right=range(2, 7)) if found else Text("none: one rank")


def _among_some(residuals: Sequence[LinkResidual]) -> RenderableType:
    rows = []
    for groups in dict.fromkeys(r.record.groups for r in residuals):
        errors = [abs(r.error) for r in residuals if r.record.groups == groups]
        rows.append(
            (spans(groups[0]), str(len(errors)), f"{median(errors):.0%}", f"{max(errors):.0%}")
        )
    head = ("ranks", "samples", "fit off by", "worst")
    return table(head, rows, right=range(1, 4)) if rows else Text("none: all are equally fast")


def _worst(profile: Profile) -> RenderableType:
    every = [(t, r) for t in profile.types for r in t.residuals]
    rows = [
        (r.name, spans(t.ranks), format_seconds(r.measured_s), format_seconds(r.predicted_s),
         f"{r.error:+.0%}")
        for t, r in sorted(every, key=lambda pair: -abs(pair[1].error))[:6]
    ]  # fmt: skip
    return table(("", "ranks", "measured", "fitted", ""), rows, right=range(2, 5))
