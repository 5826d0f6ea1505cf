"""Plan one model step by step and print the seconds of each step, as JSON.

    python -m benchmarks.plan_phases benchmarks/models/bert.py benchmarks/clusters/unlike8.yaml

Steps of ``hap plan``: capture, rules, then all the searches of the planner, or with
``--search`` one search from the first start, table by table, three times. Used by
:mod:`benchmarks.plan_time`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from hap.capture import torch_private
from hap.capture.model_file import load_model_file
from hap.capture.tracing import capture
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cluster.cluster_file import load_cluster
from hap.errors import InfeasibleError
from hap.gc_pause import gc_paused
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.planner import choose
from hap.synthesizer.search.cost_tables import Problem
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.synthesize import Synthesizer

Result = TypeVar("Result")

SEARCH = ("tables", "elimination", "program")
"""The phases of one search."""

PLANNING = ("capture", "rules", "searches")
"""The phases between a model and its plan."""


@gc_paused()  # like hap plan
def main(spec: str, cluster_file: str, *, search_only: bool, mesh: bool) -> None:
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def timed(name: str, step: Callable[[], Result]) -> Result:
        start, used = time.perf_counter(), processor_s()
        result = step()
        wall.setdefault(name, []).append(time.perf_counter() - start)
        cpu.setdefault(name, []).append(processor_s() - used)
        return result

    def build() -> tuple[Any, Any]:
        with torch_private.fake_mode():
            return file.model(), file.batch()

    def search() -> Any:
        cost = CostModel(graph, space.axes, synthesizer.hardware, shares, states)
        problem = timed("tables", lambda: Problem(space, cost))
        labelling = timed("elimination", problem.solve)
        assert labelling is not None, "without restrictions there is always a program"
        return timed("program", lambda: problem.program(labelling))

    def searches() -> bool:
        try:
            choose(space, cluster, states, PlanOptions(mesh=mesh))
        except InfeasibleError:
            return False
        return True

    file = load_model_file(spec)
    wall["import"] = [time.time() - psutil.Process().create_time()]  # Python, torch, the model's
    cpu["import"] = [processor_s()]
    cluster = load_cluster(cluster_file)
    states = examine(file.optimizer or default_optimizer).states
    model, batch = timed("build", build)
    graph = timed("capture", lambda: capture(model, batch, file.loss))
    space = timed("rules", lambda: build_space(graph))
    fits = None
    if search_only:
        synthesizer = Synthesizer(space, cluster, states)
        shares = next(iter(synthesizer.starts()))
        for _ in range(3):
            search()
    else:
        fits = timed("searches", searches)
    print(
        json.dumps(
            {
                "phases_s": {name: statistics.median(times) for name, times in wall.items()},
                "phases_cpu_s": {name: statistics.median(times) for name, times in cpu.items()},
                "fits": fits,
                "peak_bytes": peak_bytes(),
                "weights_bytes": sum(
                    graph.tensors[i.tensor].nbytes for i in graph.role("parameter")
                ),
                "nodes": len(graph.nodes),
            }
        )
    )


def processor_s() -> float:
    """Return processor seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def peak_bytes() -> int:
    """Return the largest resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("cluster")
    parser.add_argument("--search", action="store_true", help="one search alone, three times")
    parser.add_argument("--mesh", action="store_true", help="over two mesh axes instead of one")
    given = parser.parse_args()
    main(given.model, given.cluster, search_only=given.search, mesh=given.mesh)
