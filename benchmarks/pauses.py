"""Durations of runs and pauses of a throttled rank, with and without the quota tick.

    python -m benchmarks.pauses --fractions 0.1 0.4

A rank with a fraction of a core spins and reads the clock; gaps of more than half a millisecond
are pauses.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from unittest.mock import patch

from hap.cli.terminal import emit, table
from hap.runtime.testbed import quotas
from hap.units import format_seconds

SPIN = """
import sys, time
sys.stdin.readline()
last = begun = time.perf_counter()
end = last + 4
while last < end:
    now = time.perf_counter()
    if now - last > 5e-4:
        print(last - begun, now - last)
        begun = now
    last = now
"""


def spin(fraction: float, *, beat: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of each run and of each pause of a rank."""
    without = patch.object(quotas, "beat", lambda core: nullcontext())
    with nullcontext() if beat else without, quotas.cpu_quotas([fraction]) as made:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SPIN]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            made.place(0, process.pid)
            told, _ = process.communicate("\n")
    rows = [tuple(map(float, line.split())) for line in told.splitlines()]
    return [run for run, _ in rows], [pause for _, pause in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Spin and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.05, 0.1, 0.4])
    rows = []
    for fraction in parser.parse_args(arguments).fractions:
        for beat in (True, False):
            runs, pauses = spin(fraction, beat=beat)
            times = (median(runs), max(runs), median(pauses), max(pauses))
            rows.append((f"{fraction:g}", "yes" if beat else "no", *map(format_seconds, times)))
    head = ("fraction", "beat", "runs for", "at most", "stands still for", "at most")
    emit(table(head, rows, right=range(2, 6)))


if __name__ == "__main__":
    main()
