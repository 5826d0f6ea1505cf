"""Runs that outlive faults: SIGTERM, killed ranks, lost machines; losses equal those without faults."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from torch.distributed import HashStore

import hap
from benchmarks.kills import rank_pids
from hap.cli.commands import main
from hap.cluster.cluster_file import load_cluster
from hap.errors import InputError
from hap.part_plans import PartPlans
from hap.runtime import heartbeats
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder
from hap.runtime.elastic import meeting
from hap.runtime.elastic.meeting import NODE, own_device
from hap.runtime.elastic.notice import Notice, forks_without_notice
from hap.runtime.heartbeats import Heartbeats
from hap.runtime.launch_lines import elastic_lines
from hap.synthesizer.plan_options import PlanOptions
from tests.plain_training import plain_losses

MODEL = """
import os, signal, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    def forward(self, x):
        return ((self.layers(x) - x) ** 2).mean()

def model():
    if os.environ.get("BROKEN") == os.environ.get("RANK", "none") and os.environ["WORLD_SIZE"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    return Net()

def batch():
    return {"x": torch.rand(24, 8, dtype=torch.float64)}

def batches(start):
    for number in range(start, 1 << 30):
        torch.manual_seed(number)
        time.sleep(float(os.environ.get("PAUSE", 0)))
        yield batch()

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)
"""
CLUSTER = """
links: {between: 10 Gbit/s}
nodes:
  - {name: a, gpus: 2, type: A100-40}
  - {name: b, gpus: 1, type: V100-16}
"""
TWO = """
links: {between: 10 Gbit/s}
nodes:
  - {name: a, gpus: 1, type: A100-40}
  - {name: b, gpus: 1, type: V100-16}
