"""Latency and bandwidth of gloo between throttled processes, for demo4.yaml's link.

    python -m benchmarks.gloo_links

Times all-reduces of two sizes on four processes at 80, 80, 20 and 20 % of a core and solves
the ring's formula, 2 log2(n) latency + 2 (n-1)/n bytes / bandwidth, for its two figures.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.demo import FRACTIONS
from hap.runtime.launch import spawn
from hap.runtime.testbed.quotas import cpu_quotas
from hap.units import format_bandwidth, format_seconds

SIZES = (1 << 10, 1 << 24)
REPEAT = 9


def main() -> None:
    """Print the two figures."""
    with cpu_quotas(FRACTIONS) as quotas:
        small_s, large_s = spawn(_rank, len(FRACTIONS), before_rank=quotas.place)[0]
    n = len(FRACTIONS)
    latency_s = small_s / (2 * math.ceil(math.log2(n)))
    rate = 2 * (n - 1) / n * (SIZES[1] - SIZES[0]) / (large_s - small_s)
    print(f"all-reduce of 1 KiB {format_seconds(small_s)}, of 16 MiB {format_seconds(large_s)}")
    print(f"latency {format_seconds(latency_s)}, bandwidth {format_bandwidth(rate)}")


def _rank() -> tuple[float, float]:
    return _median_s(SIZES[0]), _median_s(SIZES[1])


def _median_s(nbytes: int) -> float:
    x = torch.zeros(nbytes // 4)
    seconds = []
    for _ in range(REPEAT):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
