"""The testbed of the HAP paper in simulation: every baseline and the plan, on 8 to 64 GPUs.

    python -m benchmarks.paper_cluster                 all cells; finished ones are kept
    python -m benchmarks.paper_cluster --only vgg19/8  cells with this text in their name
    python -m benchmarks.paper_cluster --write-docs    also docs/paper-testbed.md and its plot

A cell is a model on a cluster, planned as by ``hap plan`` and by ``hap plan --compare --stages``.
Nothing is trained: all times are predictions of the planner's own simulator. Each finished cell is written to
the results file, so that an interrupted run can continue; ``--fresh``
discards the file. The machines are the paper's (EuroSys'24): two with V100s and six with
P100s, 1, 2, 4 or 8 GPUs of each in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.models import bert, bert_moe, vgg19, vit
from benchmarks.paper_document import (
    BASE,
    EVERYONE,
    KEPT,
    PLAN,
    STAGED,
    plans,
    plot,
    tables,
    write_document,
)  # fmt: skip
from benchmarks.paper_document import CONSTANTS as CONSTANTS_8
from hap import api
from hap.capture import torch_private
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError
from hap.ir.plan import Plan
from hap.ir.prediction import Alternative
from hap.synthesizer.baselines import METHODS
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.plan_prediction import alternatives
from hap.synthesizer.search.program_space import build_space

HERE = Path(__file__).parent
SAMPLES = 32
"""Samples per GPU."""

COMMAND = "python -m benchmarks.paper_cluster --write-docs"

UNTIED = "bert_untied"
"""The model that is planned last."""

MODELS: Mapping[str, Callable[[int], tuple[Any, Any]]] = {
    "vgg19": lambda gpus: (vgg19.build(), vgg19.inputs(SAMPLES * gpus)),
    "vit": lambda gpus: (vit.build(), vit.inputs(SAMPLES * gpus)),
    "bert": lambda gpus: (bert.build(), bert.inputs(SAMPLES * gpus)),
    UNTIED: lambda gpus: (bert.build(tied=False), bert.inputs(SAMPLES * gpus)),
    "bert_moe": lambda gpus: (bert_moe.build(experts=2 * gpus), bert_moe.inputs(SAMPLES * gpus)),
}
"""Name -> model and global batch for a number of GPUs: the weak scaling of the paper.

In the paper's published code, BERT's output layer is not tied to its word embedding:
``bert_untied``. The usual model is ``bert``.
"""

MACHINES = """\
name: {name}
links:
  between: {{bandwidth: {between}, latency: 30 us}}
nodes:
  - {{name: v100, count: 2, gpus: {gpus}, type: V100-16{v100}}}
  - {{name: p100, count: 6, gpus: {gpus}, type: P100{p100}}}
