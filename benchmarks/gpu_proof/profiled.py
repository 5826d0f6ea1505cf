"""Run ``hap profile`` on this device, and compare predicted with measured steps.

The predictions of the catalogue, for which nothing is measured, are compared as well.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import ON_CPU, measured
from hap.cluster.catalogue import find
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan, without_hosts

PART = "profile"
MEDIAN, WORST = 0.06, 0.15
CATALOGUE_MEDIAN, CATALOGUE_WORST = 0.15, 0.3


def run(settings: Settings) -> Iterator[Line]:
    """Profile, then two lines of errors: by the profile, and by the catalogue."""
    output = settings.folder / "profiled.yaml"
    words = [sys.executable, "-m", "hap.cli", "profile", "--nproc", "1", "-o", str(output)]
    words += [] if settings.on_gpu else ["--quick"]
    done = subprocess.run(words, capture_output=True, text=True)
    claim = "hap profile --nproc 1 writes a cluster file"
    if done.returncode:
        yield Line(part=PART, claim=claim, outcome=MISSED, reason=done.stderr[-2000:])
        return
    cluster = load_cluster(output)
    rates = cluster.devices[0].flops_per_s
    told = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {dtype}" for dtype, rate in rates.items())
    yield Line(part=PART, claim=claim, outcome=MET, seen=f"{cluster.devices[0].kind}, {told}")
    yield from _compared(settings, "hap profile", cluster, MEDIAN, WORST)
    name = torch.cuda.get_device_name() if settings.on_gpu else "cpu"
    claim = f"the catalogue's {name}: predicted steps"
    if find(name) is None:
        reason = "the catalogue has no such device"
        yield Line(part=PART, claim=claim, outcome=SKIPPED, reason=reason)
        return
    text = f"nodes:\n  - {{name: node, gpus: 1, type: {name}}}\n"
    yield from _compared(
        settings, f"the catalogue's {name}", load_cluster(text), CATALOGUE_MEDIAN, CATALOGUE_WORST
    )


def _compared(
    settings: Settings, source: str, cluster: Cluster, median: float, worst: float
) -> Iterator[Line]:
    """Yield the median and the worst error of the steps that a cluster's figures predict.

    The same for steps as CUDA graphs, which do not wait for the host.
    """
    for backend in ("eager", "cudagraphs") if settings.on_gpu else ("eager",):
        claim = f"{source}: predicted steps" + (" as CUDA graphs" if backend != "eager" else "")
        errors = {
            name: _predicted_s(found.plan, cluster, backend) / found.step_s - 1
            for name, found in measured(settings, backend=backend)
            if found is not None
        }
        if not errors:
            yield unprepared(PART, claim)
            continue
        farthest = max(errors, key=lambda name: abs(errors[name]))
        told = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
        for which, size, aim, seen in (
            ("median", statistics.median(map(abs, errors.values())), median, told),
            ("worst", abs(errors[farthest]), worst, farthest),
        ):
            outcome = (MET if size <= aim else MISSED) if settings.on_gpu else SKIPPED
            yield Line(
                part=PART, claim=f"{claim}, {which} error", outcome=outcome,
                seen=f"{size:.1%} ({seen})", aim=f"<= {aim:.0%}",
                reason="" if settings.on_gpu else ON_CPU,
            )  # fmt: skip


def _predicted_s(plan: Plan, cluster: Cluster, backend: str) -> float:
    plan = replace(plan, cluster=cluster)
    return simulate_plan(without_hosts(plan) if backend == "cudagraphs" else plan).run.step_s
