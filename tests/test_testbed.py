"""Emulated clusters: they match their file, ranks run in them, and they leave nothing behind."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import hap
from hap.cli.commands import main
from hap.cluster.cluster_file import load_cluster
from hap.cluster.link import IMPLEMENTATIONS
from hap.cluster.topology import Cluster
from hap.errors import HapError, InputError
from hap.runtime.launch import report
from hap.runtime.testbed import Testbed, clean, network, ownership, quotas
from hap.runtime.testbed.scaling import choose_scale, scaled
from tests.short_profile import shortly

CORE = 100e9  # given, not measured, so that fractions are known
UNLIKE = """
name: unlike
links:
  between: {bandwidth: 200 Mbit/s, latency: 30 us}
  inside: 1 Gbit/s
nodes:
  - {name: pair, gpus: 2, type: cpu, memory: 512 MiB, flops: 20 GFLOP/s, memory_bandwidth: 4 GB/s}
  - {name: fast, gpus: 1, type: cpu, memory: 900 TiB, flops: 40 GFLOP/s, memory_bandwidth: 8 GB/s}
  - {name: slow, gpus: 1, type: cpu, memory: 512 MiB, flops: 10 GFLOP/s, memory_bandwidth: 2 GB/s}
"""
GPUS = """
name: gpus
links: {between: 10 Gbit/s}
nodes:
  - {name: new, gpus: 2, type: A100-40}
  - {name: old, gpus: 2, type: P100}
"""
TWO = """
name: two
links: {between: 1 Gbit/s}
nodes:
  - {name: new, gpus: 1, type: cpu, memory: 2 GiB, flops: 40 GFLOP/s, memory_bandwidth: 8 GB/s}
  - {name: old, gpus: 1, type: cpu, memory: 2 GiB, flops: 20 GFLOP/s, memory_bandwidth: 4 GB/s}
"""
WHY_NOT = network.missing()
needs_links = pytest.mark.skipif(bool(WHY_NOT), reason=f"no limited links here: {WHY_NOT}")


def unlike() -> Cluster:
    return load_cluster(UNLIKE)


def left(pid: int) -> list[str]:
    """Return the leftovers of a process's testbeds: namespaces, control groups, processes."""
    mark = f"-{pid}-"
    folders = [Path("/run/netns"), Path("/sys/fs/cgroup")]
    found = [str(f) for folder in folders for f in folder.rglob("hap-*") if mark in f.name]
    return found + [f"process {p}" for p, name in ownership._processes() if mark in name]


# --- Figures --------------------------------------------------------------------------------


def test_a_cluster_that_fits_is_left_as_it_is() -> None:
    cluster = unlike()
    assert choose_scale(cluster, 0.9, CORE) == 1
    assert scaled(cluster, 1.0, "scaled") is cluster
    assert choose_scale(cluster, 0.45, CORE) == pytest.approx(0.5)  # 0.9 cores are needed


def test_no_rank_needs_more_than_a_core() -> None:
    assert choose_scale(unlike().only(2), None, 10e9) == pytest.approx(0.25)  # of 4 cores


def test_scaling_keeps_flops_per_byte_and_slows_everything() -> None:
    cluster = load_cluster(GPUS)
    scale = choose_scale(cluster, 1.0, CORE)
    small = scaled(cluster, scale, "scaled")
    rates = [device.flops_per_s["float32"] for device in small.devices]
    assert sum(rates) / CORE == pytest.approx(1.0)
    for before, after in zip(cluster.devices, small.devices, strict=True):
        for dtype, rate in before.flops_per_s.items():
            ratio = rate / cluster.inter.bandwidth_bytes_per_s
            assert after.flops_per_s[dtype] / small.inter.bandwidth_bytes_per_s == pytest.approx(
                ratio
            )
        assert after.launch_s == pytest.approx(before.launch_s / scale)
        assert after.memory_bytes == before.memory_bytes
        assert "slower by" in after.source["flops_per_s.float32"]
    assert small.inter.latency_s == pytest.approx(cluster.inter.latency_s / scale)
    written = scaled(cluster, scale, "as written")
    assert (written.inter, written.intra) == (cluster.inter, cluster.intra)
    assert written.devices == small.devices


