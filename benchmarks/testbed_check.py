"""Speeds and links of a testbed against its cluster file.

    python -m benchmarks.testbed_check [CLUSTER] [--cores 1.8] [--seconds 3]

Prints measured over requested figures. Speed is the float32 rate of matrix products on all ranks
at once; a link's rate is that of one stream from each rank to the next, alone and then with all
others round the ring; the last is an all-reduce against 2 (n-1)/n bytes over the slowest link on the
way. Latency is not emulated, and shown as measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hap.cli.terminal import emit, table
from hap.cli.testbed_command import screen
from hap.cluster.cluster_file import load_cluster
from hap.runtime.testbed import Host, Testbed
from hap.units import format_bandwidth, format_flops, format_seconds

HERE = Path(__file__).parent
SIDE = 512
REPEAT = 5


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cluster", nargs="?", default=str(HERE / "clusters" / "demo4.yaml"))
    parser.add_argument("--cores", type=float)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    options = parser.parse_args(arguments)
    with Testbed(load_cluster(options.cluster), options.cores) as bed:
        emit(screen(bed))
        size = len(bed.hosts)
        pairs = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
        asked = [path_bytes_per_s(bed.hosts[a], bed.hosts[b]) for a, b in pairs]
        results = bed.spawn(_rank, (options.seconds, pairs, asked))
        rates = [device.flops_per_s["float32"] for device in bed.cluster.devices]
    rows = [
        (f"speed of rank {rank}", format_flops(want), format_flops(got.flops), _of(got.flops, want))
        for rank, (got, want) in enumerate(zip(results, rates, strict=True))
    ]
    for what, figures in (("alone", results[0].alone), ("all at once", results[0].at_once)):
        rows += [
            (f"link {a}-{b}, {what}", format_bandwidth(want), format_bandwidth(got), _of(got, want))
            for (a, b), want, got in zip(pairs, asked, figures, strict=True)
        ]
    if pairs:
        ring_bytes, ring_s = results[0].ring
        ideal_s = 2 * (size - 1) / size * ring_bytes / min(asked)
        rows.append(("all-reduce", format_seconds(ideal_s), format_seconds(ring_s),
                     _of(ring_s, ideal_s)))  # fmt: skip
        rows.append(("there and back, 4 bytes", "-", format_seconds(results[0].latency_s), "-"))
    emit(table(("", "asked", "measured", "ratio"), rows, right=(1, 2, 3)))


def path_bytes_per_s(one: Host, other: Host) -> float:
    """Return the rate of the slowest link between two hosts."""
    uplinks = (one.uplink_bytes_per_s, other.uplink_bytes_per_s)
    on_way = () if one.node == other.node else uplinks
    rates = (one.link_bytes_per_s, other.link_bytes_per_s, *on_way)
    return min(rate for rate in rates if rate is not None)


class Figures:
    """Measurements of one rank; those of links are the same on all."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.alone: list[float] = []
        self.at_once: list[float] = []
        self.ring = (0, 0.0)
        self.latency_s = 0.0


def _rank(seconds: float, pairs: Sequence[tuple[int, int]], asked: Sequence[float]) -> Figures:
    found = Figures()
    found.flops = _matmul_rate(seconds)
    loads = [torch.zeros(max(1, round(rate * seconds)), dtype=torch.uint8) for rate in asked]
    for pair, load in zip(pairs, loads, strict=True):
        found.alone.append(load.numel() / max(_streams([pair], [load])))
    for load, took_s in zip(loads, _streams(pairs, loads) if pairs else (), strict=True):
        found.at_once.append(load.numel() / took_s)
    if pairs:
        size = max(1, round(min(asked) * seconds / 8)) * 4
        x = torch.zeros(size // 4)
        found.ring = (
            size,
            statistics.median(_timed(lambda: dist.all_reduce(x)) for _ in range(REPEAT)),
        )
        tiny = torch.zeros(1)
        found.latency_s = statistics.median(
            _timed(lambda: _there_and_back(*pairs[0], tiny)) for _ in range(4 * REPEAT)
        )
    return found


def _matmul_rate(seconds: float) -> float:
    a = torch.rand(SIDE, SIDE)
    a @ a
    dist.barrier()
    count, start_s = 0, time.perf_counter()
    while time.perf_counter() < start_s + seconds:
        a @ a
        count += 1
    return 2 * SIDE**3 * count / (time.perf_counter() - start_s)


def _streams(pairs: Sequence[tuple[int, int]], loads: Sequence[torch.Tensor]) -> list[float]:
    """Return the seconds of each stream, all started at once; the same on all ranks."""
    me, jobs = dist.get_rank(), []
    took_s = torch.zeros(len(pairs), dtype=torch.float64)
    dist.barrier()
    start_s = time.perf_counter()
    for at, ((a, b), load) in enumerate(zip(pairs, loads, strict=True)):
        if me == a:
            jobs.append((-1, dist.isend(load, b)))
        if me == b:
            jobs.append((at, dist.irecv(torch.empty_like(load), a)))
    for at, job in sorted(jobs, key=lambda one: -one[0]):  # the end of a stream is its receipt
        assert job is not None
        job.wait()
        if at >= 0:
            took_s[at] = time.perf_counter() - start_s
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return [float(one) for one in took_s]


def _there_and_back(a: int, b: int, x: torch.Tensor) -> None:
    me = dist.get_rank()
    if me == a:
        dist.send(x, b)
        dist.recv(x, b)
    elif me == b:
        dist.recv(x, a)
        dist.send(x, a)


def _timed(work: Callable[[], object]) -> float:
    """Return the seconds until the last rank is done; the same on all ranks."""
    dist.barrier()
    start_s = time.perf_counter()
    work()
    took_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return float(took_s)


def _of(got: float, want: float) -> str:
    return f"{got / want:.3f}"


if __name__ == "__main__":
    main()
