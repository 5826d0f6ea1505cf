"""CPU quotas change real speeds and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import hap
from hap.errors import InputError
from hap.runtime.launch import spawn
from hap.runtime.testbed import quotas as emulated
from hap.runtime.testbed.cgroups import find_controller
from hap.runtime.testbed.quota_tick import beat
from hap.runtime.testbed.quotas import cpu_quotas, quota_settings

BUSY = """
import sys, time
sys.stdin.readline()
count, end = 0, time.monotonic() + 2
while time.monotonic() < end:
    count += 1
print(count, flush=True)
sys.stdin.readline()
"""

CONTROLLER, WHY_NOT = find_controller(
    "cpu", Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text(), "-"
)
needs_quotas = pytest.mark.skipif(CONTROLLER is None, reason=f"no quotas here: {WHY_NOT}")


def groups_of(pid: int) -> list[Path]:
    assert CONTROLLER is not None
    return sorted(CONTROLLER.root.glob(f"hap-quota-*-{pid}-*"))


@pytest.fixture
def busy() -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that count for two seconds on request."""
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    yield pair
    for process in pair:
        process.kill()
        process.communicate()


def speeds(busy: list[subprocess.Popen[str]]) -> list[int]:
    for process in busy:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [int(process.stdout.readline()) for process in busy if process.stdout is not None]


