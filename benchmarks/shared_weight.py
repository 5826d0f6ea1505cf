"""A weight that two stages share, whole and in pieces, on an emulated cluster.

    python -m benchmarks.shared_weight                        a GPT-2 with a table of 32 MB
    python -m benchmarks.shared_weight --rate "100 Mbit/s" --rounds 9

The first stage, of one rank, stores the table. The ranks of the second stage gather it and reduce its
gradient, each behind a link of its own: *whole*, after the last row has arrived and before the first is
sent, or *in pieces*. Both train in the same processes and take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.contenders import base
from benchmarks.models import gpt2
from benchmarks.racing.plans import graph_of
from hap import api
from hap.capture.model_file import load_model_file
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.ir import shared_pieces
from hap.ir.batch import call
from hap.ir.plan import Plan, Source
from hap.runtime.testbed import Testbed
from hap.synthesizer.baselines import data_parallel
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_prediction import predict_pipeline
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer
from hap.units import format_seconds

SIZE = {"layers": 2, "hidden": 128, "heads": 2, "ffn": 256, "vocab": 2**16, "seq": 16}
MICROBATCHES = 4
WHOLE, PIECES = "whole", "in pieces"
LEAST_BYTES = {WHOLE: 2**60, PIECES: shared_pieces.PIECE_BYTES}
HEAD = ("the table crosses", "predicted", "median step", "least", "most", "over whole")
CLUSTER = """\
name: shared
links: {{between: {{bandwidth: {rate}, latency: 200 us}}}}
nodes:
  - {{name: one, count: {ranks}, gpus: 1, type: cpu, memory: 4 GiB, flops: 33 GFLOP/s, memory_bandwidth: 3.3 GB/s, launch: 30 us}}
"""


def model():
    return gpt2.build(**SIZE, dropout=0.0)


def batch():
    return gpt2.inputs(16, SIZE["seq"], SIZE["vocab"])


def pipelined(cluster: Cluster) -> Plan:
    """Return the plan of two stages, one rank and all others, with the rows of a batch in shares."""
    file = load_model_file(f"{__file__}:model")
    kind = examine(file.optimizer or default_optimizer)
    search = StageSearch(build_space(graph_of(file)), cluster, kind.states)
    ranks = tuple(range(cluster.world_size))
    sketch = Sketch(
        groups=(ranks[:1], ranks[1:]), cuts=search.estimates.even_cuts(2),
        microbatches=MICROBATCHES, estimate_s=0.0, least_s=0.0,
    )  # fmt: skip
    found = search.pipeline(sketch, lambda task: StageSynthesizer(
        task, cluster.keep(task.ranks), kind.states, data_parallel(task.space)
    ).chosen())  # fmt: skip
    assert found is not None
    over = found.over_time
    return Plan(
        source=Source(path=str(file.path), function=file.function), graph=over.graph,
        cluster=cluster, optimizer=kind, program=over.program,
        shares=over.shares(MICROBATCHES) or {}, stages=found.stages,
        prediction=predict_pipeline(found, (), ()),
    )  # fmt: skip


def train(path: str, rounds: int) -> dict[str, list[float]]:
    """Return seconds of steps, by how the table crosses."""
    plan, file, modules = Plan.load(path), load_model_file(f"{__file__}:model"), {}
    for way, least in LEAST_BYTES.items():
        shared_pieces.PIECE_BYTES = least
        modules[way] = api.compile(base.built(file), plan, seed=file.seed, check=False)
    optimizers = {way: base.optimizer(file, list(m.parameters())) for way, m in modules.items()}
    seconds: dict[str, list[float]] = {way: [] for way in modules}
    for number in range(rounds + 1):
        for way in list(modules)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.monotonic()
            optimizers[way].zero_grad()
            call(modules[way], plan.local_batch(file.batch(), dist.get_rank())).backward()
            optimizers[way].step()
            dist.barrier()
            if number:
                seconds[way].append(time.monotonic() - begun)
    return seconds


def predicted(cluster: Cluster) -> dict[str, Plan]:
    """Return the plan by how the table crosses: the same program, of other predictions."""
    found = {}
    for way, least in LEAST_BYTES.items():
        shared_pieces.PIECE_BYTES = least
        found[way] = pipelined(cluster)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="200 Mbit/s", help="of each rank's link")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    cluster = load_cluster(CLUSTER.format(ranks=options.ranks, rate=options.rate))
    plans = predicted(cluster)
    with tempfile.TemporaryDirectory() as folder, Testbed(cluster, links="as written") as bed:
        path = Path(folder) / "plan.json"
        plans[WHOLE].save(path)
        told = bed.spawn(train, args=(str(path), options.rounds))[0]
    rows = [
        [way, format_seconds(plan.prediction.step_s), format_seconds(statistics.median(told[way])),
         *(format_seconds(f(told[way])) for f in (min, max)),
         f"{statistics.median(a / b for a, b in zip(told[WHOLE], told[way], strict=True)):.2f}x"]
        for way, plan in plans.items()
    ]  # fmt: skip
    emit(table(HEAD, rows, right=range(1, len(HEAD))))


if __name__ == "__main__":
    main()
