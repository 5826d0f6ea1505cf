"""Measure a cluster with the profiler inside the testbed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.racing.plans import Progress
from hap.cli.profiling import Settings
from hap.cli.testbed_command import profile_hosts
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.runtime.testbed import Testbed


def profiled(bed: Testbed, path: Path, told: Progress, *, quick: bool) -> Cluster:
    """Return the cluster file at ``path``; if there is none, measure it, or complete the samples
    of an interrupted run.

    Raises:
        HapError: A rank died.
    """
    if path.exists():
        return load_cluster(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = Settings(output=str(path.resolve()), quick=quick, resume=True)

    def heard(done: int, total: int, what: str) -> None:
        told(f"profiling, {done} of {total}: {what}")

    return profile_hosts(bed, settings, heard).cluster
