"""Plan a Llama 7B on GPUs whose memory is short: with and without microbatches, and with stages.

    python -m benchmarks.short_memory

256 sequences of 2,048 tokens in bfloat16 autocast, on eight A100 of 40 GB and eight V100 of 32 GB, with 100 Gbit/s
between the machines. Steps are predictions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hap
from hap.capture.building import without_data
from hap.cli.terminal import emit, table
from hap.units import format_seconds

CLUSTER = """
name: a100-v100
links: {between: {bandwidth: 100 Gbit/s, latency: 10 us}}
nodes:
  - {name: a, gpus: 8, type: A100-40}
  - {name: v, gpus: 8, type: V100-32}
"""

OPTIONS = {
    "without microbatches": hap.PlanOptions(accumulate=False),
    "as by default": hap.PlanOptions(),
    "with stages": hap.PlanOptions(stages=True),
}


def _made() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32000, (256, 2048))
    return LlamaForCausalLM(LlamaConfig()), {"input_ids": tokens, "labels": tokens}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row per way to plan; return the exit code."""
    rows = []
    for name, options in OPTIONS.items():
        model, batch = without_data(_made)
        start = time.perf_counter()
        plan = hap.plan(model, batch, CLUSTER, autocast="bfloat16", options=options)
        seconds = time.perf_counter() - start
        stages = str(len(plan.stages.stages)) if plan.stages else "-"
        rows.append(
            (
                name, format_seconds(plan.prediction.step_s), str(plan.microbatches), stages,
                plan.recipe.recompute or "-", str(plan.world_size), f"{seconds:.1f} s",
            )
        )  # fmt: skip
    head = ("plan", "step", "microbatches", "stages", "recomputed", "devices", "planned in")
    emit(table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
