"""Lost and slowed hosts of a testbed: how long a run takes to go on, and how fast it then is.

    python -m benchmarks.faults           both parts, about 8 minutes on two cores
    python -m benchmarks.faults loss      a lost host: noticed, planned, first step
    python -m benchmarks.faults slow      a host at half its speed: steps before and after the new plan

*Loss*: torchrun's agent on each of four hosts with links of their own trains a ViT. One host is lost:
its link goes down without a word, or its processes are killed, with or without a plan for the rest.
Processors are not limited, since importing torch on an emulated slow one would take a minute.

*Slow*: the fastest host gets half its processor time. The steps after the new plan are compared with
those of a run that had the plan for the slower cluster from its start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hap
from hap.capture.model_file import model_file_of
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.launch import report
from hap.runtime.launch_lines import elastic_lines
from hap.runtime.testbed import Testbed
from hap.runtime.testbed.network import INTERFACE, address
from hap.slow_devices import slowed
from hap.synthesizer.plan_options import PlanOptions
from hap.training import train

HERE = Path(__file__).parent
MODEL = f"{HERE / 'models' / 'vit.py'}:race"
QUICKLY_PLANNED = f"{HERE / 'models' / 'wide_mlp'}.py:race"
"""A rank plans in its own, limited processor time."""

CLUSTER = HERE / "clusters" / "race_4411.yaml"
EVERY = 10
LONGEST_S = 180.0
LOST = 3
"""The rank whose host is lost; the first host serves the rendezvous."""

SLOWED, FACTOR, SLOW_AFTER, STEPS = 0, 2.0, 30, 140

_STEP = re.compile(r"step (\d+)  loss")


class Agents:
    """torchrun on every host; threads read what they print."""

    def __init__(self, bed: Testbed, plan: Path, folder: Path) -> None:
        self._bed, self._lock = bed, threading.Lock()
        self._lines: list[tuple[float, str]] = []
        nodes = [(address(rank), 1) for rank in range(len(bed.hosts))]
        command = [sys.executable, "-m", "hap.cli", "run", str(plan), "--elastic"]
        command += ["--steps", "1000000", "--checkpoint", str(folder), "--every", str(EVERY)]
        lines = elastic_lines([*command, "--resume", "auto"], nodes, 3).splitlines()
        lines = [line for line in lines if not line.startswith("#")]
        self._hosts = []
        for rank, line in enumerate(lines):
            node = bed.cluster.devices[rank].node
            words = shlex.split(line.replace(f"HAP_NODE={nodes[rank][0]}", f"HAP_NODE={node}"))
            at = words.index("torchrun")
            given = dict(word.split("=", 1) for word in words[:at])
            scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            with bed.inside(rank):
                host = subprocess.Popen(
                    words[at:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env={**os.environ, **bed.variables(rank), **given, "PATH": scripts,
                         "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )  # fmt: skip
            threading.Thread(target=self._read, args=(host,), daemon=True).start()
            self._hosts.append(host)

    def _read(self, host: subprocess.Popen[str]) -> None:
        assert host.stdout is not None
        for line in host.stdout:
            with self._lock:
                self._lines.append((time.monotonic(), line))

    def after(self, begin_s: float, pattern: str) -> tuple[float, str]:
        """Wait for a line after a moment; return its moment and text."""
        while time.monotonic() < begin_s + LONGEST_S:
            with self._lock:
                found = [(t, x) for t, x in self._lines if t > begin_s and re.search(pattern, x)]
            if found:
                return found[0]
            time.sleep(0.02)
        with self._lock:
            last = "".join(x for _, x in self._lines[-20:])
        raise SystemExit(f"no line {pattern!r} within {LONGEST_S:.0f} s; the last lines:\n{last}")

    def step(self) -> int:
        """Return the latest step."""
        with self._lock:
            steps = [int(found[1]) for _, x in self._lines if (found := _STEP.match(x))]
        return steps[-1] if steps else 0

    def cut(self, rank: int) -> None:
        """Take a host's link down: the others hear nothing, not even of closed connections."""
        with self._bed.inside(rank):
            subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
        self.kill(rank)

    def kill(self, rank: int) -> None:
        """Kill all processes of a host: the agent, and the ranks in sessions of their own."""
        for pid in [self._hosts[rank].pid, *_children(self._hosts[rank].pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for rank in range(len(self._hosts)):
            self.kill(rank)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(c) for c in path.read_text().split()] if path.exists() else []


@contextlib.contextmanager
def _agents(bed: Testbed, plan: Path, folder: Path) -> Iterator[Agents]:
    made = Agents(bed, plan, folder)
    try:
        yield made
    finally:
        made.close()


def loss(how: str, prepared: bool) -> tuple[str, ...]:
    """Lose a host; return a row of the table."""
    with tempfile.TemporaryDirectory() as place:
        folder, path = Path(place) / "checkpoints", Path(place) / "plan.json"
        plan = hap.api.plan_file(
            MODEL, load_cluster(CLUSTER), options=PlanOptions(all_devices=True)
        )
        plan.save(path)
        with (
            Testbed(plan.cluster, 1.8, links="as written") as bed,
            _agents(bed, path, folder) as all_,
        ):
            wanted = len(plan.cluster.devices)
            while all_.step() < 2 * EVERY or len(list((folder / "plans").glob("*.json"))) < wanted:
                all_.after(time.monotonic(), _STEP.pattern)
            if not prepared:
                shutil.rmtree(folder / "plans")
            lost_at, begin = all_.step(), time.monotonic()
            (all_.cut if how == "link down" else all_.kill)(LOST)
            noticed, _ = all_.after(begin, "no heartbeat|another rank is lost")
            met, text = all_.after(begin, "training on")
            went_on, line = all_.after(met, _STEP.pattern)
            first = _STEP.match(line)
            assert first is not None
    how_planned = text.rpartition(", ")[2].strip()
    return (
        how, how_planned, *(f"{t - begin:.1f} s" for t in (noticed, met, went_on)),
        str(lost_at + 1 - int(first[1])),
    )  # fmt: skip


class _Enough(Exception):
    """All steps that are compared have been made; the run would go on."""


def _train(path: str, folder: str, adapt: bool) -> None:
    plan = Plan.load(path)
    train(
        plan, model_file_of(plan), steps=10_000, adapt=adapt,
        checkpoints=Checkpoints(folder=folder, every=10**6),
        on_step=lambda number, loss, seconds: report((number, seconds)),
    )  # fmt: skip


def slow() -> list[tuple[str, ...]]:
    """Slow a host down; return rows of the table."""
    cluster = load_cluster(CLUSTER)
    factors = [FACTOR if rank == SLOWED else 1.0 for rank in range(cluster.world_size)]
    options = PlanOptions(all_devices=True)
    with tempfile.TemporaryDirectory() as place, Testbed(cluster, 1.8, links="as written") as bed:
        paths = {name: Path(place) / f"{name}.json" for name in ("first", "best")}
        hap.api.plan_file(QUICKLY_PLANNED, bed.cluster, options=options).save(paths["first"])
        hap.api.plan_file(QUICKLY_PLANNED, slowed(bed.cluster, factors), options=options).save(
            paths["best"]
        )
        seconds: dict[str, dict[int, float]] = {"first": {}, "best": {}}

        def hear(name: str, rank: int, told: tuple[int, float]) -> None:
            if rank == 0:
                seconds[name][told[0]] = told[1]
                if told[0] == SLOW_AFTER and name == "first":
                    bed.slow(SLOWED, FACTOR)
                if told[0] == (STEPS if name == "first" else 40):
                    raise _Enough

        for name in seconds:
            with contextlib.suppress(_Enough):
                bed.spawn(
                    _train, (str(paths[name]), str(Path(place) / name), name == "first"),
                    on_report=lambda rank, told, name=name: hear(name, rank, told),
                )  # fmt: skip
    first, best = seconds["first"], seconds["best"]

    def median(steps: dict[int, float], begin: int, end: int) -> float:
        return statistics.median(s for n, s in steps.items() if begin < n <= end)

    best_s = median(best, 5, 40)
    parts = [
        ("at full speed", median(first, 5, SLOW_AFTER)),
        ("slowed, before a new plan", median(first, SLOW_AFTER + 1, SLOW_AFTER + 10)),
        ("the last 20 steps", median(first, STEPS - 20, STEPS)),
        ("the plan for the slowed cluster, from the start", best_s),
    ]
    return [(what, f"{s:.3f} s", f"{s / best_s:.2f}") for what, s in parts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("loss", "slow"))
    options = parser.parse_args()
    if options.part != "slow":
        rows = [loss("link down", True), loss("killed", True), loss("killed", False)]
        head = (
            "host lost by", "plan", "detected", "rendezvous and planning done", "first step",
            "steps lost",
        )  # fmt: skip
        emit(table(head, rows, right=(2, 3, 4, 5)))
    if options.part != "loss":
        emit(table(("steps", "median", "over the best"), slow(), right=(1, 2)))


if __name__ == "__main__":
    main()