@pytest.fixture(params=["quotas", "duty cycle"])
def enforced(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> bool:
    """Both ways to throttle; hidden control groups force the second."""
    if request.param == "quotas":
        if CONTROLLER is None:
            pytest.skip(f"no quotas here: {WHY_NOT}")
        return True
    nothing = tmp_path / "mountinfo"
    nothing.write_text("")
    monkeypatch.setattr(emulated, "_MOUNTS", nothing)
    return False


@pytest.mark.slow
def test_speeds_follow_the_fractions(enforced: bool, busy: list[subprocess.Popen[str]]) -> None:
    with cpu_quotas([0.5, 0.05]) as quotas:
        assert quotas.enforced == enforced
        assert ("stopped and continued instead" in quotas.reason) == (not enforced)
        for rank, process in enumerate(busy):
            quotas.place(rank, process.pid)
        fast, slow = speeds(busy)
        assert len(groups_of(os.getpid())) == (2 if enforced else 0)
    # The ratio is set to 10. It is lower on a busy machine, where duty cycles are late as well.
    assert fast > (2 if enforced else 1) * slow
    # Both processes still exist, neither stopped nor in a group of ours.
    assert all(psutil.Process(process.pid).status() != psutil.STATUS_STOPPED for process in busy)
    if enforced:
        assert groups_of(os.getpid()) == []


@pytest.mark.slow
@needs_quotas
def test_cores_beat(busy: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(core: int) -> None:
        raise PermissionError("not here")

    process = busy[0]
    with cpu_quotas([0.1]) as quotas:
        quotas.place(0, process.pid)
        assert quotas.uneven == ""
        children = psutil.Process().children()
        beats = [c for c in children if "quota_tick.py" in " ".join(c.cmdline())]
        assert {core for c in beats for core in c.cpu_affinity()} == os.sched_getaffinity(0)
        assert {os.sched_getscheduler(c.pid) for c in beats} == {os.SCHED_FIFO}
        before = [c.num_ctx_switches().voluntary for c in beats]
        time.sleep(1)
        often = [c.num_ctx_switches().voluntary - n for c, n in zip(beats, before, strict=True)]
        assert min(often) > 100  # ideally 1,000: the kernel checks the quota at each beat
    assert not any(c.is_running() and c.status() != "zombie" for c in beats)
    monkeypatch.setattr(emulated, "beat", refused)
    with cpu_quotas([0.1]) as quotas:
        quotas.place(0, process.pid)
        assert quotas.uneven == "not here"


def test_a_core_that_cannot_beat_is_told() -> None:
    with pytest.raises(PermissionError, match="no real-time priority"), beat(100_000):
        pass


def test_a_process_that_has_ended_is_refused_by_name(enforced: bool) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with cpu_quotas([0.5]) as quotas, pytest.raises(ProcessLookupError):
        quotas.place(0, ended.pid)


@needs_quotas
def test_groups_go_when_the_body_raises_and_contexts_nest() -> None:
    with pytest.raises(KeyError), cpu_quotas([0.5]), cpu_quotas([0.2, 0.2]):
        assert len(groups_of(os.getpid())) == 3
        raise KeyError
    assert groups_of(os.getpid()) == []


OWNER = """
import sys, time
from pathlib import Path
from hap.runtime.testbed import quotas as emulated
if __name__ == "__main__":
    if len(sys.argv) > 2:
        emulated._MOUNTS = Path(sys.argv[2])
    with emulated.cpu_quotas([0.1, 0.1]) as quotas:
        quotas.place(0, int(sys.argv[1]))
        print("placed", flush=True)
        time.sleep(1000)
"""


@pytest.mark.slow
def test_a_killed_owner_leaves_nothing(
    enforced: bool, busy: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    hidden = [] if enforced else [str(tmp_path / "mountinfo")]
    command = [sys.executable, str(script), str(busy[0].pid), *hidden]
    root = Path(hap.__file__).parents[1]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "placed\n"
        helpers = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(signal.SIGKILL)
    if enforced:
        assert len(groups_of(owner.pid)) == 2
        with cpu_quotas([0.1]):
            assert groups_of(owner.pid) == []
    _, alive = psutil.wait_procs(helpers, timeout=20)
    assert helpers
    assert not alive
    kept = {psutil.Process(busy[0].pid).status() for _ in range(20) if not time.sleep(0.01)}
    assert psutil.STATUS_STOPPED not in kept


def cpu_seconds(wall_s: float) -> float:
    start_s, end_s = time.process_time(), time.monotonic() + wall_s
    while time.monotonic() < end_s:
        pass
    return time.process_time() - start_s


@pytest.mark.slow
@needs_quotas
@pytest.mark.gloo
def test_spawned_ranks_are_placed_before_they_work() -> None:
    with cpu_quotas([0.5, 0.05]) as quotas:
        fast, slow = spawn(cpu_seconds, 2, args=(2.0,), before_rank=quotas.place, timeout_s=120)
    assert fast > 2 * slow
    assert groups_of(os.getpid()) == []


@pytest.mark.parametrize("fractions", [[], [0.0], [1.5], [float("nan")], [1.0] * 10_000])
def test_impossible_fractions_are_refused(fractions: list[float]) -> None:
    with pytest.raises(InputError) as error, cpu_quotas(fractions):
        pass
    assert error.value.hint


def test_settings_keep_the_kernels_bounds() -> None:
    assert quota_settings(1, 0.25) == [("cpu.cfs_period_us", "10000"), ("cpu.cfs_quota_us", "2500")]
    assert quota_settings(2, 0.25) == [("cpu.max", "2500 10000")]
    assert quota_settings(2, 0.02) == [("cpu.max", "1000 50000")]  # a quota is at least 1 ms


def test_version_2_has_speed_and_memory_in_one_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (tmp_path / name).write_text("cpu memory\n")
    (tmp_path / "cgroup.procs").touch()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(mount_line(tmp_path, "cgroup2", "rw"))
    monkeypatch.setattr(emulated, "_MOUNTS", mounts)

    def text(rank: int, name: str) -> str:
        (group,) = tmp_path.glob(f"hap-quota-*-{rank}")
        return (group / name).read_text()

    with cpu_quotas([0.5, 0.25], memory_bytes=[1 << 30, None]) as quotas:
        quotas.charge(0, 123)
        quotas.charge(1, 124)
        groups = sorted(tmp_path.glob("hap-quota-*"))
        assert len(groups) == 2
        assert (text(0, "memory.max"), text(0, "cgroup.procs")) == (str(1 << 30), "123")
        assert not (groups[0] / "cpu.max").exists()  # ranks import at full speed
        assert sorted(file.name for file in groups[1].iterdir()) == ["cpu.weight"]
        quotas.place(0, 123)
        quotas.place(1, 124)
        assert (text(0, "cpu.max"), text(1, "cpu.max")) == ("5000 10000", "2500 10000")
        assert text(0, "cpu.weight") == "2000"
        for file in tmp_path.glob("hap-quota-*/*"):  # plain files would keep the folder
            file.unlink()


def mount_line(mount: Path, kind: str, options: str) -> str:
    return f"30 25 0:26 / {mount} rw,nosuid shared:4 - {kind} {kind} {options}\n"


def test_the_controller_is_found_in_either_version(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        (root / "own").mkdir(parents=True)
        (root / "cgroup.procs").touch()
        (root / "own/cgroup.procs").touch()
    (two / "cgroup.controllers").write_text("cpuset cpu io\n")
    (two / "cgroup.subtree_control").write_text("cpu\n")
    first, second = mount_line(one, "cgroup", "rw,cpu,cpuacct"), mount_line(two, "cgroup2", "rw")

    found, reason = find_controller("cpu", first, "3:cpu,cpuacct:/own\n0::/\n", "")
    assert found is not None
    assert (found.version, found.root, found.home) == (1, one / "own", one / "own")
    assert "version 1" in reason

    found, reason = find_controller("cpu", second, "0::/own\n", "")
    assert found is not None
    assert (found.version, found.root, found.home) == (2, two, two / "own")

    (two / "cgroup.subtree_control").write_text("io\n")
    assert find_controller("cpu", second, "0::/own\n", "")[0] is None
    assert "not enabled" in find_controller("cpu", second, "0::/own\n", "")[1]

    (one / "own/cgroup.procs").unlink()  # root may write any file, so remove it
    found, reason = find_controller("cpu", first, "3:cpu,cpuacct:/own\n", "")
    assert found is None
    assert "run as root" in reason
