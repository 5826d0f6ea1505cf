"""Make the plans of the proof, on any machine with the planner; no GPU is needed.

Random plans come from the tests, which draw valid programs and shares that no cost model would
choose: any row for any operator, uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import hap
from benchmarks.gpu_proof.models import FAMILIES, PRECISIONS, SINGLES, TINY_SINGLES, built
from hap.capture.tracing import capture
from tests.random_plans import make_case, random_plan
from tests.random_stages import FAMILIES as STAGED
from tests.random_stages import random_staged_plan

ONE_GPU = """
nodes:
  - {name: node, gpus: 1, type: H100, memory: 139 GiB}
"""
SEED = 1


def prepare(
    folder: Path, ranks: int, *, families: Sequence[str] = FAMILIES, models: Sequence[str] = (),
    tiny: bool, progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Write the plans to the folder.

    Args:
        families: those of :data:`FAMILIES` to make random plans for; parts skip the others.
        models: names of those to plan for one rank; default: all.
        ranks: number of ranks of the random plans.
        tiny: plan the tiny models for one rank, as for a CPU, instead of the real ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for family in families:
        model, batch, loss, optimizer = built(family)
        for precision in PRECISIONS:
            kind = "random" if precision == "float32" else "autocast"
            progress(f"{kind} plan of {family} for {ranks} ranks")
            graph = capture(model, batch, loss, autocast=_autocast(precision))
            case = make_case(model, batch, loss, optimizer, graph)
            random_plan(case, ranks, SEED).save(folder / f"{kind}-{family}.json")
            if precision == "float32" and family in STAGED and ranks > 1:
                progress(f"random pipeline of {family} for {ranks} ranks")
                groups = (ranks - ranks // 2, *[1] * (ranks // 2))
                random_staged_plan(case, groups, SEED).save(folder / f"staged-{family}.json")
    for single in TINY_SINGLES if tiny else SINGLES:
        if models and single.name not in models:
            continue
        with torch.device("meta"):
            model = single.model()
        for precision in PRECISIONS:
            progress(f"plan of {single.name} in {precision} for one rank")
            plan = hap.plan(
                model, single.batch(), ONE_GPU, optimizer=single.optimizer,
                autocast=_autocast(precision),
            )  # fmt: skip
            plan.save(folder / f"single-{single.name}-{precision}.json")


def _autocast(precision: str) -> str:
    return "" if precision == "float32" else precision
