"""Run ``hap profile`` on this device, and compare predicted with measured steps."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu_proof.models import PRECISIONS, singles
from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import ON_CPU, UNPREPARED, measure
from hap.cluster.cluster_file import load_cluster
from hap.plan_simulation import simulate_plan

PART = "profile"
MEDIAN, WORST = 0.06, 0.15


def run(settings: Settings) -> Iterator[Line]:
    """Profile, then one line per model and precision, then the median and the worst error."""
    output = settings.folder / "profiled.yaml"
    words = [sys.executable, "-m", "hap.cli", "profile", "--nproc", "1", "-o", str(output)]
    words += [] if settings.on_gpu else ["--quick"]
    done = subprocess.run(words, capture_output=True, text=True)
    claim = "hap profile --nproc 1 writes a cluster file"
    if done.returncode:
        yield Line(part=PART, claim=claim, outcome=MISSED, reason=done.stderr[-2000:])
        return
    cluster = load_cluster(output)
    rate = cluster.devices[0].flops_per_s["float32"]
    seen = f"{cluster.devices[0].kind}, {rate / 1e12:.3g} TFLOP/s in float32"
    yield Line(part=PART, claim=claim, outcome=MET, seen=seen)
    errors = {}
    for single in singles(settings.device):
        for precision in PRECISIONS:
            found = measure(settings, single, precision, backend="eager")
            if found is not None:
                predicted = simulate_plan(replace(found.plan, cluster=cluster)).run.step_s
                errors[f"{single.name}, {precision}"] = predicted / found.step_s - 1
    yield from _errors(settings, errors)


def _errors(settings: Settings, errors: dict[str, float]) -> Iterator[Line]:
    if not errors:
        yield Line(part=PART, claim="predicted steps", outcome=SKIPPED, reason=UNPREPARED)
        return
    sizes = [abs(error) for error in errors.values()]
    worst = max(errors, key=lambda name: abs(errors[name]))
    told = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
    for claim, size, aim, seen in (
        ("predicted step, median error", statistics.median(sizes), MEDIAN, told),
        ("predicted step, worst error", abs(errors[worst]), WORST, worst),
    ):
        outcome = (MET if size <= aim else MISSED) if settings.on_gpu else SKIPPED
        yield Line(
            part=PART, claim=claim, outcome=outcome, seen=f"{size:.1%} ({seen})",
            aim=f"<= {aim:.0%}", reason="" if settings.on_gpu else ON_CPU,
        )  # fmt: skip
