"""Ranks as real processes: their results, all ways to fail, and that nothing stays running."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

import hap
from hap import planned_model
from hap.cli import worker
from hap.errors import HapError, InputError, PlanError
from hap.runtime import launch
from hap.runtime.elastic.notice import SavedAndEnded
from hap.runtime.launch import end_as_lost, init_from_env, report, spawn
from hap.runtime.launch_lines import batch_script, launch_lines
from hap.runtime.peer_errors import LOST, PeerLostError, losses_told
from hap.runtime.rank_failures import failure
from tests.random_plans import benchmark_case, random_plan

gloo = pytest.mark.gloo


def gone(pid: int) -> bool:
    """Return whether a process ends within ten seconds; a zombie has ended."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def add_up(offset: torch.Tensor) -> tuple[int, torch.Tensor, int, str]:
    total = torch.tensor([float(dist.get_rank())]) + offset
    dist.all_reduce(total)
    report({"step": 1, "rank": dist.get_rank()})
    report({"step": 2, "rank": dist.get_rank()})
    return os.getpid(), total, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@gloo
def test_results_reports_and_pids_come_back_in_rank_order() -> None:
    pids: dict[int, int] = {}
    reports: list[tuple[int, dict[str, int]]] = []
    variables = dict(os.environ)
    results = spawn(
        add_up,
        3,
        args=(torch.tensor([10.0]),),
        before_rank=pids.__setitem__,
        on_report=lambda rank, obj: reports.append((rank, obj)),
        timeout_s=120,
    )
    assert [pid for pid, *_ in results] == [pids[rank] for rank in range(3)]
    assert all(total.item() == 33 for _, total, *_ in results)
    assert {rest for _, _, *rest in results for rest in [tuple(rest)]} == {(1, "1")}
    assert sorted((rank, obj["rank"], obj["step"]) for rank, obj in reports) == [
        (rank, rank, step) for rank in range(3) for step in (1, 2)
    ]
    assert all(gone(pid) for pid in pids.values())
    assert dict(os.environ) == variables


@pytest.mark.parametrize(
    ("died", "raised", "late", "said"),
    [
        ({0: LOST}, {1: ("disk full", 2)}, [0], "rank 1: disk full"),
        ({0: LOST, 2: -9}, {1: ("ValueError", 1)}, [0, 2], "rank 2: killed by SIGKILL"),
        ({}, {0: ("gloo", LOST), 1: ("ValueError", 1)}, [], "rank 1: ValueError"),
        ({}, {0: ("Timed out", LOST)}, [1], "rank 1: hangs"),
        ({0: LOST}, {}, [0, 1, 2], "rank 1: hangs: .*; the ranks 2 hang"),
        ({0: LOST}, {}, [0], "rank 0: exited with code 75"),
        ({}, {0: ("Timed out", LOST)}, [], "rank 0: Timed out"),
        ({}, {}, [1], "no result from rank 1"),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(
    died: dict[int, int], raised: dict[int, tuple[str, int]], late: list[int], said: str
) -> None:
    assert re.search(f"^{said}", str(failure(died, raised, late, 9.0)))


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] closed by peer"), True),
        (dist.DistNetworkError("the connection was reset"), True),
        (RuntimeError("no such file: /home/igloo/data"), False),
        (ValueError("gloo/transport"), False),
    ],
)
def test_errors_of_other_ranks_are_told_from_own_ones(error: Exception, peer: bool) -> None:
    with pytest.raises(PeerLostError if peer else type(error)), losses_told("rank 3"):
        raise error


def blocked() -> bool:
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def start_method() -> str:
    return multiprocessing.get_start_method()


@gloo
def test_a_rank_starts_processes_as_any_other_program() -> None:
    """The workers of a DataLoader, which cannot import a model file."""
    assert spawn(start_method, 1, timeout_s=120) == [
        multiprocessing.get_context().get_start_method()
    ]


