"""Exchanges on CPUs: the runtime's messages beside gloo's own collectives.

    python -m benchmarks.messages --ranks 4 --rate "200 Mbit/s"

Ranks on an emulated cluster of equal devices, each with a link of the given rate, take turns with
both, and print the median seconds of each over the link's time for the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.runtime import messages
from hap.runtime.testbed import Testbed
from hap.units import format_bytes, format_seconds, parse

SIZES = (2**18, 2**20, 2**22, 2**23)
"""Bytes that each rank sends."""
CLUSTER = """\
name: even
links:
  between: {{bandwidth: {rate}, latency: 200 us}}
nodes:
  - {{name: one, count: {ranks}, gpus: 1, type: P100}}
"""


Call = Callable[[], object]


def ways(count: int) -> dict[str, tuple[Call, Call]]:
    """Return collective -> (a call of gloo's, a call of the runtime's).

    Args:
        count: elements for each other rank.
    """
    n = dist.get_world_size()
    part, whole, out = torch.ones(count), torch.ones(n * count), torch.empty(n * count)
    counts = [count] * n
    return {
        "all_to_all": (
            lambda: dist.all_to_all_single(out, whole),
            lambda: messages.all_to_all(out, whole, counts, counts, None),
        ),
        "all_gather": (
            lambda: messages.all_gather_single(out, part),
            lambda: messages.all_gather(out, part, None),
        ),
        "reduce_scatter": (
            lambda: messages.reduce_scatter_single(part, whole),
            lambda: messages.reduce_scatter(part, whole, None),
        ),
    }


def measure(sizes: Sequence[int], rounds: int) -> list[tuple[str, int, float, float]]:
    """Return (collective, bytes that a rank sends, median seconds by gloo, and by messages)."""
    found = []
    for nbytes in sizes:
        for name, both in ways(max(1, nbytes // (dist.get_world_size() - 1) // 4)).items():
            seconds: tuple[list[float], list[float]] = ([], [])
            for number in range(rounds + 1):
                for taken, call in zip(seconds, both, strict=True):
                    dist.barrier()
                    begun = time.monotonic()
                    call()
                    dist.barrier()
                    if number:  # the first one makes connections
                        taken.append(time.monotonic() - begun)
            found.append((name, nbytes, *map(statistics.median, seconds)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="200 Mbit/s", help="of each rank's link")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    cluster = load_cluster(CLUSTER.format(**vars(options)))
    with Testbed(cluster, links="as written") as bed:
        told = bed.spawn(measure, args=(SIZES, options.rounds))[0]
        rate = parse(options.rate, "bytes/s")
    rows = [
        [name, format_bytes(nbytes), *(
            text for s in seconds for text in (format_seconds(s), f"{s * rate / nbytes:.2f}x")
        )] for name, nbytes, *seconds in told
    ]  # fmt: skip
    link = "of the link"
    emit(table(["collective", "a rank sends", "gloo", link, "messages", link], rows))


if __name__ == "__main__":
    main()
