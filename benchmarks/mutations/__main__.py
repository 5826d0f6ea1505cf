"""Mutate plan files, and check that verification rejects wrong ones.

    python -m benchmarks.mutations --count 2000
    python -m benchmarks.mutations --count 200 --seed 7 --out mutations.json

Mutates plans of four models over one mesh axis and two, and plans of two of them with pipeline
stages. Every mutated file must be refused at load, fail verification, or compute what one device
computes by a comparison that shares no code with verification. Prints the outcomes by kind of
mutation, and exits with 1 on any other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.mutations.judge import LIMIT_S, OUTCOMES, VIOLATIONS
from benchmarks.mutations.trial import Trial, trials


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the mutants and print the counts; return 1 on any violation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="how many mutated plans")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="processor seconds for each")
    parser.add_argument("--out", type=Path, help="write every outcome to this file")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    seen: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for trial in trials(options.count, options.seed, path, options.limit):
            seen.append(trial)
            if trial.outcome in VIOLATIONS:
                place = f"{trial.subject}: {trial.kind}, number {trial.number}"
                print(f"{trial.outcome}: {place}\n{trial.why}\n", file=sys.stderr, flush=True)
    counts = Counter((trial.kind, trial.outcome) for trial in seen)
    table = Table("mutation", *OUTCOMES)
    for kind in dict.fromkeys(trial.kind for trial in seen):
        table.add_row(kind, *(str(counts[kind, outcome] or "") for outcome in OUTCOMES))
    totals = Counter(trial.outcome for trial in seen)
    table.add_row("all", *(str(totals[outcome]) for outcome in OUTCOMES), style="bold")
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table)
    took = time.perf_counter() - began
    violations = sum(totals[outcome] for outcome in VIOLATIONS)
    print(f"{len(seen)} mutated plans in {took:.0f} s, {violations} violations")
    if options.out:
        rows = [trial._asdict() for trial in seen]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if violations else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a plan that hangs would keep the process alive