@pytest.mark.parametrize("cores", [0.0, -1.0, 1e6])
def test_cores_that_are_not_there_are_refused(cores: float) -> None:
    with pytest.raises(InputError) as error:
        Testbed(unlike(), cores, core_flops_per_s=CORE)
    assert error.value.hint


def test_links_are_shared_by_the_ranks_of_a_node_alone() -> None:
    links = {(link.near, link.rank): link for link in network.pipes(unlike())}
    assert set(links) == {("up0", None), *(("net0", rank) for rank in range(4))}
    assert links["up0", None].bytes_per_s == 25e6
    assert [links["net0", rank].bytes_per_s for rank in range(4)] == [125e6, 125e6, 25e6, 25e6]
    assert [links["net0", rank].bridge for rank in range(4)] == ["node0", "node0", "core", "core"]
    one_node = unlike().keep((0, 1))
    assert [link.bytes_per_s for link in network.pipes(one_node)] == [125e6, 125e6]


def test_addresses_differ() -> None:
    assert len({network.address(rank) for rank in range(1000)}) == 1000


@pytest.mark.parametrize("rate", [1e3, 1e6, 25e6, 1e9, 300e9])
def test_a_bucket_holds_a_train_of_packets(rate: float) -> None:
    words = network.tbf(rate).split()
    figures = dict(zip(words[1::2], words[2::2], strict=True))
    assert int(figures["rate"].removesuffix("bit")) * 1448 / 1514 / 8 == pytest.approx(
        rate, rel=1e-3
    )
    assert 2 * 1514 <= int(figures["burst"]) < int(figures["limit"])


# --- Missing tools and rights ----------------------------------------------------------------


def test_without_tools_it_says_what_is_missing_and_what_is_possible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HapError) as error, Testbed(unlike(), 0.2, core_flops_per_s=CORE):
        pass
    assert "ip and tc not found" in error.value.what
    assert "unlimited" in error.value.hint


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in network.missing()


def add_up() -> tuple[float, str, str]:
    total = torch.ones(1) * 10 ** dist.get_rank()
    dist.all_reduce(total)
    return float(total), os.environ["LOCAL_RANK"], os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.slow
@pytest.mark.gloo
def test_speeds_alone_need_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing = tmp_path / "mountinfo"
    nothing.write_text("")
    monkeypatch.setattr(quotas, "_MOUNTS", nothing)
    with Testbed(unlike(), 0.5, links="unlimited", core_flops_per_s=CORE) as bed:
        assert "duty cycle" in bed.notes[0]
        assert any("not limited" in note for note in bed.notes)
        assert not [name for name in left(os.getpid()) if not name.startswith("process ")]
        results = bed.spawn(add_up, timeout_s=300)
    assert results == [(1111.0, local, "lo") for local in ("0", "1", "0", "0")]
    assert left(os.getpid()) == []


def test_a_testbed_is_used_in_a_with_and_once() -> None:
    bed = Testbed(unlike(), 0.5, links="unlimited", core_flops_per_s=CORE)
    with pytest.raises(InputError, match="not up"):
        bed.spawn(add_up)
    with bed, pytest.raises(InputError, match="up already"):
        bed.__enter__()
    with pytest.raises(InputError, match="unknown"):
        Testbed(unlike(), links="none")  # type: ignore[arg-type]


# --- Real hosts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(unlike(), 0.9, core_flops_per_s=CORE) as made:
        yield made
    assert left(os.getpid()) == []