@gloo
def test_the_server_of_ranks_outlives_a_sigterm_to_the_group() -> None:
    """The ranks would lose their parent's watch otherwise; they themselves take the signal."""
    assert spawn(blocked, 1, timeout_s=120) == [False]
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
    assert spawn(blocked, 1, timeout_s=120) == [False]
    status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
    mask = int(re.findall(r"SigBlk:\s*(\w+)", status)[0], 16)
    assert mask >> (signal.SIGTERM - 1) & 1 and not blocked()


def fail(how: str) -> None:
    """Fail on rank 1 in a given way, while rank 0 waits for it in a collective."""
    child = subprocess.Popen(["sleep", "1000"])
    report(child.pid)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the boiler burst")
        if how == "late":
            time.sleep(0.2)
            raise ValueError("the boiler burst")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        time.sleep(1000)
    if how == "late":
        end_as_lost("rank 1 is lost")
    dist.all_reduce(torch.zeros(1))


@pytest.mark.slow
@gloo
@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [
        ("raise", 120, ["rank 1: ValueError: the boiler burst", "in fail", "Traceback"]),
        ("late", 120, ["rank 1: ValueError: the boiler burst"]),
        ("signal", 120, ["rank 1: killed by SIGKILL"]),
        ("exit", 120, ["rank 1: exited with code 7"]),
        ("hang", 8, ["no result from rank 0, 1 after 8 s"]),
    ],
)
def test_a_failure_is_one_error_that_names_its_rank(
    how: str, timeout_s: float, said: list[str]
) -> None:
    pids: list[int] = []
    with pytest.raises(HapError) as error:
        spawn(
            fail,
            2,
            args=(how,),
            before_rank=lambda rank, pid: pids.append(pid),
            on_report=lambda rank, pid: pids.append(pid),
            timeout_s=timeout_s,
        )
    assert all(text in str(error.value) for text in said), error.value
    assert len(pids) == 4 or how == "hang"  # a slow machine may start them late
    assert all(gone(pid) for pid in pids)


@gloo
def test_an_error_of_a_callback_passes_through_and_ends_the_ranks() -> None:
    pids: list[int] = []

    def refuse(rank: int, pid: int) -> None:
        pids.append(pid)
        raise EOFError("no more")  # a type that the pipes raise, too

    with pytest.raises(EOFError, match="no more"):
        spawn(add_up, 2, args=(torch.zeros(1),), before_rank=refuse, timeout_s=120)
    assert all(gone(pid) for pid in pids)


PARENT = """
import signal
import time
from hap.runtime.launch import report, spawn

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background ignore it

def wait():
    report("running")
    time.sleep(1000)

if __name__ == "__main__":
    pids = []
    spawn(wait, 1, before_rank=lambda rank, pid: pids.append(pid),
          on_report=lambda rank, obj: print(pids[rank], flush=True))
"""


@pytest.mark.slow
@gloo
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path: Path, ending: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.send_signal(ending)
        ended = gone(pid)
        if not ended:
            parent.kill()
        assert ended
        assert parent.wait(30) != 0
        if ending == signal.SIGINT:
            assert parent.stderr.read().splitlines()[-1] == "KeyboardInterrupt"


UNGUARDED = """
from hap.runtime.launch import spawn
spawn(len, 2, args=(b"x" * 2**22,))  # more than a pipe holds
"""


@pytest.mark.slow
@gloo
def test_a_script_without_a_guard_ends_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0
    assert 'if __name__ == "__main__"' in ran.stderr.replace("'", '"')
    assert "exited with code 1 and no result" in ran.stderr


def memory_of_a_thread() -> tuple[bool, int]:
    """Return whether a thread allocates in the main heap, and its page faults when it allocates as
    much as it has freed."""
    found = []

    def work() -> None:
        for _ in range(12):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [torch.ones(mib * 2**18) for mib in (16, 40, 40)]
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            found.append((all(in_main_heap(block.data_ptr()) for block in blocks), pages))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[-1]


