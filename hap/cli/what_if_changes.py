"""The changes of ``hap what-if``: other batches, links, memory and devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hap.cli.terminal import alike
from hap.cluster.catalogue import find, nearest
from hap.cluster.link import NOT_USED, Link, each_link
from hap.cluster.topology import Cluster, check_size
from hap.errors import ClusterError, InputError
from hap.units import format_bytes, parse

NOW, DEVICES = "now", "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One change; those of one ``sweep`` are compared with each other in the order of ``value``."""

    sweep: str
    change: str
    cluster: Cluster
    rows: int | None = None
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes to ask about.

    Attributes:
        rows: of the batch.
        links: rates between nodes, such as ``25 Gbit/s``.
        memory: ``32 GiB`` for every device, or ``P100=32 GiB`` for a node, a device or a kind.
        add: nodes, such as ``2xA100-40``.
        without: nodes, devices or kinds.
        swap: devices and what takes their place, such as ``old=2xA100-40``.
    """

    rows: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    swap: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A quantity that is changed alone; ``ask`` makes the question of one of its values."""

    values: Sequence[float]
    ask: Callable[[float], Question] = field(compare=False)


def sweeps(cluster: Cluster, changes: Changes) -> list[Sweep]:
    """The quantities whose values are compared: rows, the rate between nodes, memory.

    Raises:
        InputError: a change cannot be made; the message names it.
    """
    found = []
    if changes.rows:
        found.append(
            Sweep(values=sorted(changes.rows), ask=lambda n: _with_rows(cluster, round(n)))
        )
    if changes.links:
        rates = sorted(_rate(text) for text in changes.links)
        found.append(Sweep(values=rates, ask=lambda rate: _with_link(cluster, rate)))
    of: dict[str, list[float]] = {}
    for text in changes.memory:
        name, nbytes = _memory(text)
        of.setdefault(name, []).append(nbytes)
    for name, sizes in of.items():
        found.append(
            Sweep(values=sorted(sizes), ask=lambda n, name=name: _with_memory(cluster, name, n))  # type: ignore[misc]
        )
    return found


def device_questions(cluster: Cluster, changes: Changes) -> Iterator[Question]:
    """The questions about other devices."""
    for text in changes.add:
        yield Question(sweep=DEVICES, change=f"with {text}", cluster=added(cluster, text))
    for name in changes.without:
        yield Question(sweep=DEVICES, change=f"without {name}", cluster=reduced(cluster, name))
    for text in changes.swap:
        name, _, kind = text.partition("=")
        yield Question(
            sweep=DEVICES, change=f"{kind} in place of {name}", cluster=swapped(cluster, text)
        )


def questions(cluster: Cluster, changes: Changes) -> Iterator[Question]:
    """The cluster as it is, then one question per change.

    Raises:
        InputError: a change cannot be made; the message names it.
    """
    yield Question(sweep=NOW, change="as it is", cluster=cluster)
    for sweep in sweeps(cluster, changes):
        yield from map(sweep.ask, sweep.values)
    yield from device_questions(cluster, changes)


def _with_rows(cluster: Cluster, rows: int) -> Question:
    return Question(sweep="rows", change=f"{rows} rows", cluster=cluster, rows=rows, value=rows)


def _with_link(cluster: Cluster, rate: float) -> Question:
    text = f"{rate * 8e-9:.4g} Gbit/s"
    return Question(sweep="link", change=text, cluster=linked(cluster, rate), value=rate)


def _with_memory(cluster: Cluster, name: str, nbytes: float) -> Question:
    sweep = f"memory of {name}" if name else "memory"
    return Question(
        sweep=sweep, change=f"{format_bytes(round(nbytes))}{f' on {name}' if name else ''}",
        cluster=with_memory(cluster, name, round(nbytes)), value=nbytes,
    )  # fmt: skip


def _rate(text: str) -> float:
    rate = _quantity(text, "bytes/s", "--link")
    if not 0 < rate < math.inf:
        raise InputError(f"--link {text}: the rate is not positive", hint="write 25 Gbit/s")
    return rate


def _memory(text: str) -> tuple[str, float]:
    """(name or nothing, bytes)."""
    name, _, size = text.rpartition("=")
    nbytes = _quantity(size.strip(), "bytes", "--memory")
    if not 1 <= nbytes < math.inf:
        raise InputError(f"--memory {text}: give a byte or more", hint="write 32 GiB")
    return name.strip(), nbytes


def _quantity(text: str, unit: str, option: str) -> float:
    try:
        return parse(text, unit)
    except ValueError as error:
        what, _, hint = str(error).partition(": ")
        raise InputError(f"{option}: {what}", hint=hint) from None