def qdisc(namespace: str, interface: str) -> tuple[str, float]:
    """Return (kind, bytes per second) of an interface's queueing discipline."""
    command = ["tc", "-n", namespace, "-json", "qdisc", "show", "dev", interface]
    (found,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found["kind"], found["options"].get("rate", math.inf)


@needs_links
def test_both_ends_of_every_link_have_the_rate_of_the_file(bed: Testbed) -> None:
    assert bed._network is not None
    switch = bed._network.namespace(None)
    for rank, rate in enumerate([125e6, 125e6, 25e6, 25e6]):
        ends = (bed._network.namespace(rank), "net0"), (switch, f"rank{rank}")
        for end in ends:
            kind, found = qdisc(*end)
            assert kind == "tbf"
            assert found * 1448 / 1514 == pytest.approx(rate, rel=1e-3)
    for end in ("up0", "down0"):
        assert qdisc(switch, end)[1] * 1448 / 1514 == pytest.approx(25e6, rel=1e-3)
    assert [host.uplink_bytes_per_s for host in bed.hosts] == [25e6, 25e6, None, None]


TCP = ("tcp_congestion_control", "tcp_slow_start_after_idle")


def place() -> dict[str, str]:
    total, local, interface = add_up()
    return {
        "total": str(total),
        "local": f"{local} of {os.environ['LOCAL_WORLD_SIZE']}",
        "interface": interface,
        "interfaces": " ".join(sorted(name for _, name in socket.if_nameindex())),
        "namespace": os.readlink("/proc/self/ns/net"),
        "groups": Path("/proc/self/cgroup").read_text(),
        "tcp": " ".join(Path(f"/proc/sys/net/ipv4/{name}").read_text().strip() for name in TCP),
    }


@pytest.mark.slow
@needs_links
@pytest.mark.gloo
def test_ranks_work_in_hosts_of_their_own(bed: Testbed) -> None:
    home = os.readlink("/proc/self/ns/net")
    found = bed.spawn(place, timeout_s=300)
    assert os.readlink("/proc/self/ns/net") == home
    assert [one["total"] for one in found] == ["1111.0"] * 4
    assert [one["local"] for one in found] == ["0 of 2", "1 of 2", "0 of 1", "0 of 1"]
    assert {one["interface"] for one in found} == {"net0"}
    assert {one["tcp"] for one in found} == {"reno 0"}
    assert {one["interfaces"] for one in found} == {"lo net0"}  # none of the host's
    assert len({home, *(one["namespace"] for one in found)}) == 5
    assert bed._quotas is not None
    if bed._quotas.enforced:
        for rank, one in enumerate(found):
            group, settings = bed._quotas._cpu[rank]
            assert f"/{group.name}" in one["groups"]
            for name, value in settings:
                assert (group / name).read_text().split() == value.split()


def tell() -> None:
    report(os.getpid())


@pytest.mark.slow
@needs_links
@pytest.mark.gloo
def test_links_are_free_until_ranks_are_limited(bed: Testbed) -> None:
    ends = [(bed._network.namespace(rank), "net0") for rank in range(4)]  # type: ignore[union-attr]
    seen: list[set[str]] = []

    def look() -> None:
        seen.append({qdisc(*end)[0] for end in ends})

    def heard(rank: int, pid: object) -> None:
        assert isinstance(pid, int)
        look()
        bed.limit(rank, pid)
        look()

    bed.spawn(tell, on_report=heard, timeout_s=300, limited=False)
    assert seen[0] == {"noqueue"}
    assert seen[1:] == [{"tbf"}] * 7
    bed.spawn(tell, on_report=lambda rank, pid: look(), timeout_s=300, limited=False)
    look()
    assert seen[8:] == [{"noqueue"}] * 4 + [{"tbf"}]


@needs_links
def test_speeds_are_held_by_more_of_a_core_or_less(bed: Testbed) -> None:
    quotas = bed._quotas
    assert quotas is not None
    if not quotas.enforced:
        pytest.skip(f"the kernel enforces no quotas here: {quotas.reason}")

    def parts() -> list[float]:
        def part(group: Path) -> float:
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
                )
            return int(quota) / int(period)

        return [part(group) for group, _ in quotas._cpu.values()]

    for slower, pace in ((1.25, 1.25), (0.5, 0.5), (100.0, 1 / 0.4), (1.0, 1.0)):
        bed.hold(slower)
        assert bed.pace == pytest.approx(min(pace, len(os.sched_getaffinity(0)) / 0.9))
        assert parts() == pytest.approx([f * bed.pace for f in quotas.fractions], rel=0.01)


@needs_links
def test_memory_is_that_of_the_device_and_the_interpreters(bed: Testbed) -> None:
    limits = [host.memory_bytes for host in bed.hosts]
    small = (512 << 20) + (384 << 20)
    assert limits == [small, small, None, small]
    assert any("rank 2" in note for note in bed.notes)