def in_main_heap(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    parts = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return any(int(first, 16) <= address < int(last, 16) for first, last in parts)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")
def test_memory_that_a_thread_frees_is_reused() -> None:
    ((in_heap, pages),) = spawn(memory_of_a_thread, 1)
    assert in_heap and pages < 100  # of 24,576 pages


def test_an_impossible_launch_is_refused_before_any_process_starts() -> None:
    with pytest.raises(InputError, match="0 ranks"):
        spawn(add_up, 0)
    with pytest.raises(InputError, match="cannot be sent"):
        spawn(lambda: None, 1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # registers the variable, so that teardown removes it
        monkeypatch.delenv(name)
    return monkeypatch


@gloo
def test_srun_variables_are_understood(bare_environment: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        bare_environment.setenv(name, value)
    world = init_from_env("gloo")
    try:
        assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
        assert (dist.get_backend(), world.device.type) == ("gloo", "cpu")
    finally:
        dist.destroy_process_group()


def test_a_port_in_use_is_named(bare_environment: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "MASTER_PORT": port,
        }.items():
            bare_environment.setenv(name, str(value))
        bare_environment.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(InputError, match=f"^MASTER_PORT {port} is in use"):
            init_from_env("gloo")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "SLURM_PROCID is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "zero"}, "RANK is 'zero', not a number"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_missing_variables_are_named(
    bare_environment: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        bare_environment.setenv(name, value)
    with pytest.raises(InputError, match=said) as error:
        init_from_env("gloo")
    assert error.value.hint


@pytest.mark.parametrize("devices", [(), ("a:0",)])  # by the plan, there is no rank 1
def test_a_local_rank_without_a_device_is_refused(
    bare_environment: pytest.MonkeyPatch, devices: tuple[str, ...]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        bare_environment.setenv(name, value)
    bare_environment.setenv("MASTER_ADDR", "127.0.0.1")
    bare_environment.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="local rank 1 has no CUDA device: this process sees 1"):
        init_from_env("nccl", devices)


@pytest.mark.parametrize(
    ("devices", "ranks_here", "sees", "found"),
    [
        (("a:1", "a:2"), 2, 3, [1, 2]),  # a:0 is left out
        (("a:1", "a:2"), 2, 2, [0, 1]),  # CUDA_VISIBLE_DEVICES names those of the plan
        (("a:0", "a:1", "b:1"), 2, 2, [0, 1]),
        (("a:0", "b:3", "b:2"), 3, 4, [0, 1, 2]),  # all on one machine, as a trial
        (("left", "right"), 2, 3, [0, 1]),  # names of a cluster that was made in Python
    ],
)
def test_a_rank_has_the_gpu_that_its_plan_names(
    devices: tuple[str, ...], ranks_here: int, sees: int, found: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    assert [launch._number(devices, devices[r], sees, r) for r in range(ranks_here)] == found


@pytest.mark.gpu
@gloo
def test_nccl_takes_the_device_of_the_local_rank() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: init_from_env was not tried with nccl")
    count = torch.cuda.device_count()
    assert spawn(nccl_device, count, backend="nccl", timeout_s=300) == list(range(count))


def nccl_device() -> int:
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
    return torch.cuda.current_device()


WHO_AM_I = """
import os
from hap.runtime.launch import init_from_env
import torch.distributed as dist
world = init_from_env("gloo")
everyone = [None] * world.size
dist.all_gather_object(everyone, (world.rank, world.local_rank, os.environ["GROUP_RANK"]))
os.write(1, f"seen {everyone}\\n".encode())  # at once: two ranks share the output
dist.destroy_process_group()
"""


@gloo
@pytest.mark.slow
def test_torchrun_lines_of_unequal_machines_work_as_printed(tmp_path: Path) -> None:
    script = tmp_path / "who_am_i.py"
    script.write_text(WHO_AM_I)
    text = launch_lines([sys.executable, str(script)], [("127.0.0.1", 1), ("localhost", 2)])
    lines = [line for line in text.splitlines() if line.startswith("torchrun")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    port = str(free_port())
    agents = [
        subprocess.Popen(
            line.replace("29500", port),
            shell=True,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in lines
    ]
    try:
        printed = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    seen = "seen [(0, 0, '0'), (1, 0, '1'), (2, 1, '1')]\n"
    assert printed == [seen, seen * 2]


def as_srun(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a stand-in srun that prints the tasks as its arbitrary distribution orders them."""
    fake = tmp_path / "srun"
    fake.write_text('#!/bin/sh\ncat "$SLURM_HOSTFILE"; echo "$MASTER_ADDR"; echo "$@"\n')
    fake.chmod(0o755)

    def run(text: str) -> list[str]:
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        lines = text[text.index("# srun") :]
        done = subprocess.run(
            ["sh", "-ec", lines], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_srun_lines_give_each_rank_its_machine(tmp_path: Path) -> None:
    text = launch_lines(["python", "train.py", "a file"], [("old-1", 2), ("new", 1)])
    *hosts, head, arguments = as_srun(tmp_path)(text)
    assert hosts == ["old-1", "old-1", "new"]
    assert head == "old-1"
    assert arguments == (
        "--distribution=arbitrary --nodes=2 --ntasks=3 --kill-on-bad-exit=1 python train.py a file"
    )


@pytest.mark.parametrize(("code", "again"), [(0, []), (143, ["requeue 7"]), (1, [])])
def test_the_batch_script_queues_itself_after_a_notice(
    tmp_path: Path, code: int, again: list[str]
) -> None:
    for name, text in (("srun", f'echo "$@"\nexit {code}'), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = batch_script(["hap", "run", "a plan.json"], [("old-1", 2), ("new", 1)])
    first, *options = [line for line in script.splitlines() if line.startswith("#")]
    assert first == "#!/bin/bash"
    assert " ".join(options).split()[1:4] == ["--nodes=2", "--nodelist=old-1,new", "--ntasks=3"]
    assert "--requeue" in options[1]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code
    started, *rest = done.stdout.splitlines()
    assert started.endswith("--kill-on-bad-exit=1 hap run a plan.json")
    assert rest == again
    assert (tmp_path / "hap.hosts").read_text().split() == ["old-1", "old-1", "new"]


@pytest.mark.parametrize("nodes", [[], [("a", 0)], [("a", 1), ("b", -1)]])
def test_machines_without_devices_are_refused(nodes: list[tuple[str, int]]) -> None:
    with pytest.raises(InputError, match="cannot launch"):
        launch_lines(["train"], nodes)


def refused(data: dict[str, Any]) -> tuple[str, int]:
    """Return the error of a model that is not the planned one, and the number of its captures."""
    case, plan = benchmark_case("mlp", "tiny_dropout"), hap.Plan.from_json(data)
    counted = mock.patch.object(planned_model, "capture", wraps=planned_model.capture)
    with counted as captures, pytest.raises(PlanError) as error:
        hap.compile(case.model, plan, loss=case.loss)
    return str(error.value), captures.call_count


@pytest.mark.slow
@gloo
def test_one_rank_of_a_machine_captures_the_model_and_all_refuse_it() -> None:
    plan = random_plan(benchmark_case("mlp", "tiny"), 2, 5)
    (first, once), (second, never) = spawn(refused, 2, args=(plan.to_json(),))
    assert first == second
    assert (once, never) == (1, 0)
    assert "planned" in first


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (None, True),
        (InputError("no"), False),
        (SavedAndEnded(3), True),
        (RuntimeError("gloo/transport: closed"), False),
    ],
)
def test_a_rank_that_fails_does_not_wait_for_the_others(
    error: Exception | None, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends a group with all of its ranks, which may wait for this one."""
    seen = []
    monkeypatch.setattr(worker.Plan, "load", lambda path: mock.Mock(device_names=("a:0",)))
    monkeypatch.setattr(worker, "init_from_env", mock.Mock())
    monkeypatch.setattr(worker, "check_world_size", mock.Mock())
    monkeypatch.setattr(worker, "train_and_print", mock.Mock(side_effect=error))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append("left"))
    if error is None:
        worker.run_as_rank(mock.Mock())
    else:
        told = PeerLostError if type(error) is RuntimeError else type(error)
        with pytest.raises(told):
            worker.run_as_rank(mock.Mock())
    assert bool(seen) == left