"""
STEPS = 200


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its plans for three devices and for two machines of one."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.py").write_text(MODEL)
    options = PlanOptions(all_devices=True)
    for name, cluster in (("plan", CLUSTER), ("two", TWO)):
        made = hap.api.plan_file(f"{folder / 'model.py'}", load_cluster(cluster), options=options)
        made.save(folder / f"{name}.json")
    return folder


@pytest.fixture(scope="module")
def undisturbed(planned: Path) -> Callable[[int], dict[int, float]]:
    """The losses of that many steps of plain torch on one device, by step."""

    def train(steps: int) -> dict[int, float]:
        return dict(enumerate(plain_losses(planned / "model.py", steps), 1))

    return train


def _losses(log: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def _until(true: Callable[[], bool], limit_s: float = 150) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def _steps(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


@pytest.mark.gloo
@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_sigterm_saves_and_ends(
    planned: Path, undisturbed: Callable[[int], dict[int, float]], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    options = ["--nproc", "3", "--checkpoint", str(tmp_path / "c"), "--log", str(log)]
    words = ["run", str(planned / "plan.json"), *options]
    run = subprocess.Popen(
        [sys.executable, "-m", "hap.cli", *words, "--every", "1000000", "--max-restarts", "1",
         "--steps", "1000000"],
        env={**os.environ, "PAUSE": "0.02"}, text=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    _until(lambda: _steps(log) > 10)
    done = _steps(log)
    os.kill(rank_pids(run.pid)[1], signal.SIGKILL)
    _until(lambda: _steps(log) > done + 10)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "a:1 was lost (killed by SIGKILL); starting all ranks again" in errors
    assert "is saved by 2 of 3 ranks, which hold all of it" in errors  # though every is far away
    assert int(re.findall(r"resumed from .*/step-(\d+)", errors)[0]) >= done
    begun, compared, *_, saved = errors.splitlines()
    assert compared == "comparing the model with the plan"
    assert begun.startswith("3 ranks under gloo on the CPU")
    found = re.fullmatch(r"SIGTERM: step (\d+) is saved; --resume auto continues from it", saved)
    assert found
    assert CheckpointFolder(tmp_path / "c").steps()[-1] == int(found[1])
    last = int(found[1]) + 10
    again = CliRunner().invoke(main, [*words, "--resume", "auto", "--steps", str(last)])
    assert again.exit_code == 0, again.output
    assert _losses(log) == pytest.approx(undisturbed(last), rel=1e-9)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_device_whose_rank_is_lost_twice_is_left_out(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    options = ["--nproc", "3", "--checkpoint", str(folder), "--max-restarts", "2", "--steps", "9"]
    words = ["run", str(planned / "plan.json"), *options]
    monkeypatch.setenv("BROKEN", "1")
    run = CliRunner().invoke(main, words)
    assert run.exit_code == 0, run.stderr
    assert f"going on without it, by {folder}/plans/" in run.stderr
    assert CheckpointFolder(folder).steps()[-1] == 9
    run = CliRunner().invoke(main, [*words, "--resume", "no"])
    assert run.exit_code == 2  # there are checkpoints


class _Agents:
    """torchrun on each of several machines, all of which are this one."""

    def __init__(self, planned: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._planned, self._folder = planned, folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        run = [
            sys.executable,
            "-m",
            "hap.cli",
            "run",
            str(self._planned / "two.json"),
            "--elastic",
            "--steps",
            str(STEPS),
        ]
        run += ["--checkpoint", str(self._folder / "c"), "--every", "20", "--resume", "auto"]
        run += ["--log", str(self._folder / "log.jsonl")]
        lines = elastic_lines(run, [("127.0.0.1", 1), ("127.0.0.2", 1)], 3).splitlines()
        line = next(x for x in lines if f"is_host={int(node == 'a')}" in x)
        line = re.sub(r"HAP_NODE=\S+", f"HAP_NODE={node}", line).replace(":29400", f":{self._port}")
        scripts = Path(sys.executable).parent
        variables = {"PATH": f"{scripts}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
        variables["PAUSE"] = "0.1"  # the run lasts until a machine is back
        with open(self._folder / f"{node}.txt", "ab") as out:
            self.running[node] = subprocess.Popen(
                line, shell=True, env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def kill(self, node: str) -> None:
        """Kill the agent and its ranks, which have sessions of their own."""
        wanted = f"HAP_NODE={node}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                variables = (place / "environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if (
                wanted in variables and str(self._port).encode() in (place / "cmdline").read_bytes()
            ) or (wanted in variables and b"--elastic" in (place / "cmdline").read_bytes()):
                os.kill(int(place.name), signal.SIGKILL)

    def text(self, node: str) -> str:
        return (self._folder / f"{node}.txt").read_text()


@pytest.fixture
def agents(planned: Path, tmp_path: Path) -> Iterator[_Agents]:
    made = _Agents(planned, tmp_path)
    yield made
    for node in made.running:
        made.kill(node)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_machine_and_takes_it_back(
    agents: _Agents, undisturbed: Callable[[int], dict[int, float]], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    agents.start("a")
    agents.start("b")
    _until(lambda: _steps(log) > 25)
    done = _steps(log)
    agents.kill("b")
    _until(lambda: "resumed from" in agents.text("a"))
    seen = _steps(log)
    _until(lambda: _steps(log) > seen + 10)
    agents.start("b")
    assert agents.running["a"].wait(120) == 0, agents.text("a")
    assert (
        "error" not in agents.text("a").partition("resumed from")[2]
    )  # b's ranks are new, a's are not
    starts = re.findall(r"training on (.*) by", agents.text("a"))
    assert starts[0] == starts[2] == "a:0, b:0"
    assert starts[1] == "a:0"
    resumed = re.findall(r"resumed from .*/step-(\d+)", agents.text("a"))
    assert int(resumed[0]) >= done  # a:0 holds everything: no step is repeated
    assert "SIGTERM: step" in agents.text("a")  # torchrun's notice, when the machine came back
    assert "Traceback" not in agents.text("a")
    assert _losses(log) == pytest.approx(undisturbed(STEPS), rel=1e-9)


@pytest.mark.slow
def test_heartbeats_that_stop_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "PERIOD_S", 0.05)
    store, lost = HashStore(), dict[int, str]()
    both = [
        Heartbeats(store, ("a:0", "b:0"), n, lambda text, n=n: lost.setdefault(n, text), 0.5)
        for n in (0, 1)
    ]  # fmt: skip
    with both[0]:
        with pytest.raises(KeyboardInterrupt), both[1]:
            both[1].at("step 3")
            time.sleep(1)
            assert not lost
            raise KeyboardInterrupt
        _until(lambda: bool(lost), 30)
    assert lost == {0: "no heartbeat from b:0 for 0 s, last seen at step 3: it counts as lost"}


def test_a_process_at_its_end_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "PERIOD_S", 0.05)
    store, lost = HashStore(), list[str]()
    with Heartbeats(store, ("a:0", "b:0"), 0, lost.append, 0.5):
        with Heartbeats(store, ("a:0", "b:0"), 1, lost.append, 0.5):
            time.sleep(0.2)
        time.sleep(1)
    assert not lost


def test_a_device_without_a_part_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_WAIT", timedelta(seconds=0.01))
    monkeypatch.setattr(meeting, "_LOOK_S", 0.02)
    met = meeting.Meeting(store=HashStore(), names=("a:0", "b:0"), own="b:0")
    later = threading.Timer(0.2, met.tell, ("ended", ""))
    later.start()
    assert met.hear_at_last("ended") == ""
    later.join()


def test_forks_have_no_notice_and_end_with_their_parent() -> None:
    """As the workers of a DataLoader: launchers signal the process group of a rank."""
    group = os.getpgid(0)

    def forked() -> tuple[bool, bool]:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.write(theirs, f"{os.getpgid(0)} {signal.getsignal(signal.SIGTERM)!r}".encode())
            signal.pause()
        pgid, _, handler = os.read(ours, 1000).decode().partition(" ")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0), os.close(ours), os.close(theirs)
        return int(pgid) == group, "SIG_DFL" in handler

    with forks_without_notice(), Notice():
        assert forked() == (False, True)
    assert forked()[0]


LOADER = """
from torch.utils.data import DataLoader

