"""Overhead of the runtime for the architectures of :mod:`benchmarks.zoo`, in their tiny sizes.

    python -m benchmarks.zoo_steps                    all of them, the slowest first
    python -m benchmarks.zoo_steps --only u-net bert  these alone

A planned step on one rank takes turns with the plain eager step, as in :mod:`benchmarks.one_rank`. In tiny
models the number of kernels decides, so a ratio shows which models run more of them than eager PyTorch does;
it is not that of the published size. Each architecture has its own process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.coverage_results import entries
from benchmarks.zoo.optional import missing, package


def main() -> None:
    """Race the architectures and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # race this one, print its figures
    options = parser.parse_args()
    if options.one:
        print(json.dumps(race(options.one, options.rounds)))
        return
    names = [name for name in options.only or entries() if not missing(entries()[name].requires)]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    seconds: dict[str, dict[str, list[float]]] = {}
    for name in track(names, console=console, transient=True):
        words = [sys.executable, "-m", "benchmarks.zoo_steps", "--one", name]
        words += ["--rounds", str(options.rounds)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
            console.print(f"{name}: {reason}")
            continue
        seconds[name] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    table = Table(box=None, title="one tiny training step on one rank", title_justify="left")
    for column in ("model", "planned", "eager", "ratio"):
        table.add_column(column, justify="left" if column == "model" else "right")
    ratios = {name: ratio(found) for name, found in seconds.items()}
    for name in sorted(ratios, key=ratios.__getitem__, reverse=True):
        steps = [f"{1e3 * median(seconds[name][which]):.1f} ms" for which in ("planned", "eager")]
        table.add_row(name, *steps, f"{ratios[name]:.2f}")
    console.print(table)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        console.print(f"{len(ratios)} architectures, geometric mean {mean:.3f}")


def environment() -> dict[str, str]:
    """Return the environment of a process that keeps freed memory and stays offline."""
    from benchmarks.one_rank import KEEP_MEMORY

    return os.environ | KEEP_MEMORY | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}


def ratio(seconds: dict[str, list[float]]) -> float:
    """Return the median over rounds of planned over eager."""
    return median(a / b for a, b in zip(seconds["planned"], seconds["eager"], strict=True))


def race(name: str, rounds: int) -> dict[str, object]:
    """Race one architecture, and return the figures of :class:`benchmarks.one_rank.Result`."""
    from benchmarks import one_rank

    entry = entries()[name]
    model, batch = entry.tiny()
    case = one_rank.Case(
        name=name, model=lambda: model, batch=lambda: batch, loss=entry.loss, fixed=entry.fixed
    )
    return asdict(one_rank.race(case, rounds, ["eager"]))


if __name__ == "__main__":
    if not missing("transformers"):
        package("transformers")  # before modules that import it beside any torchvision
    main()