"""

# The paper's planner has a rate per device and ignores launches and memory traffic. Its
# rates per collective, of whole tensors, are those of rings of 0.71 to 0.83 GB/s among 8 ranks.
FREE = ", memory_bandwidth: 1000 TB/s, launch: 0 s"
CONSTANTS = {
    "between": "0.78 GB/s",
    "v100": f", flops: 3.86 TFLOP/s{FREE}",
    "p100": f", flops: 2.15 TFLOP/s{FREE}",
}
CATALOGUE = {"between": "10.4 Gbit/s", "v100": "", "p100": ""}


def machines(per_machine: int, figures: Mapping[str, str], name: str) -> Cluster:
    return load_cluster(MACHINES.format(gpus=per_machine, name=name, **figures))


CLUSTERS: Mapping[str, Callable[[], Cluster]] = {
    "8": lambda: machines(1, CATALOGUE, "8"),
    CONSTANTS_8: lambda: machines(1, CONSTANTS, CONSTANTS_8),
    "16": lambda: machines(2, CATALOGUE, "16"),
    "29": lambda: load_cluster(HERE / "clusters" / "irregular29.yaml"),
    "32": lambda: machines(4, CATALOGUE, "32"),
    "64": lambda: machines(8, CATALOGUE, "64"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the missing cells, print the tables, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="cells whose name (model/cluster) holds this")
    parser.add_argument("--results", type=Path, default=Path("build/paper_cluster.json"))
    parser.add_argument("--fresh", action="store_true", help="plan again what is in the results")
    parser.add_argument("--write-docs", action="store_true", help="docs/paper-testbed.{md,svg}")
    options = parser.parse_args(arguments)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = {}
    if options.results.exists() and not options.fresh:
        done = json.loads(options.results.read_text())
    cells = sorted(((m, c) for c in CLUSTERS for m in MODELS), key=lambda mc: mc[0] == UNTIED)
    chosen = [(m, c) for m, c in cells if options.only in f"{m}/{c}"]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen))
        for model, cluster in chosen:
            progress.update(task, description=f"{model}/{cluster}")
            if f"{model}/{cluster}" not in done:
                done[f"{model}/{cluster}"] = cell(model, CLUSTERS[cluster]())
                options.results.write_text(json.dumps(done, indent=1))
            progress.advance(task)
    text = tables(done) + plans(done)
    console.print(text, markup=False)
    if options.write_docs:
        docs = HERE.parent / "docs"
        plot(done, docs / "paper-testbed.svg")
        write_document(docs / "paper-testbed.md", text, COMMAND)


def cell(model: str, cluster: Cluster) -> dict[str, Any]:
    """Plan one cell without stages and with them: the rows, the plans first, as plain data.

    If the plan leaves devices out, a plan for all devices is made as well, and DP-CP on those kept.
    """
    start = time.process_time()
    with torch_private.fake_mode():
        module, batch = MODELS[model](cluster.world_size)

    def planned(**options: Any) -> Plan:
        return api.plan(
            module, batch, cluster, optimizer=torch.optim.Adam, options=PlanOptions(**options)
        )

    try:
        plan = planned()
        staged = planned(compare=True, stages=True)
    except InfeasibleError as error:
        return {"infeasible": str(error), "rows": [], "cpu_s": time.process_time() - start}
    rows = [_own(PLAN, plan), _own(STAGED, staged)]
    if plan.left_out:
        with contextlib.suppress(InfeasibleError):  # devices may be left out for lack of memory
            rows.append(_own(EVERYONE, planned(all_devices=True)))
        rows.append(_data_parallel(plan))
    rows += [_row(other) for other in staged.prediction.alternatives]
    return {"rows": rows, "cpu_s": time.process_time() - start}


def _data_parallel(plan: Plan) -> dict[str, Any]:
    """Return the row of DP-CP on the devices of a plan."""
    method = next(method for method in METHODS if method.name == BASE)
    pair = method.plan(build_space(plan.graph), plan.cluster, plan.optimizer.states)
    (row,) = alternatives(plan.graph, {KEPT: pair}, {}, {})
    return _row(row)


def _own(name: str, plan: Plan) -> dict[str, Any]:
    p = plan.prediction
    return {
        "name": name,
        "step_s": p.step_s,
        "communicate_s": p.communicate_s,
        "communicate_bytes": sum(c.nbytes for c in p.collectives),
        "peak_bytes": max(rank.peak_bytes for rank in p.ranks),
        "lacking_bytes": 0,
        "note": "",
        "left_out": len(plan.left_out),
        "two_axes": plan.inside is not None,
        "stages": [len(stage.ranks) for stage in plan.stages.stages] if plan.stages else [],
        "microbatches": plan.microbatches if plan.stages else 1,
        "busiest": max(1 - rank.wait_s / p.step_s for rank in p.ranks),
        "bounds": [asdict(bound) for bound in p.bounds],
        "collectives": [asdict(c) for c in p.collectives],
        "shares": {name: list(units) for name, units in plan.shares.items()},
    }


def _row(other: Alternative) -> dict[str, Any]:
    return asdict(other)


if __name__ == "__main__":
    main()
