"""Give the command line hostile inputs; it must answer every one with one paragraph.

    python -m benchmarks.hostile                         all kinds
    python -m benchmarks.hostile --only model cluster    some
    python -m benchmarks.hostile --match lazy -v         by name, with the messages

The exit code is 1 if a case ended with a traceback, hung, or exited with another code than 2
(3 for memory; 0 if the input is usable).
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import hap
from benchmarks.hostile import cluster_files, command_lines, model_files, other_commands, plan_files
from benchmarks.hostile.case import CLUSTER, MODEL, Case, Outcome, run

KINDS = ("model", "cluster", "plan", "command")
MEMORY_BYTES = 16 * 2**30
"""Limit of the process: an input that needs more must be refused."""


def all_cases(folder: Path, plans: int = 200) -> list[Case]:
    """Return the cases of every kind; the plan files are damaged copies of a new one."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "cluster.yaml").write_text(CLUSTER)
    everywhere = hap.PlanOptions(all_devices=True)
    made = hap.api.plan_file(str(folder / "model.py"), folder / "cluster.yaml", options=everywhere)
    made.save(folder / "plan.json")
    return [
        *model_files.cases(), *cluster_files.cases(), *command_lines.cases(),
        *other_commands.cases(folder / "plan.json"),
        *plan_files.cases(folder / "plan.json", plans),
    ]  # fmt: skip


def sample(cases: Sequence[Case], count: int, seed: int = 0) -> list[Case]:
    """Return a sample of the cases, with each kind's proportion preserved."""
    found = list(cases)
    random.Random(seed).shuffle(found)
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--match", default="", help="cases whose name contains this")
    parser.add_argument("--sample", type=int, help="this many cases")
    parser.add_argument("--plans", type=int, default=200, help="damaged plan files")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every message")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    console, start = Console(soft_wrap=True), time.perf_counter()
    bad: list[Outcome] = []
    counts: Counter[tuple[str, int]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        cases = [
            c for c in all_cases(Path(scratch) / "good", options.plans)
            if c.kind in options.only and options.match in c.name
        ]  # fmt: skip
        cases = sample(cases, options.sample) if options.sample else cases
        for number, case in enumerate(cases):
            outcome = run(case, Path(scratch) / f"{number}")
            counts[case.kind, outcome.code] += 1
            if options.verbose:
                console.print(
                    f"[{case.kind}] {case.name}: exit {outcome.code}\n{outcome.message}",
                    markup=False,
                )
            if outcome.problem:
                bad.append(outcome)
                console.print(f"BAD [{case.kind}] {case.name}: {outcome.problem}", markup=False)
    table = Table("kind", "exit code", "cases")
    for (kind, code), times in sorted(counts.items()):
        table.add_row(kind, str(code), str(times))
    console.print(table)
    total = sum(counts.values())
    console.print(f"{total} cases in {time.perf_counter() - start:.0f} s, {len(bad)} wrong")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
