"""Plan a 7B model on GPUs whose memory is short: with and without microbatches, and with stages.

    python -m benchmarks.short_memory           # Llama 7B
    python -m benchmarks.short_memory --images  # LLaVA 7B

Llama: 256 sequences of 2,048 tokens in bfloat16 autocast, on eight A100 of 40 GB and eight V100 of 32 GB, with
100 Gbit/s between the machines. LLaVA: 256 prompts of an image of 336 x 336 pixels and 128 tokens, in float32, on four
A100 of 40 GB and four V100 of 16 GB at 25 Gbit/s. Steps are predictions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hap
from benchmarks.zoo.image_text import IMAGE_TEXT
from hap.capture.building import without_data
from hap.cli.terminal import emit, table
from hap.errors import InfeasibleError
from hap.units import format_seconds

CLUSTER = """
name: a100-v100
links: {between: {bandwidth: 100 Gbit/s, latency: 10 us}}
nodes:
  - {name: a, gpus: 8, type: A100-40}
  - {name: v, gpus: 8, type: V100-32}
"""

UNLIKE8 = Path(__file__).parent / "clusters" / "unlike8.yaml"

OPTIONS = {
    "without microbatches": hap.PlanOptions(accumulate=False),
    "as by default": hap.PlanOptions(),
    "with stages": hap.PlanOptions(stages=True),
}

TIMES = 4
"""Batches of the published model's entry that make one here."""

Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _llama() -> Made:
    tokens = torch.randint(0, 32000, (256, 2048))
    return LlamaForCausalLM(LlamaConfig()), {"input_ids": tokens, "labels": tokens}


def _llava() -> Made:
    (entry,) = (e for e in IMAGE_TEXT if e.name == "llava")
    model, batch = entry.full()
    return model, {name: torch.cat([rows] * TIMES) for name, rows in batch.items()}


def _planned(make: Callable[[], Made], cluster: Any, autocast: str, options: Any) -> list[str]:
    """Return the cells of a plan; dashes if nothing fits."""
    model, batch = without_data(make)
    start = time.perf_counter()
    try:
        plan = hap.plan(model, batch, cluster, autocast=autocast, options=options)
    except InfeasibleError:
        return ["does not fit", *["-"] * 4, f"{time.perf_counter() - start:.1f} s"]
    seconds = time.perf_counter() - start
    stages = str(len(plan.stages.stages)) if plan.stages else "-"
    return [
        format_seconds(plan.prediction.step_s), str(plan.microbatches), stages,
        plan.recipe.recompute or "-", str(plan.world_size), f"{seconds:.1f} s",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row per way to plan; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", action="store_true", help="plan LLaVA")
    parser.add_argument("--plans", nargs="+", choices=OPTIONS, default=[*OPTIONS], help="rows")
    args = parser.parse_args(argv)
    case = (_llava, UNLIKE8, "") if args.images else (_llama, CLUSTER, "bfloat16")
    rows = [(name, *_planned(*case, OPTIONS[name])) for name in args.plans]
    head = ("plan", "step", "microbatches", "stages", "recomputed", "devices", "planned in")
    emit(table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
