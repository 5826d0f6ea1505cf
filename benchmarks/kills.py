"""Kill training at random moments, resume it, and compare it with a run that was never killed.

    python -m benchmarks.kills --count 30        about 10 s per kill on two cores

``hap run`` trains two MLPs on gloo ranks, one by sharded plans and one by plans with replicas, and
saves a checkpoint every 5 steps. A third of the kills (SIGKILL) falls into a save. Half of the kills
hits one rank, half all processes at once. Every second resume is by a plan for another number of
ranks. After each kill the newest checkpoint must be complete and no older than the newest before,
and after each resume every loss must be that of the run without kills. The ranks that are left after
the kill of one save the step that they are at, where they hold everything: then no step is trained
again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hap.api import plan_file
from hap.cluster.cluster_file import load_cluster
from hap.errors import CheckpointError
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder, read_index
from hap.synthesizer.plan_options import PlanOptions

HERE = Path(__file__).parent
MODELS = {name: f"{HERE / 'models' / 'mlp.py'}:{name}_double" for name in ("small", "narrow")}
"""Plans of the first have no replicas, so a lost rank loses shards; those of the second have all."""

EVERY = 5
LONGEST_S = 60.0
"""Time for all processes to end after a kill, and for the first step after a start."""

TOLERANCE = 1e-9
"""Relative difference of losses in float64."""

_STEP = re.compile(r"^step \d+  loss")


@dataclass
class Counts:
    """What happened."""

    kills: int = 0
    in_save: int = 0
    of_one_rank: int = 0
    resumed: int = 0
    hung: int = 0
    lost: int = 0
    incomplete: int = 0
    differing: int = 0
    losses: int = 0
    saved_by_rest: int = 0
    repeated: list[int] = field(default_factory=list)
    repeated_after_one: list[int] = field(default_factory=list)
    first_step_s: list[float] = field(default_factory=list)


class Training:
    """A running ``hap run``; a thread waits for its steps, whose losses are in its log."""

    def __init__(self, plan: Path, folder: Path) -> None:
        self.log = folder.parent / "log.jsonl"
        self.log.unlink(missing_ok=True)
        words = [sys.executable, "-m", "hap.cli", "run", str(plan), "--steps", "1000000"]
        words += ["--nproc", str(ranks_of(plan)), "--checkpoint", str(folder)]
        words += ["--every", str(EVERY), "--keep", "3", "--resume", "auto"]
        words += ["--log", str(self.log)]
        self.began = time.monotonic()
        self.stepped = False
        self.first_s = 0.0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._hear)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if _STEP.match(line):
                self.first_s = self.first_s or time.monotonic() - self.began
                self.stepped = True

    def _hear(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def wait_for_step(self) -> bool:
        """Wait for the first step; returns whether it came."""
        while not self.stepped:
            if self.process.poll() is not None or time.monotonic() - self.began > LONGEST_S:
                return False
            time.sleep(0.01)
        return True

    def ranks(self) -> list[int]:
        """Return the process numbers of the ranks."""
        return rank_pids(self.process.pid)

    def kill(self, victims: list[int]) -> bool:
        """Kill these processes; returns whether all others ended by themselves."""
        everyone = [self.process.pid, *self.ranks()]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            self.process.poll()
            if not any(_command(pid) for pid in everyone):
                break
            time.sleep(0.05)
        ended = not any(_command(pid) for pid in everyone)
        for pid in everyone if not ended else ():
            if _command(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join()
        return ended


def rank_pids(pid: int) -> list[int]:
    """Return the process numbers of the ranks of a ``hap run``: they lead sessions of their own."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                found.append(child.pid)
    return sorted(found)


