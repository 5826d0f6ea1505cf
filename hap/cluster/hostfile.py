"""Typed hostfiles (``worker0 slots=8 type=A100-40``) and ``local``, the CPUs of this machine.

A hostfile has the format of mpirun and DeepSpeed, with the type of GPU added; comments may give
the links::

    # hap: between=10Gbit/s,30us inside=300GB/s,3us
    worker0 slots=8 type=A100-40
    worker1 slots=4 type=V100-16
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from hap.cluster.catalogue import catalogue, find, nearest
from hap.cluster.device import Device
from hap.cluster.link import Link, unused
from hap.cluster.topology import Cluster, check_size
from hap.errors import ClusterError
from hap.units import parse

_HOST = re.compile(r"[^\s:=#\[\]{}]+(\s+\w+=\S+)+")
_DIRECTIVE = re.compile(r"#\s*hap:\s*(.*)")
_MOST_DIGITS = 12  # of a number of devices
_DEFAULT_LATENCY_S = {"between": 30e-6, "inside": 10e-6}


def is_hostfile(text: str) -> bool:
    """Return whether the first non-comment line is ``host key=value ...``."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return bool(_HOST.fullmatch(next(filter(None, lines), "")))


def read_hostfile(text: str, file: str, name: str) -> Cluster:
    """Read a typed hostfile.

    Raises:
        ClusterError: With the line in ``where`` and the remedy in ``hint``.
    """
    devices: list[Device] = []
    links: dict[str, Link] = {}
    own: dict[str, Link] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{file}:{number}"
        if directive := _DIRECTIVE.fullmatch(line.strip()):
            for key, value in _pairs(directive[1].split(), where, ("between", "inside")):
                links[key] = _link(key, value, where)
            continue
        host, *words = line.partition("#")[0].split() or [""]
        if not host:
            continue
        if host in own:
            raise ClusterError(
                f"host {host!r} is named twice",
                where=where,
                hint="describe a machine with different GPUs in a yaml file",
            )
        settings = dict(_pairs(words, where, ("slots", "type")))
        slots = _slots(settings, where)
        pattern, own[host] = _gpu(settings, slots, where)
        check_size(len(devices) + slots, where)
        devices += [replace(pattern, name=f"{host}:{index}", node=host) for index in range(slots)]
    if not devices:
        raise ClusterError(
            "the hostfile has no GPUs", where=file, hint="write: worker0 slots=8 type=A100-40"
        )
    used = {device.node for device in devices}
    intra = {host: links.get("inside", link) for host, link in own.items() if host in used}
    if len(used) > 1 and "between" not in links:
        raise ClusterError(
            "several hosts, but no link between them",
            where=file,
            hint="add the line: # hap: between=10Gbit/s,30us",
        )
    alone = unused(next(iter(intra.values())))
    return Cluster(name, tuple(devices), intra, links.get("between", alone))


def _pairs(words: list[str], where: str, keys: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for word in words:
        key, equals, value = word.partition("=")
        if key not in keys or not equals or not value:
            raise ClusterError(
                f"cannot read {word!r}",
                where=where,
                hint=f"write {' and '.join(f'{key}=...' for key in keys)}, without spaces inside",
            )
        pairs.append((key, value))
    return pairs


def _gpu(settings: dict[str, str], slots: int, where: str) -> tuple[Device, Link]:
    if "type" not in settings:
        raise ClusterError("no type of GPU", where=where, hint="add for example type=A100-40")
    if entry := find(settings["type"]):
        return entry.device, entry.inside(slots)
    near = nearest(settings["type"])
    raise ClusterError(
        f"the catalogue does not know the GPU {settings['type']!r}",
        where=where,
        hint=f"did you mean {near}?"
        if near
        else "docs/cluster-file.md has the names that are known; "
        "describe any other GPU in a yaml file",
    )


def _slots(settings: dict[str, str], where: str) -> int:
    text = settings.get("slots", "1")
    if not _is_count(text):
        raise ClusterError(
            f"slots is {text!r}", where=where, hint="write a whole number, as slots=8"
        )
    return int(text)


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _link(key: str, text: str, where: str) -> Link:
    """Read ``10Gbit/s`` or ``10Gbit/s,30us``."""
    bandwidth, _, latency = text.partition(",")
    try:
        return Link(
            parse(bandwidth, "bytes/s"),
            parse(latency, "seconds") if latency else _DEFAULT_LATENCY_S[key],
            where if latency else f"{where}; latency assumed",
        )
    except ValueError as error:
        what, _, hint = str(error).partition(": ")
        raise ClusterError(f"{key}: {what}", where=where, hint=hint) from error
    except ClusterError as error:
        raise ClusterError(error.what, where=where, hint="write a positive figure") from error


def local_cluster(text: str) -> Cluster:
    """Read ``local`` (a rank per core of this machine) or ``local:4`` (four ranks share them).

    Raises:
        ClusterError: The number of ranks is not a positive whole number.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    _, colon, count = text.partition(":")
    if colon and not (_is_count(count) and int(count)):
        raise ClusterError(f"{text!r} is not a number of ranks", hint="write local, or local:4")
    ranks = int(count) if colon else cores
    check_size(ranks, text)
    entry = catalogue()["cpu"]
    share = cores / ranks
    cpu = entry.device
    shared = {key: f"{text} x {cores} cores / {ranks} ranks" for key, text in cpu.source.items()}
    whole = {key: cpu.source[key] for key in ("launch_s", "efficiency")}
    memory = f"this machine's memory / {ranks} ranks"
    pattern = replace(
        cpu,
        node="local",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
        flops_per_s={dtype: rate * share for dtype, rate in cpu.flops_per_s.items()},
        memory_bytes_per_s=cpu.memory_bytes_per_s * share,
        operand_bytes_per_s=cpu.operand_bytes_per_s * share,
        source={**shared, **whole, "memory_bytes": memory},
    )
    devices = tuple(replace(pattern, name=f"local:{rank}") for rank in range(ranks))
    return Cluster(text, devices, {"local": entry.link}, unused(entry.link))
