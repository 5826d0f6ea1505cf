"""Gradient accumulation on equal devices: a plan of one stage beside DDP, on an emulated cluster.

    python -m benchmarks.accumulation                           vit and gpt2, four devices
    python -m benchmarks.accumulation --models bert --rate "1 Gbit/s"
    python -m benchmarks.accumulation --memory "40 MiB"         weights in shards

All contenders run a step in four microbatches. *Overlapped* is the plan that the planner makes: weights are
gathered early, and gradients reduced beside the last backward. *As searched* is the same program in the order of
the search, with its reductions after the last backward. *DDP* accumulates in ``no_sync`` until the last
microbatch. They take turns: seconds are medians and interquartile ranges, ratios are medians over the rounds.
Plans are made for the figures of the cluster file. *Predicted* is the ratio of both plans.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.contenders import ACCUMULATING
from benchmarks.contenders.even_ddp import MICROBATCHES
from benchmarks.race import roomy, take_turns
from benchmarks.racing.plans import graph_of
from benchmarks.racing.results import Entry
from hap.capture.model_file import ModelFile, load_model_file
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.ir.plan import Plan, Source
from hap.runtime.testbed import Testbed
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_prediction import predict_pipeline
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer
from hap.units import format_seconds, parse

HERE = Path(__file__).parent
OVERLAPPED, SEARCHED = "overlapped", "as searched"
HEAD = (
    "model", "DDP", OVERLAPPED, SEARCHED, "over DDP", "over searched", "predicted", "gathers",
)  # fmt: skip


def accumulating(file: ModelFile, cluster: Cluster, *, in_order: bool) -> Plan:
    """Return the plan of one stage on all devices, in :data:`MICROBATCHES` microbatches."""
    kind = examine(file.optimizer or default_optimizer)
    search = StageSearch(build_space(graph_of(file)), cluster, kind.states)
    groups = (tuple(range(cluster.world_size)),)
    sketch = Sketch(groups=groups, cuts=(), microbatches=MICROBATCHES, estimate_s=0.0, least_s=0.0)
    found = search.pipeline(sketch, lambda task: StageSynthesizer(
        task, cluster, kind.states
    ).chosen(in_order=in_order))  # fmt: skip
    if found is None:
        raise SystemExit(f"{file.path}: no plan on all devices fits their memory")
    time = found.over_time
    return Plan(
        source=Source(path=str(file.path), function=file.function), graph=time.graph,
        cluster=cluster, optimizer=kind, program=time.program,
        shares=time.shares(MICROBATCHES) or {}, stages=found.stages,
        prediction=predict_pipeline(found, (), ()),
    )  # fmt: skip


def raced(
    bed: Testbed, cluster: Cluster, file: ModelFile, rounds: int
) -> tuple[dict[str, Entry], str]:  # fmt: skip
    """Return the contenders' steps by name, and how often the plans gather weights."""
    with tempfile.TemporaryDirectory() as folder:
        paths, plans = dict[str, Path](), dict[str, Plan]()
        for name in (OVERLAPPED, SEARCHED):
            paths[name] = Path(folder) / f"{name}.json"
            plans[name] = accumulating(file, cluster, in_order=name == OVERLAPPED)
            plans[name].save(paths[name])
        entries = take_turns(bed, file, (ACCUMULATING, *paths), paths, cluster, rounds)
    for entry in entries:
        if plan := plans.get(entry.name):
            entry.predicted_s = plan.prediction.step_s
    each = {stage.gather_each for p in plans.values() if p.stages for stage in p.stages.stages}
    return {e.name: e for e in entries}, "in each microbatch" if each == {True} else "once"


def main(arguments: Sequence[str] | None = None) -> None:
    """Race each model, print a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["vit", "gpt2"])
    parser.add_argument("--size", default="race", help="function of the model files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", help="of the link between devices; by default the cluster's")
    parser.add_argument("--memory", help="of each device for the plans; by default the cluster's")
    options = parser.parse_args(arguments)
    cluster = load_cluster(HERE / "clusters" / "race_even.yaml")
    if options.rate:
        link = replace(cluster.inter, bandwidth_bytes_per_s=parse(options.rate, "bytes/s"))
        cluster = replace(cluster, inter=link)
    if options.memory:
        nbytes = round(parse(options.memory, "bytes"))
        devices = tuple(replace(d, memory_bytes=nbytes) for d in cluster.devices)
        cluster = replace(cluster, devices=devices)
    rows = []
    with Testbed(roomy(cluster), cores=1.0) as bed:
        for name in options.models:
            file = load_model_file(f"{HERE / 'models' / name}.py:{options.size}")
            found, gathers = raced(bed, cluster, file, options.rounds)
            if voids := {e.name: e.void for e in found.values() if not e.counts}:
                raise SystemExit(f"{name}: {voids}")
            shown = [found[n] for n in (ACCUMULATING, OVERLAPPED, SEARCHED)]
            base, ours, searched = shown
            rows.append((
                name, *(f"{format_seconds(e.median_s)} ± {format_seconds(e.spread_s)}" for e in shown),
                f"{_gain(base, ours):.2f}x", f"{_gain(searched, ours):.2f}x",
                f"{searched.predicted_s / ours.predicted_s:.2f}x", gathers,
            ))  # fmt: skip
    emit(table(HEAD, rows, right=range(1, len(HEAD))))


def _gain(slow: Entry, fast: Entry) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))


if __name__ == "__main__":
    main()
