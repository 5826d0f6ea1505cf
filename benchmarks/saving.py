"""Step times with a checkpoint every 20 steps, over step times without; bytes and peak memory.

    python -m benchmarks.saving                3 gloo ranks, a few minutes on two cores
    python -m benchmarks.saving --every 50 --rounds 8

Memory is a rank's peak above what it has before its model is made: in training steps, in a save
between two steps and the first step beside it, and in making the model and loading it, by new processes.

Blocks of steps with and without saves take turns in the same processes. Blocks with saves are
timed until their last checkpoint is on the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hap
from hap.api import plan_file
from hap.cluster.cluster_file import load_cluster
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_storage import file_of
from hap.runtime.launch import spawn
from hap.synthesizer.plan_options import PlanOptions
from hap.training import Trainer
from hap.units import format_bytes, format_seconds

HERE = Path(__file__).parent
MODEL = f"{HERE / 'models' / 'mlp.py'}:small"


def train(data: dict[str, Any], folder: str, every: int, saves: int, rounds: int) -> Any:
    """Return per kind of block the seconds per step, and the seconds that a save holds a step."""
    before = _resident_bytes("VmRSS")
    trainer = Trainer(Plan.from_json(data))
    batches = trainer.batches()
    times: dict[str, list[float]] = {"without": [], "with": []}
    held = []
    for batch in islice(batches, 3):
        trainer.step(batch)
    trainer.save(folder, 0, keep=2)  # the first one sets up a process group
    hap.wait_for_saves()
    peaks = {"training": _peak_bytes(partial(_steps, trainer, batches, 3)) - before}
    peaks["saving"] = _peak_bytes(partial(_save_beside, trainer, batches, folder)) - before
    held_bytes = _held_bytes(trainer)
    written = Path(folder, "step-0", file_of(trainer.rank)).stat().st_size
    done = 0
    for _ in range(rounds):
        for kind, found in times.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(saves):
                for batch in islice(batches, every):
                    trainer.step(batch)
                    done += 1
                if kind == "with":
                    began = time.perf_counter()
                    trainer.save(folder, done, keep=2)
                    held.append(time.perf_counter() - began)
            hap.wait_for_saves()
            dist.barrier()
            found.append((time.perf_counter() - start) / (every * saves))
    return times, held, peaks, held_bytes, written


def load_bytes(data: dict[str, Any], folder: str) -> int:
    """Return the peak memory of a rank that makes its model and loads a checkpoint."""
    before = _resident_bytes("VmRSS")
    return _peak_bytes(lambda: Trainer(Plan.from_json(data)).load(folder)) - before


def _steps(trainer: Trainer, batches: Any, count: int) -> None:
    for batch in islice(batches, count):
        trainer.step(batch)


def _save_beside(trainer: Trainer, batches: Any, folder: str) -> None:
    trainer.save(folder, 0, keep=2)
    _steps(trainer, batches, 1)
    hap.wait_for_saves()


def _held_bytes(trainer: Trainer) -> int:
    """Return the bytes of this rank's parameters, buffers and optimizer states."""
    module, optimizer = trainer.module, trainer._optimizer
    states = [v for s in optimizer.state.values() for v in s.values() if hasattr(v, "nbytes")]
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *states))


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(f"{name}:")).split()[1])


def _peak_bytes(act: Callable[[], object]) -> int:
    """Return the largest resident memory of this process while ``act`` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    act()
    return _resident_bytes("VmHWM")


def main(arguments: list[str] | None = None) -> None:
    """Plan, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--saves", type=int, default=3, help="in one block")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    cluster = load_cluster(HERE / "clusters" / "demo4.yaml").without(3)
    plan = plan_file(options.model, cluster, options=PlanOptions(all_devices=True))
    with tempfile.TemporaryDirectory() as folder:
        args = (plan.to_json(), folder, options.every, options.saves, options.rounds)
        ranks = spawn(train, plan.world_size, args=args)
        loads = spawn(load_bytes, plan.world_size, args=args[:2])
        times, held, *_ = ranks[0]
        newest = max(Path(folder).glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
        size = sum(file.stat().st_size for file in newest.iterdir())
    without, with_saves = (statistics.median(times[kind]) for kind in ("without", "with"))
    ratios = [b / a for a, b in zip(times["without"], times["with"], strict=True)]
    print(
        f"{plan.world_size} ranks, checkpoints of {format_bytes(size)} every {options.every} steps"
    )
    print(f"step without saves {format_seconds(without)}, with {format_seconds(with_saves)}")
    print(
        f"with over without: {statistics.median(ratios):.3f}, "
        f"from {min(ratios):.3f} to {max(ratios):.3f} in {options.rounds} rounds"
    )
    print(f"a save holds up its step by {format_seconds(statistics.median(held))}")
    for rank, (_, _, peaks, held_bytes, written) in enumerate(ranks):
        most = peaks["training"]
        peaks["loading"] = loads[rank]
        print(
            f"rank {rank} holds {format_bytes(held_bytes)} and writes {format_bytes(written)}; peak "
            + ", ".join(f"{n} {format_bytes(b)} ({b / most:.2f})" for n, b in peaks.items())
        )


if __name__ == "__main__":
    main()