def hoard() -> int:
    if dist.get_rank() == 3:
        return torch.ones(400 << 20).numel()  # 1.6 GB
    dist.barrier()
    return 0


@pytest.mark.slow
@needs_links
@pytest.mark.gloo
def test_a_rank_that_takes_more_memory_is_killed(bed: Testbed) -> None:
    assert bed._quotas is not None
    if not bed._quotas.limits_memory:
        pytest.skip(f"memory cannot be limited here: {bed._quotas.memory_reason}")
    with pytest.raises(HapError, match=r"rank 3.*SIGKILL") as error:
        bed.spawn(hoard, timeout_s=300)
    assert "memory" in error.value.hint


@needs_links
def test_a_command_runs_on_every_host(bed: Testbed) -> None:
    lines: list[str] = []
    script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $OMP_NUM_THREADS; echo ${X-no} >&2"
    assert bed.run(["sh", "-c", script], on_line=lines.append) == 0
    told = {line for line in lines if "/" in line}
    locals_ = (0, 1, 0, 0)
    assert told == {f"[{r}] {r}/4 {locals_[r]} 10.77.1.1 1" for r in range(4)}
    assert sorted(set(lines) - told) == [f"[{rank}] no" for rank in range(4)]


@pytest.mark.slow
@needs_links
def test_a_failing_command_ends_the_others_and_gives_its_code(bed: Testbed) -> None:
    lines: list[str] = []
    script = "test $RANK = 2 && exit 7; sleep 1000"
    start = time.monotonic()
    assert bed.run(["sh", "-c", script], on_line=lines.append) == 7
    assert time.monotonic() < start + 500
    assert lines == ["[2] ended with code 7, and all other ranks with it"]
    assert bed.run(["sh", "-c", "kill -KILL $$"], on_line=lines.append) == 128 + 9
    with pytest.raises(InputError, match="no-such-program"):
        bed.run(["no-such-program"])
    assert not [name for name in left(os.getpid()) if name.startswith("process ")]


# --- The end --------------------------------------------------------------------------------

OWNER = """
import sys
from hap.cluster.cluster_file import load_cluster
from hap.runtime.testbed import Testbed
if __name__ == "__main__":
    with Testbed(load_cluster(sys.argv[1]), 0.5, core_flops_per_s=1e11) as bed:
        bed.run(["sh", "-c", "(setsid sleep 1000 &); echo up; sleep 1000"],
                on_line=lambda line: print(line, flush=True))
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The owner of a testbed with running ranks, whose children have left its session."""
    file, script = tmp_path / "unlike.yaml", tmp_path / "owner.py"
    file.write_text(UNLIKE)
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(Path(hap.__file__).parents[1])}
    # A background job inherits an ignored SIGINT; the owner must not.
    command = ["env", "--default-signal=INT", sys.executable, str(script), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(4)} == {f"[{r}] up\n" for r in range(4)}
        assert len([name for name in left(process.pid) if name.startswith("process ")]) >= 8
        yield process
        process.kill()
    clean()


