"""The runtime's data parallelism beside DistributedDataParallel, on the same alike ranks.

    python -m benchmarks.data_parallel                    the race's models on two ranks
    python -m benchmarks.data_parallel --only bert --rate "200 Mbit/s"

Two alike ranks on this machine train by a data-parallel plan and by DDP in turn, in the same
processes, each first in every other round. Processor seconds are those of all threads of a rank: under
a quota they decide the step. The ratio is the median of the rounds' ratios, over both ranks.
Wall seconds are not limited by a quota or a link here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.contenders.base import Contender, Setting
from benchmarks.contenders.even_ddp import EvenDDP
from benchmarks.contenders.planned import Planned
from benchmarks.racing import plans
from benchmarks.racing.cell import global_batches
from hap.capture.model_file import load_model_file
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.runtime.launch import keep_memory, spawn
from hap.units import format_seconds

MODELS = Path(__file__).parent / "models"
NAMES = ("vit", "bert", "gpt2", "vgg19", "wide_mlp")
CLUSTER = """
name: pair
links: {{between: {{bandwidth: {rate}, latency: 200 us}}}}
nodes:
  - {{name: one, count: 2, gpus: 1, type: cpu, memory: 4 GiB, flops: 33 GFLOP/s, memory_bandwidth: 3.3 GB/s, launch: 30 us}}
"""
METHOD = "data parallel, even"
WARM_UP = 2
HEAD = ("model", "plan", "DDP", "plan over DDP", "lowest", "highest", "wall")

Seconds = dict[str, list[float]]


def train(setting: Setting, rounds: int) -> tuple[Seconds, Seconds, dict[str, list[float]]]:
    """Return processor seconds, wall seconds and losses of each contender on this rank."""
    keep_memory()
    contenders: dict[str, Contender] = {"plan": Planned(setting), "ddp": EvenDDP(setting)}
    processor_s, wall_s, losses = (defaultdict(list) for _ in range(3))
    for number, batch in enumerate(global_batches(setting.file, WARM_UP + rounds)):
        for name in list(contenders) if number % 2 else list(contenders)[::-1]:
            dist.barrier()
            begun, busy = time.monotonic(), time.process_time()
            loss = contenders[name].step(batch)
            took, used = time.monotonic() - begun, time.process_time() - busy
            losses[name].append(loss)
            if number >= WARM_UP:
                processor_s[name].append(used)
                wall_s[name].append(took)
    return dict(processor_s), dict(wall_s), dict(losses)


def main(arguments: Sequence[str] | None = None) -> None:
    """Race each model, print a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", default="1 Gbit/s", help="of the link that the plan is made for")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cluster = load_cluster(CLUSTER.format(rate=options.rate))
    rows = []
    for name in options.only:
        spec = f"{MODELS / name}.py:race"
        with TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            plans.baseline(spec, cluster, METHOD).save(path)
            setting = Setting(
                file=load_model_file(spec),
                devices=tuple(d.name for d in cluster.devices),
                plan=path,
            )
            ranks = spawn(train, 2, args=(setting, options.rounds))
        ratios = sorted(
            ours / theirs
            for used, _, _ in ranks
            for ours, theirs in zip(used["plan"], used["ddp"], strict=True)
        )
        walls = [
            a / b for _, took, _ in ranks for a, b in zip(took["plan"], took["ddp"], strict=True)
        ]
        first = ranks[0]
        rows.append(
            (
                name,
                *(format_seconds(statistics.median(first[0][k])) for k in ("plan", "ddp")),
                f"{statistics.median(ratios):.3f}",
                f"{ratios[0]:.2f}",
                f"{ratios[-1]:.2f}",
                f"{statistics.median(walls):.3f}",
            )
        )
    emit(table(HEAD, rows, right=range(1, len(HEAD))))


if __name__ == "__main__":
    main()
