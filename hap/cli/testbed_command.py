"""``hap testbed``: start emulated hosts, and run a command or the profiler on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from rich.console import Group, RenderableType

from hap.cli.profiling import Profile, Progress, Settings
from hap.cli.profiling import profile as profile_ranks
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.errors import InputError
from hap.runtime.testbed import Host, Testbed, clean
from hap.runtime.testbed.scaling import Links
from hap.units import format_bandwidth, format_bytes

__all__ = ["clean", "emulate", "profile", "profile_hosts"]


def emulate(cluster: str, cores: float | None, links: str, command: Sequence[str]) -> int:
    """Start a cluster's hosts, show them, and run a command on each, if there is one.

    Args:
        cluster: As for :func:`hap.cluster.cluster_file.load_cluster`.
        cores: Cores of all ranks together; None for all cores of the machine.
        links: As for :class:`Testbed`; ``-`` may replace a blank.
        command: The program and its arguments; may be empty.

    Returns:
        The exit code of all ranks; 130 after Ctrl-C.
    """
    known = {kind.replace(" ", "-"): kind for kind in get_args(Links)}
    kind = known.get(links.replace(" ", "-"))
    if kind is None:
        raise InputError(f"--links {links!r} is unknown", hint=f"known: {', '.join(known)}")
    try:
        with Testbed(load_cluster(cluster), cores, links=kind) as bed:
            emit(screen(bed))
            return bed.run(command, on_line=_say) if command else 0
    except KeyboardInterrupt:
        return 130


def profile(cluster: str, settings: Settings, progress: Progress) -> Profile:
    """Emulate a cluster, show its hosts, and measure them.

    Args:
        cluster: As for :func:`hap.cluster.cluster_file.load_cluster`.

    Raises:
        HapError: Links cannot be limited on this machine, or a rank died.
    """
    with Testbed(load_cluster(cluster)) as bed:
        emit(screen(bed))
        return profile_hosts(bed, settings, progress)


def profile_hosts(bed: Testbed, settings: Settings, progress: Progress) -> Profile:
    """Measure the hosts of a testbed; their nodes are those of its cluster file.

    Raises:
        HapError: A rank died.
    """
    placed = replace(settings, nodes=tuple(d.node for d in bed.cluster.devices))
    return profile_ranks(placed, len(bed.hosts), launch=bed.spawn, progress=progress)


def screen(bed: Testbed) -> RenderableType:
    """Return the hosts as a table, then the deviations from the file."""
    slower = "as fast as in the file" if bed.scale == 1 else f"{1 / bed.scale:.4g} times slower"
    lines = [f"{bed.cluster.name}: {len(bed.hosts)} emulated hosts, {slower}"]
    rows = [_row(host) for host in bed.hosts]
    head = ("rank", "device", "core", "link", "uplink of node", "memory limit")
    return Group(*lines, table(head, rows, right=(0, 2, 3, 4, 5)), *(f"{n}" for n in bed.notes))


def _row(host: Host) -> tuple[str, ...]:
    def rate(bytes_per_s: float | None) -> str:
        return "-" if bytes_per_s is None else format_bandwidth(bytes_per_s)

    memory = "-" if host.memory_bytes is None else format_bytes(host.memory_bytes)
    return (
        str(host.rank),
        host.device,
        f"{host.core:.1%}",
        rate(host.link_bytes_per_s),
        rate(host.uplink_bytes_per_s),
        memory,
    )


def _say(line: str) -> None:
    print(line, flush=True)
