"""Compare what the planner predicts now with steps that were measured on an H200.

    python -m benchmarks.gpu_proof --prepare plans
    python -m benchmarks.gpu_proof.recorded plans

The measurements are those of docs/gpu.md: ``benchmarks/data/h200_steps.json``, by the part *one rank*,
and ``benchmarks/clusters/h200.yaml``, by ``hap profile`` on the same GPU. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.models import Prepared
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.ir.plan import Plan
from hap.plan_simulation import plan_costs, simulate_plan
from hap.synthesizer.cost.peak_memory import memory

BENCHMARKS = Path(__file__).parents[1]
STEPS = BENCHMARKS / "data" / "h200_steps.json"
CLUSTERS = {
    "profile": str(BENCHMARKS / "clusters" / "h200.yaml"),
    "catalogue": "nodes:\n  - {name: node, gpus: 1, type: H200}\n",
}
COLUMNS = ("model", "plain", "planned", "operators", *CLUSTERS, "peak memory", "predicted")


def main() -> None:
    """Print predicted over measured, less one, of each recorded step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plans", type=Path, help="the folder of the prepared plans")
    options = parser.parse_args()
    clusters = {name: load_cluster(text) for name, text in CLUSTERS.items()}
    errors: dict[str, list[float]] = {name: [] for name in (*CLUSTERS, "peak memory")}
    rows = []
    for step in json.loads(STEPS.read_text())["steps"]:
        prepared = Prepared.load(options.plans, f"single-{step['model']}-{step['precision']}")
        if prepared is None:
            parser.error(f"{options.plans} has no plan of {step['model']}; prepare it")
        measured_s = step["plain_ms"] / 1e3 * step["planned_over_plain"]
        found = {}
        for name, cluster in clusters.items():
            predicted_s = simulate_plan(replace(prepared.plan, cluster=cluster)).run.step_s
            found[name] = predicted_s / measured_s - 1
        found["peak memory"] = peak_bytes(prepared.plan) / (step["peak_gib"] * 2**30) - 1
        for name, error in found.items():
            errors[name].append(abs(error))
        rows.append(_row(step, prepared.plan, found))
    emit(table(COLUMNS, rows))
    for name, each in errors.items():
        emit(f"{name}: median {statistics.median(each):.1%} off, worst {max(each):.1%}")


def peak_bytes(plan: Plan) -> float:
    """Return the predicted peak bytes of a plan's first rank, by the planner as it is now."""
    graph, program = plan.whole
    return float(memory(graph, program, plan_costs(plan))[1][0])


def _row(step: dict[str, Any], plan: Plan, found: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{step['model']}, {step['precision']}", f"{step['plain_ms']} ms",
        f"{step['planned_over_plain']:.3f}x", str(len(plan.graph.nodes)),
        *(f"{found[name]:+.0%}" for name in CLUSTERS),
        f"{step['peak_gib']:.2f} GiB", f"{found['peak memory']:+.1%}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