def linked(cluster: Cluster, rate: float) -> Cluster:
    """The cluster with another rate between nodes; measured collectives change in proportion.

    Args:
        rate: bytes per second.
    """
    if len(cluster.nodes) == 1:
        raise InputError("--link: the cluster is one node", hint="leave --link out")
    factor = rate / cluster.inter.bandwidth_bytes_per_s

    def at_rate(level: str, link: Link) -> Link:
        scaled = link.bandwidth_bytes_per_s * (factor if level == "between" else 1.0)
        return replace(link, bandwidth_bytes_per_s=scaled)

    return replace(
        cluster, inter=at_rate("between", cluster.inter),
        collectives=each_link(cluster.collectives, at_rate),
        among=tuple(replace(each, links=each_link(each.links, at_rate)) for each in cluster.among),
    )  # fmt: skip


def with_memory(cluster: Cluster, name: str, nbytes: int) -> Cluster:
    """The cluster with other memory of a node, a device or a kind; of all devices without a name."""
    ranks = named(cluster, name, "--memory") if name else range(cluster.world_size)
    devices = tuple(
        replace(d, memory_bytes=nbytes) if rank in ranks else d
        for rank, d in enumerate(cluster.devices)
    )
    return replace(cluster, devices=devices)


def added(cluster: Cluster, text: str, option: str = "--add") -> Cluster:
    """The cluster with one more node, ``2xA100-40``, of the catalogue's devices and inner link.

    A device costs per hour what those of its kind in the cluster cost.
    """
    count, times, kind = text.partition("x")
    entry = find(kind)
    if not times or not count.isdecimal() or not int(count) or entry is None:
        near = nearest(kind) if kind else None
        raise InputError(
            f"{option} {text}: this is no number of devices of a known type",
            hint=f"did you mean {count}x{near}?"
            if near
            else "write 2xA100-40; docs/cluster-file.md has the names that are known",
        )
    check_size(cluster.world_size + int(count), f"{option} {text}")
    if cluster.inter.source == NOT_USED:
        raise InputError(
            f"{option} {text}: the cluster file has no link between nodes",
            hint="add links: {between: 10 Gbit/s} there, with the rate of your network",
        )
    name = next(n for k in itertools.count() if (n := f"added{k or ''}") not in cluster.nodes)
    prices = [d.price_per_hour for d in cluster.devices if d.kind == entry.device.kind]
    pattern = replace(entry.device, price_per_hour=max(prices, default=0.0), node=name)
    devices = tuple(replace(pattern, name=f"{name}:{k}") for k in range(int(count)))
    intra = {**cluster.intra, name: entry.inside(int(count))}
    return replace(cluster, devices=cluster.devices + devices, intra=intra)


def reduced(cluster: Cluster, name: str) -> Cluster:
    """The cluster without a node, a device or all devices of a kind."""
    gone = named(cluster, name, "--without")
    kept = [rank for rank in range(cluster.world_size) if rank not in gone]
    if not kept:
        raise ClusterError(f"--without {name}: no device is left", hint="name fewer devices")
    return cluster.keep(kept)


def swapped(cluster: Cluster, text: str) -> Cluster:
    """The cluster with a new node in place of a node, a device or a kind: ``old=2xA100-40``."""
    name, equals, devices = text.partition("=")
    if not equals:
        raise InputError(f"--replace {text}: no `=`", hint="write --replace old=2xA100-40")
    gone = named(cluster, name, "--replace")
    whole = added(cluster, devices, "--replace")
    return whole.keep([rank for rank in range(whole.world_size) if rank not in gone])


def named(cluster: Cluster, name: str, option: str) -> list[int]:
    """The ranks of a node, a device or a kind."""
    ranks = [rank for rank, d in enumerate(cluster.devices) if name in (d.node, d.name, d.kind)]
    if not ranks:
        known = alike([*cluster.nodes, *dict.fromkeys(d.kind for d in cluster.devices)])
        raise InputError(
            f"{option} {name}: there is no such node, device or kind",
            hint=f"the cluster has {', '.join(known)}",
        )
    return ranks


def default_changes(cluster: Cluster, rows: int) -> Changes:
    """Half and twice the rows; a quarter of and four times the rate; each kind left out."""
    kinds = list(dict.fromkeys(d.kind for d in cluster.devices))
    gbit = cluster.inter.bandwidth_bytes_per_s * 8e-9
    several = len(cluster.nodes) > 1
    return Changes(
        rows=(max(rows // 2, 1), rows, 2 * rows),
        links=tuple(f"{gbit * f:g} Gbit/s" for f in (0.25, 1, 4)) if several else (),
        without=tuple(kinds) if len(kinds) > 1 else (),
    )
