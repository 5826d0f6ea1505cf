"""Scale a cluster's figures by one factor, so that this machine can emulate it.

A second on the cluster of the file lasts ``1 / scale`` seconds in the testbed. The factor reduces
the rates of arithmetic, memory and links, and increases launch costs and latencies. Flops per byte
are unchanged, so the best plan is the same for both.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from typing import Literal

from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.errors import InputError

Links = Literal["scaled", "as written", "unlimited"]

_SIDE = 1024  # rows and columns of the multiplied matrices: large enough for the full rate
_REPEAT = 20


@functools.cache
def core_flops_per_s() -> float:
    """Measure the float32 rate of matrix products on one core of this machine, in half a second.

    It is the best of several by processor time, so that other work on the machine does not count.
    """
    import torch  # not needed by a testbed with a given rate

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.rand(_SIDE, _SIDE)
        rates = []
        for _ in range(_REPEAT):
            start_s = time.thread_time()
            a @ a
            rates.append(2 * _SIDE**3 / (time.thread_time() - start_s))
    finally:
        torch.set_num_threads(threads)
    return max(rates)


def choose_scale(cluster: Cluster, cores: float | None, one_core_flops_per_s: float) -> float:
    """Return the largest factor <= 1 for which each rank fits on a core, and all fit on ``cores``.

    Raises:
        InputError: ``cores`` is not positive, or more than this process may use.
    """
    available = len(os.sched_getaffinity(0))
    cores = available if cores is None else cores
    if not 0 < cores <= available:
        what = f"{cores:g} cores asked for, and this process may use {available}"
        raise InputError(what, hint="give fewer cores: only the ratio of speeds matters")
    needed = [rank.flops_per_s["float32"] / one_core_flops_per_s for rank in cluster.devices]
    return min(1.0, cores / sum(needed), 1 / max(needed))


def scaled(cluster: Cluster, scale: float, links: Links) -> Cluster:
    """Return the cluster with its emulated figures."""

    def link(one: Link) -> Link:
        if links == "as written":
            return one
        source = _note(one.source, scale) + ("; not limited" if links == "unlimited" else "")
        return Link(one.bandwidth_bytes_per_s * scale, one.latency_s / scale, source)

    if scale == 1 and links != "unlimited":
        return cluster
    devices = cluster.devices
    if scale < 1:
        devices = tuple(d.slower(1 / scale, _why(scale)) for d in devices)
    return replace(
        cluster,
        devices=devices,
        intra={node: link(one) for node, one in cluster.intra.items()},
        inter=link(cluster.inter),
    )


def _note(source: str, scale: float) -> str:
    return f"{source}; {_why(scale)}" if scale < 1 else source


def _why(scale: float) -> str:
    return f"emulated, slower by {1 / scale:.4g}"
