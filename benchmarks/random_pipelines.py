"""Verify random plans with stages of eight families of models.

    python -m benchmarks.random_pipelines --seeds 10 --families vit bert
    python -m benchmarks.random_pipelines --entries llava gemma3 qwen2.5-vl qwen3-vl glm-4v

The second command verifies tiny sizes of entries of ``benchmarks.coverage``.
Each has 2 to 4 stages of 1 to 3 ranks, 1 to 8 microbatches, and a random program with random shares in
every stage. Exit code 1: some plan differs from one device by more than 1e-9.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from benchmarks.coverage import case_of, entries
from hap.cli.terminal import emit, table
from hap.runtime.verify import Verdict
from tests.random_plans import benchmark_case, verdict
from tests.random_stages import FAMILIES, random_groups, random_staged_plan


def worst(found: Verdict) -> str:
    """Return the largest difference of a verdict, or the tensor that differs first."""
    if not found.ok:
        return f"differs: {found.first_bad}"
    return f"{max(row.error for row in found.rows):.1e}"


def main(argv: Sequence[str] | None = None) -> int:
    """Verify plans and print a row for each; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=4, help="plans of each family")
    parser.add_argument("--entries", nargs="+", metavar="ENTRY", help="models that others wrote")
    args = parser.parse_args(argv)
    rows, failed = [], 0
    for family in args.entries or args.families:
        case = case_of(entries()[family]) if args.entries else benchmark_case(family, "tiny")
        for seed in range(args.seeds):
            groups = random_groups(random.Random(f"{family}/{seed}"))
            plan = random_staged_plan(case, groups, seed)
            found = verdict(case, plan)
            failed += not found.ok
            ranks = " | ".join(map(str, groups))
            assert plan.stages is not None
            delay = plan.stages.stages[0].delay
            again = sum(stage.recompute for stage in plan.stages.stages)
            gathering = sum(stage.gather_each for stage in plan.stages.stages)
            rows.append(
                (
                    family, str(seed), ranks, str(plan.microbatches), str(delay), str(again),
                    str(gathering), worst(found),
                )
            )  # fmt: skip
    head = (
        "family", "seed", "ranks per stage", "microbatches", "delay of weights",
        "stages that run forwards again", "stages that gather in each microbatch", "difference",
    )  # fmt: skip
    emit(table(head, rows))
    emit(f"{len(rows) - failed} of {len(rows)} plans compute what one device does")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
