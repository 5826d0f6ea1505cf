"""Overhead of the runtime for the architectures of :mod:`benchmarks.zoo`, in their tiny sizes.

    python -m benchmarks.zoo_steps                    all of them
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

from benchmarks.coverage_results import entries
from benchmarks.zoo.optional import missing, package

SLOW = 1.2
"""Ratio above which an architecture is counted as slow."""


def main() -> None:
    """Race the architectures, and print each one's steps: planned, eager, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # race this one, print its figures
    options = parser.parse_args()
    from benchmarks.one_rank import KEEP_MEMORY, PAIRS, Result  # after transformers, see below

    if options.one:
        print(json.dumps(race(options.one, options.rounds)))
        return
    if unknown := sorted({*(options.only or ())} - {*entries()}):
        parser.error(f"no architecture {', '.join(unknown)}")
    offline = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | KEEP_MEMORY | offline
    ratios: dict[str, float] = {}
    for name in options.only or entries():
        if lack := missing(entries()[name].requires):
            print(f"{name:42} skipped: {lack}", flush=True)
            continue
        words = [sys.executable, "-m", "benchmarks.zoo_steps", "--one", name]
        words += ["--rounds", str(options.rounds)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            print(f"{name:42} {(done.stderr.strip().splitlines() or ['no word'])[-1]}", flush=True)
            continue
        found = Result(**json.loads(done.stdout.splitlines()[-1]))
        ratios[name] = found.ratio("eager")
        planned, eager = (1e3 * median(found.seconds[which]) for which in PAIRS["eager"])
        print(f"{name:42} {planned:7.1f} ms {eager:7.1f} ms {ratios[name]:5.2f}", flush=True)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        slow = sum(value > SLOW for value in ratios.values())
        print(f"{len(ratios)} architectures: geometric mean {mean:.3f}, {slow} above {SLOW}")


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
