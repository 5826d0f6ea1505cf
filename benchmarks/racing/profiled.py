"""The cluster as the profiler measures it inside the testbed: all that the race plans by."""

from __future__ import annotations

import argparse

from benchmarks.racing.plans import Progress
from hap.cluster import Cluster
from hap.runtime.testbed import Testbed


def profiled(bed: Testbed, options: argparse.Namespace, cluster: str, told: Progress) -> Cluster:
    """The emulated cluster."""
    return bed.cluster