def batches():
    return DataLoader(range(1 << 20), batch_size=24, num_workers=1, collate_fn=rows)

def rows(numbers):
    time.sleep(0.05)
    return {"x": torch.full((24, 8), 1.0 / numbers[-1], dtype=torch.float64)}
"""


def _rank(words: list[str], variables: dict[str, str], told: Path) -> None:
    """The command ``hap`` in a process group of its own, as a rank of torchrun's."""
    os.setsid()
    os.environ.update(variables)
    with told.open("w") as errors, open(os.devnull, "w") as nothing:
        sys.stdout, sys.stderr = nothing, errors
        main(words)


@pytest.fixture(scope="module")
def with_loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a model with a loader, for one device."""
    folder = tmp_path_factory.mktemp("loader")
    (folder / "model.py").write_text(MODEL + LOADER)
    hap.api.plan_file(f"{folder / 'model.py'}", "local:1").save(folder / "plan.json")
    return folder / "plan.json"


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_of_a_loader_outlive_a_notice_and_not_their_rank(
    ending: signal.Signals, with_loader: Path, tmp_path: Path
) -> None:
    """torchrun signals the process group of each rank."""
    log, told = tmp_path / "log.jsonl", tmp_path / "stderr"
    words = ["run", str(with_loader), "--log", str(log), "--steps", "100000"]
    words += ["--checkpoint", str(tmp_path / "c"), "--every", "100000"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    run = multiprocessing.get_context("fork").Process(
        target=_rank, args=(words, {**place, "MASTER_PORT": str(port)}, told)
    )
    run.start()
    assert run.pid
    _until(lambda: _steps(log) > 2)
    (worker,) = psutil.Process(run.pid).children()
    os.killpg(run.pid, ending)
    run.join(60)
    _until(lambda: not psutil.pid_exists(worker.pid) or worker.status() == "zombie", 30)
    if ending == signal.SIGTERM:
        errors = told.read_text()
        assert run.exitcode == 128 + signal.SIGTERM, errors
        assert re.search(r"SIGTERM: step \d+ is saved", errors), errors


def test_a_process_finds_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster(CLUSTER)
    for place, node, name in ((0, "a", "a:0"), (1, "a", "a:1"), (0, "b", "b:0")):
        monkeypatch.setenv("LOCAL_RANK", str(place))
        monkeypatch.setenv(NODE, node)
        assert own_device(cluster) == name
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InputError, match="process 1 of 'b' has no device: the plan has 1 there"):
        own_device(cluster)
    monkeypatch.setenv(NODE, "c")
    with pytest.raises(InputError, match="the plan has no machine 'c', only a, b"):
        own_device(cluster)


@pytest.mark.slow
def test_plans_for_losses_are_made_once(planned: Path, tmp_path: Path) -> None:
    plans = PartPlans(planned / "plan.json", tmp_path / "plans")
    assert list(plans.likely()) == [
        ("b:0",), ("a:0", "a:1"), ("a:1", "b:0"), ("a:0", "b:0"),
    ]  # fmt: skip
    assert plans.file(("a:0", "a:1", "b:0")) == planned / "plan.json"
    file = plans.file(("a:1", "b:0"))
    made = file.stat().st_mtime_ns
    names = {d.name for d in hap.Plan.load(file).cluster.devices}
    assert names and names <= {"a:1", "b:0"}
    assert plans.file(("a:1", "b:0")) == file
    part = plans.whole.cluster.keep([1, 2])
    anew = hap.api.plan_file(
        f"{planned / 'model.py'}", part, options=PlanOptions(allow_idle=True)
    )  # which captures the model once more
    assert hap.Plan.load(file) == anew
    assert file.stat().st_mtime_ns == made
    with_another = replace(plans.whole, optimizer=replace(plans.whole.optimizer, states=0))
    with_another.save(tmp_path / "plan.json")
    assert not PartPlans(tmp_path / "plan.json", tmp_path / "plans").has(("a:1", "b:0"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--elastic"], "without --checkpoint"),
        (["--max-restarts", "2"], "without --checkpoint"),
        (["--elastic", "--checkpoint", "c"], "--elastic without --resume auto"),
    ],
)
def test_what_is_missing_is_said(planned: Path, options: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["run", str(planned / "plan.json"), *options])
    assert result.exit_code == 2
    assert text in result.stderr
