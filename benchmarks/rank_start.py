"""Seconds until ranks of this machine run: forks of a server, and processes that import everything.

python -m benchmarks.rank_start --ranks 4
"""

from __future__ import annotations

import argparse
import time

from benchmarks.models import gpt2
from hap.runtime.launch import Where, spawn


class ImportingAll(Where):
    """This machine as an emulated host, whose ranks are no forks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    for name, where in (("forks", None), ("importing", ImportingAll())):
        seconds = []
        for _ in range(3):  # the first one starts the server
            begun = time.perf_counter()
            spawn(families, ranks, where=where)
            seconds.append(time.perf_counter() - begun)
        print(f"{ranks} ranks, {name}: {', '.join(f'{s:.2f}' for s in seconds)} s")


def families() -> str:
    """Return a name of the model's module: its import is what ranks need."""
    return gpt2.__name__


if __name__ == "__main__":
    main()