@pytest.fixture
def foreign() -> Iterator[str]:
    """Another program's namespace, with a name like ours and an interface."""
    name = "hap-bed-of-mine"
    subprocess.run(["ip", "netns", "add", name], check=True)
    link = ["ip", "-n", name, "link", "add", "name", "rank0", "type", "bridge"]
    subprocess.run(link, check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.slow
@needs_links
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_owner_that_is_signalled_removes_everything(
    running: subprocess.Popen[str], number: signal.Signals
) -> None:
    running.send_signal(number)
    running.wait(60)
    assert left(running.pid) == []


@pytest.mark.slow
@needs_links
def test_after_a_kill_the_next_start_cleans_up(
    running: subprocess.Popen[str], foreign: str
) -> None:
    bystander = subprocess.Popen(["ip", "netns", "exec", foreign, "sleep", "1000"])
    try:
        with Testbed(unlike(), 0.2, core_flops_per_s=CORE):
            assert len(left(running.pid)) > 10  # its owner lives, so they stay
        running.kill()
        running.wait()
        assert left(running.pid)  # a killed owner leaves something
        with Testbed(unlike(), 0.2, core_flops_per_s=CORE):
            assert left(running.pid) == []
        links = subprocess.run(["ip", "-n", foreign, "-br", "link"], capture_output=True, text=True)
        assert "rank0" in links.stdout
        assert psutil.Process(bystander.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        bystander.kill()
        bystander.wait()


@needs_links
def test_hosts_go_when_the_body_raises_and_when_starting_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = left(os.getpid())  # of the module's bed, if it is up
    with pytest.raises(KeyError), Testbed(unlike(), 0.2, core_flops_per_s=CORE):
        assert len(left(os.getpid())) > len(before)
        raise KeyError
    assert left(os.getpid()) == before
    monkeypatch.setattr(network, "tbf", lambda rate: "no-such-qdisc")
    with pytest.raises(HapError, match="tc"), Testbed(unlike(), 0.2, core_flops_per_s=CORE):
        pass
    assert left(os.getpid()) == before


def test_only_names_of_ended_owners_are_leftovers() -> None:
    name = ownership.new_name()
    namespace, pid, start, number = name.split("-")
    assert not ownership.left_over(f"hap-bed-{name}-rank0", "hap-bed")
    assert ownership.left_over(
        f"hap-bed-{namespace}-{pid}-{int(start) - 1}-{number}-rank0", "hap-bed"
    )
    assert not ownership.left_over(f"hap-bed-{int(namespace) + 1}-{pid}-1-0", "hap-bed")  # unseen
    assert not ownership.left_over(f"hap-quota-{namespace}-{pid}-1-0", "hap-bed")
    for foreign in ("hap-bed", "hap-bed-", "hap-bed-mine", "eth0", f"x-hap-bed-{name}"):
        assert not ownership.left_over(foreign, "hap-bed")


# --- The command ----------------------------------------------------------------------------


def test_the_command_shows_the_hosts_and_passes_on_the_code(tmp_path: Path) -> None:
    file = tmp_path / "unlike.yaml"
    file.write_text(UNLIKE)
    words = ["testbed", str(file), "--cores", "0.5", "--links", "unlimited"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert all(name in shown.output for name in ("pair:0", "pair:1", "fast:0", "slow:0"))
    ran = CliRunner().invoke(main, [*words, "--", "sh", "-c", "echo rank $RANK; exit $RANK"])
    assert ran.exit_code in (1, 2, 3)
    assert all(f"[{rank}] rank {rank}" in ran.output for rank in range(4))


def test_the_command_says_what_it_cannot_do(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["testbed", "--clean"]).exit_code == 0
    missing = CliRunner().invoke(main, ["testbed", "--cores", "1"])
    assert missing.exit_code == 2
    assert "no cluster" in missing.output
    file = tmp_path / "unlike.yaml"
    file.write_text(UNLIKE)
    unknown = CliRunner().invoke(main, ["testbed", str(file), "--links", "some"])
    assert unknown.exit_code == 2
    assert "as-written" in unknown.output


@needs_links
@pytest.mark.gloo
@pytest.mark.slow
def test_emulated_hosts_are_profiled_on_the_nodes_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hosts = Testbed.spawn

    def short(bed: Testbed, measure: Any, args: tuple[Any, ...], **options: Any) -> Any:
        return on_hosts(bed, shortly, (measure, *args), **options)

    monkeypatch.setattr(Testbed, "spawn", short)
    file, output = tmp_path / "two.yaml", tmp_path / "measured.yaml"
    file.write_text(TWO)
    words = ["profile", "--testbed", str(file), "--quick", "-o", str(output)]
    before = left(os.getpid())  # hosts of other tests
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert load_cluster(output).nodes == ("new", "old")
    assert set(load_cluster(output).collectives) == set(IMPLEMENTATIONS)
    assert left(os.getpid()) == before


@pytest.mark.parametrize("word", ["--nproc", "--nodes"])
def test_the_ranks_of_a_testbed_are_those_of_its_file(word: str) -> None:
    result = CliRunner().invoke(main, ["profile", "--testbed", "two.yaml", word, "2"])
    assert result.exit_code == 2
    assert "--testbed" in result.output