def _command(pid: int) -> bytes:
    """Return the command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def ranks_of(plan: Path) -> int:
    return int(plan.stem.rpartition("-")[2])


def trial(
    plan: Path, folder: Path, in_save: bool, rng: random.Random, counts: Counts
) -> dict[int, float]:
    """Start or resume training, kill it, and look at what is left; returns the losses seen."""
    place = CheckpointFolder(folder)
    resumes = bool(place.steps())
    training = Training(plan, folder)
    if not training.wait_for_step():
        training.kill([training.process.pid, *training.ranks()])
        counts.hung += 1
        print("no step after a start:", *training.errors, file=sys.stderr)
        return {}
    counts.first_step_s.append(training.first_s)
    counts.resumed += resumes
    time.sleep(rng.uniform(0, 1.5))
    deadline = time.monotonic() + 10
    while in_save and time.monotonic() < deadline and not list(folder.glob("step-*.tmp")):
        time.sleep(0.0005)
    if in_save:
        time.sleep(rng.uniform(0, 0.01))
    one = rng.random() < 0.5
    ranks = training.ranks()
    victims = [rng.choice(ranks)] if one else [training.process.pid, *ranks]
    before = place.steps()
    counts.in_save += bool(list(folder.glob("step-*.tmp")))
    counts.hung += not training.kill(victims)
    counts.kills += 1
    counts.of_one_rank += one
    counts.saved_by_rest += any("which hold all of it" in line for line in training.errors)
    after = place.steps()
    counts.lost += bool(before) and (not after or after[-1] < before[-1])
    for step in after:
        try:
            read_index(place.at(step))
        except CheckpointError as error:
            print(error, file=sys.stderr)
            counts.incomplete += 1
    return losses_of(training.log)


def losses_of(log: Path) -> dict[int, float]:
    """Return the losses by step; the last line may be cut off."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        with contextlib.suppress(ValueError):
            step = json.loads(line)
            found[step["step"]] = step["loss"]
    return found


def planned(model: str, folder: Path) -> list[Path]:
    """Plan for three unlike ranks and for two; returns the plan files."""
    cluster = load_cluster(HERE / "clusters" / "demo4.yaml").without(3)
    found = []
    for part in (cluster, cluster.without(1)):
        made = plan_file(model, part, options=PlanOptions(all_devices=True))
        found.append(folder / f"plan-{part.world_size}.json")
        made.save(found[-1])
    return found


def compare(plan: Path, log: Path, seen: list[dict[int, float]], counts: Counts) -> float:
    """Train without a kill, and compare all losses; returns the largest relative difference."""
    last = max(max(losses) for losses in seen if losses)
    words = [sys.executable, "-m", "hap.cli", "run", str(plan), "--steps", str(last)]
    words += ["--nproc", str(ranks_of(plan)), "--log", str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, capture_output=True, check=True, env=environment)
    want = losses_of(log)
    worst = 0.0
    for losses in seen:
        for step, loss in losses.items():
            error = abs(loss - want[step]) / want[step]
            worst = max(worst, error)
            counts.losses += 1
            counts.differing += error > TOLERANCE
    return worst


def series(model: str, count: int, rng: random.Random, counts: Counts) -> float:
    """Kill one run several times; return the largest relative difference of its losses."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        plans = planned(model, home)
        seen: list[dict[int, float]] = []
        saved, rest = counts.saved_by_rest, False
        for number in range(count):
            losses = trial(plans[number % 2], home / "checkpoints", number % 3 == 0, rng, counts)
            if losses and any(seen):
                reached = max(max(earlier) for earlier in seen if earlier)
                repeated = counts.repeated_after_one if rest else counts.repeated
                repeated.append(max(reached - min(losses) + 1, 0))
            rest = counts.saved_by_rest > saved
            saved = counts.saved_by_rest
            seen.append(losses)
            print(f"kill {number + 1}: steps {min(losses, default=0)} to {max(losses, default=0)}",
                  file=sys.stderr, flush=True)  # fmt: skip
        return compare(plans[0], home / "log.jsonl", seen, counts) if any(seen) else 0.0


def main(arguments: list[str] | None = None) -> None:
    """Kill, resume, compare, print; exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, counts = random.Random(options.seed), Counts()
    worst = max(
        series(MODELS["small"], options.count - options.count // 2, rng, counts),
        series(MODELS["narrow"], options.count // 2, rng, counts),
    )
    print(
        f"{counts.kills} kills: {counts.in_save} during a save; "
        f"{counts.of_one_rank} of one rank, {counts.kills - counts.of_one_rank} of all processes"
    )
    print(
        f"{counts.resumed} resumed, at most {max(counts.repeated, default=0)} steps trained again;"
        f" first step after a median of {statistics.median(counts.first_step_s):.1f} s"
    )
    print(
        f"{counts.saved_by_rest} saved by the ranks that were left, after which at most "
        f"{max(counts.repeated_after_one, default=0)} steps were trained again"
    )
    print(f"{counts.lost} lost checkpoints, {counts.incomplete} incomplete, {counts.hung} hung")
    print(
        f"{counts.losses} losses compared, {counts.differing} differ by more than {TOLERANCE:.0e};"
        f" the largest relative difference is {worst:.1e}"
    )
    if counts.lost or counts.incomplete or counts.hung or counts.differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
