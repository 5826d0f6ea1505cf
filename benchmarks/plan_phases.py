"""Plan one model step by step and print the seconds of each step, as JSON.

    python -m benchmarks.plan_phases benchmarks/models/bert.py benchmarks/clusters/unlike8.yaml

What ``hap plan`` does, taken apart by hand: one search from the first start is timed table by
table, then all the searches as the planner runs them. For :mod:`benchmarks.plan_time`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from hap import torch_private
from hap.capture import capture
from hap.cluster import load_cluster
from hap.model_file import load_model_file
from hap.optimizer import default_optimizer, examine
from hap.synthesizer.baselines import baselines, fewer_devices
from hap.synthesizer.cost import CostModel
from hap.synthesizer.labelling import Aims, Problem
from hap.synthesizer.space import build_space
from hap.synthesizer.synthesize import Synthesizer

Result = TypeVar("Result")


def main(spec: str, cluster_file: str) -> None:
    seconds: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = step()
        seconds[name] = time.perf_counter() - start
        return result

    def build() -> tuple[Any, Any]:
        with torch_private.fake_mode():
            return file.model(), file.batch()

    def alternatives() -> None:
        baselines(space, cluster, states)
        fewer_devices(space, cluster, states)

    file = load_model_file(spec)
    seconds["import"] = time.time() - psutil.Process().create_time()  # Python, torch, the model's
    cluster = load_cluster(cluster_file)
    states = examine(file.optimizer or default_optimizer).states
    model, batch = timed("build", build)
    graph = timed("capture", lambda: capture(model, batch, file.loss))
    space = timed("rules", lambda: build_space(graph))
    synthesizer = Synthesizer(space, cluster, states)
    shares = next(iter(synthesizer.starts()))
    cost = CostModel(graph, space.axes, synthesizer.machine, shares, states)
    problem = timed("tables", lambda: Problem(space, cost, Aims()))
    labelling = timed("elimination", problem.solve)
    assert labelling is not None, "without restrictions there is always a program"
    program = timed("program", lambda: problem.program(labelling))
    pair = timed("simulation", lambda: synthesizer.judge(program, shares))
    timed("shares", lambda: synthesizer.balance(pair))
    timed("all searches", synthesizer.best)
    timed("alternatives", alternatives)
    weights = sum(graph.tensors[i.tensor].nbytes for i in graph.role("parameter"))
    print(json.dumps({"phases_s": seconds, "weights_bytes": weights, "nodes": len(graph.nodes)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
