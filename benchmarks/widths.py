"""Seconds of products by the width of their rows: the cost of a shard's width.

    python -m benchmarks.widths [--rows 1024] [--width 256] [--out 6544 6552 6554 6556 6560]

One thread. Prints milliseconds of a linear layer's forward and of the gradients of its input and
weight, as ranks on the CPU run them, with freed memory kept.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from hap.cli.terminal import console, table
from hap.profiler.call_timing import FULL, seconds_per_call
from hap.runtime.launch import keep_memory

CPU = torch.device("cpu")


def layer(rows: int, width: int, out: int) -> list[float]:
    """Return the seconds of the forward, of the input's gradient and of the weight's."""
    x, weight, grad = torch.randn(rows, width), torch.randn(out, width), torch.randn(rows, out)
    bias = torch.randn(out)
    calls = (
        lambda: torch.addmm(bias, x, weight.t()), lambda: torch.mm(grad, weight),
        lambda: torch.mm(grad.t(), x),
    )  # fmt: skip
    return [statistics.median(seconds_per_call(call, CPU, FULL)) for call in calls]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=int, nargs="+", default=[6544, 6552, 6554, 6556, 6560])
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    listed = []
    for out in options.out:
        found = layer(options.rows, options.width, out)
        listed.append((str(out), str(out % 16), *(f"{s * 1e3:.1f}" for s in found)))
    head = ("columns", "over 16", "forward, ms", "input's gradient", "weight's gradient")
    console().print(table(head, listed, right=range(5)))


if __name__ == "__main__":
    main()
