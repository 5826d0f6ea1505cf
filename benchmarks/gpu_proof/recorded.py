"""Compare what the planner predicts now with steps that were measured on an H200 and an H100.

    python -m benchmarks.gpu_proof --prepare plans
    python -m benchmarks.gpu_proof.recorded plans

The measurements are those of docs/gpu.md: ``benchmarks/data/h200_steps.json``, by the parts *one rank* and
*cuda graphs*, and ``benchmarks/clusters/h200.yaml``, by ``hap profile`` on the same GPU, likewise for ``h100``,
without CUDA graphs. The steps ran the plans of their time; a later planner's may have fewer operators. Needs
no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.models import Prepared
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.ir.plan import Plan
from hap.plan_simulation import plan_costs, simulate_plan, without_hosts
from hap.synthesizer.cost.peak_memory import memory

BENCHMARKS = Path(__file__).parents[1]
STEPS = {gpu: BENCHMARKS / "data" / f"{gpu.lower()}_steps.json" for gpu in ("H200", "H100")}
CATALOGUE = "nodes:\n  - {{name: node, gpus: 1, type: {gpu}}}\n"
COLUMNS = (
    "model", "plain ms", "planned", "profile", "catalogue", "graphs ms", "profile", "catalogue",
    "memory",
)  # fmt: skip
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
GRAPHS = " of CUDA graphs"


def main() -> None:
    """Print the milliseconds of each recorded step, and predicted over measured time and memory, less one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plans", type=Path, help="the folder of the prepared plans")
    options = parser.parse_args()
    for gpu, file in STEPS.items():
        steps = json.loads(file.read_text())["steps"]
        plans = [
            Prepared.load(options.plans, f"single-{step['model']}-{step['precision']}")
            for step in steps
        ]
        lacking = next((s["model"] for s, p in zip(steps, plans, strict=True) if p is None), "")
        if lacking:
            parser.error(f"{options.plans} has no plan of {lacking}; prepare it")
        compare(gpu, steps, [prepared.plan for prepared in plans if prepared])


def compare(gpu: str, steps: Sequence[dict[str, Any]], plans: Sequence[Plan]) -> None:
    """Print a table of the steps of one GPU, and the median and worst errors."""
    clusters = {
        "profile": load_cluster(str(BENCHMARKS / "clusters" / f"{gpu.lower()}.yaml")),
        "catalogue": load_cluster(CATALOGUE.format(gpu=gpu)),
    }
    errors: dict[str, list[float]] = {}
    rows = []
    for step, plan in zip(steps, plans, strict=True):
        measured_s = step["plain_ms"] / 1e3 * step["planned_over_plain"]
        found = {}
        for name, cluster in clusters.items():
            priced = replace(plan, cluster=cluster)
            found[name] = simulate_plan(priced).run.step_s / measured_s - 1
            if "graphs_ms" in step:
                predicted_s = simulate_plan(without_hosts(priced)).run.step_s
                found[name + GRAPHS] = predicted_s / (step["graphs_ms"] / 1e3) - 1
        found["peak memory"] = peak_bytes(plan) / (step["peak_gib"] * 2**30) - 1
        for name, error in found.items():
            errors.setdefault(name, []).append(abs(error))
        rows.append(_row(step, found))
    emit(gpu)
    emit(table(COLUMNS, rows))
    for name, each in errors.items():
        emit(f"{name}: median {statistics.median(each):.1%} off, worst {max(each):.1%}")


def peak_bytes(plan: Plan) -> float:
    """Return the predicted peak bytes of a plan's first rank, by the planner as it is now."""
    graph, program = plan.whole
    return float(memory(graph, program, plan_costs(plan))[1][0])


def _row(step: dict[str, Any], found: dict[str, float]) -> tuple[str, ...]:
    graphs = [f"{found[n + GRAPHS]:+.0%}" for n in ("profile", "catalogue") if n + GRAPHS in found]
    return (
        f"{step['model']} {SHORT[step['precision']]}", f"{step['plain_ms']}",
        f"{step['planned_over_plain']:.3f}x", f"{found['profile']:+.0%}", f"{found['catalogue']:+.0%}",
        *([f"{step['graphs_ms']}", *graphs] if graphs else ["-", "-", "-"]),
        f"{found['peak memory']:+.1%}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
