"""The profiler: fits recover known figures, files survive, dead ranks are named, runs resume."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

from hap.cli import profiling
from hap.cli.commands import main
from hap.cluster.cluster_file import load_cluster
from hap.cluster.device import Device
from hap.cluster.link import IMPLEMENTATIONS
from hap.cluster.work import ELEMENTWISE, PRODUCTS, Work
from hap.errors import HapError, InputError
from hap.ir.graph import Graph, Input, Node, Ref, Tensor
from hap.profiler import device_figures, fixed_costs
from hap.profiler.call_timing import QUICK, seconds_in_queue, seconds_of_host, seconds_per_call
from hap.profiler.fit import predict
from hap.profiler.probes import HOST, LAUNCH, UPDATE, Arena, Probe, probes
from hap.profiler.samples import ExchangeRecord, Header, Journal, OpRecord, RankInfo, line, read
from hap.runtime.elastic.meeting import connect
from hap.runtime.heartbeats import Heartbeats
from hap.runtime.launch import LOST, report, spawn
from hap.synthesizer.cost.operator_work import ALWAYS_LOWERED, node_work
from tests.known_device import TRUTH
from tests.short_profile import shortly

ROOT = Path(__file__).parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAKE = torch.device("meta")  # has the probes of CUDA

GPU = Device(
    name="x:0", kind="x", node="x", memory_bytes=2**37, memory_bytes_per_s=4.3e12, launch_s=7e-6,
    flops_per_s={"float32": 48e12, "tfloat32": 380e12, "float16": 700e12, "bfloat16": 700e12},
    operand_bytes_per_s=20e12, relaunch=0.6,
    efficiency={
        "conv": 0.5, "conv_backward": 0.4, "attention": 0.5, "attention_backward": 0.45,
        "math": 0.01, "tanh": 0.008, "loss": 0.004, "reduce": 0.01, "norm": 0.008, "norm_backward": 0.002,
        "pool": 0.01, "pool_backward": 0.002, "random": 0.005,
        "update": 0.02,
    },
)  # fmt: skip
"""A device like an H200; its elementwise kinds are slower than their traffic, to be recoverable."""
P100 = replace(
    GPU, memory_bytes_per_s=0.5e12, operand_bytes_per_s=2e12,
    flops_per_s={"float32": 8e12, "tfloat32": 8e12, "float16": 8e12, "bfloat16": 2e12},
)  # fmt: skip


# --- devices --------------------------------------------------------------------------------


def op_records(speeds: list[float], noise: float, rng: random.Random) -> list[OpRecord]:
    """Return measurements of the profiler's operators by ranks of given speeds, three windows."""
    return [
        OpRecord(
            name=probe.name,
            work=probe.work,
            seconds=tuple(
                tuple(
                    TRUTH.seconds(probe.work) / speed * rng.uniform(1 - noise, 1 + noise)
                    for _ in range(3)
                )
                for speed in speeds
            ),
        )
        for probe in probes(CPU)
    ]


def ranks(count: int, memory: int = 2**33) -> list[RankInfo]:
    return [RankInfo(node=f"n{k}", kind="x", memory_bytes=memory) for k in range(count)]


def test_the_fit_recovers_a_device_from_noisy_samples() -> None:
    records = op_records([1.0], 0.03, random.Random(0))
    (found,) = device_figures.types(ranks(1), records, "today")
    fitted = found.device
    assert fitted.flops_per_s == pytest.approx(TRUTH.flops_per_s, rel=0.06)
    assert fitted.memory_bytes_per_s == pytest.approx(TRUTH.memory_bytes_per_s, rel=0.06)
    assert fitted.operand_bytes_per_s == pytest.approx(TRUTH.operand_bytes_per_s, rel=0.15)
    assert fitted.launch_s == pytest.approx(TRUTH.launch_s, rel=0.1)
    assert fitted.relaunch == pytest.approx(TRUTH.relaunch, rel=0.15)
    for kind in TRUTH.efficiency:  # seconds, because figures trade off at the roofline's ridge
        work = Work(kind, "float32", 1e8, 1e6)
        assert fitted.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.1), kind
    assert max(abs(r.error) for r in found.residuals) < 0.12
    assert "n=5" in fitted.source["flops_per_s.float32"]
    assert re.search(r"spread \d+%", fitted.source["memory_bytes_per_s"])


def test_among_operators_of_a_kind_the_long_ones_count_more() -> None:
    """If no figures explain all of them, the fit is closest for those that dominate a step."""
    slow = 0.7
    records = [
        replace(r, seconds=tuple(tuple(s / slow for s in each) for each in r.seconds))
        if r.work.kind == "math" and r.work.bytes < 2**23 else r
        for r in op_records([1.0], 0.0, random.Random(0))
    ]  # fmt: skip
    (found,) = device_figures.types(ranks(1), records, "today")
    math = [r for r in found.residuals if r.kind.startswith("math")]
    shortest, *_, longest = sorted(math, key=lambda r: r.measured_s)
    assert abs(longest.error) < abs(shortest.error) / 4


def test_faster_launches_in_a_loop_do_not_change_the_fit() -> None:
    records = op_records([1.0, 1.0], 0.0, random.Random(0))
    sooner_s = 0.9 * TRUTH.launch_s
    looped = [
        replace(r, seconds=tuple(tuple(s - sooner_s for s in each) for each in r.seconds))
        if r.name != LAUNCH and r.work.kind != "update" else r
        for r in records
    ]  # fmt: skip
    (expected,), (found,) = (
        device_figures.types(ranks(2), each, "today") for each in (records, looped)
    )
    assert [r.name for r in found.residuals] == [r.name for r in expected.residuals]
    for ours, theirs in zip(found.residuals, expected.residuals, strict=True):
        assert ours.predicted_s == pytest.approx(theirs.predicted_s), ours.name


def test_alike_ranks_are_one_type_and_unlike_ones_are_not() -> None:
    rng = random.Random(1)
    records = op_records([4.0, 4.1, 1.0, 1.02, 2.0], 0.04, rng)
    found = device_figures.types(ranks(5), records, "today")
    assert [t.ranks for t in found] == [(0, 1), (2, 3), (4,)]
    fast, slow = (t.device.flops_per_s["float32"] for t in found[:2])
    assert fast / slow == pytest.approx(4.0, rel=0.05)
    unlike = [*ranks(2), *ranks(3, memory=2**30)]
    assert [t.ranks for t in device_figures.types(unlike, records, "today")] == [
        (0, 1),
        (2, 3),
        (4,),
    ]
    alike_but_small = op_records([1.0, 1.0], 0.01, rng)
    small = [ranks(1)[0], replace(ranks(1)[0], memory_bytes=2**30)]
    assert len(device_figures.types(small, alike_but_small, "today")) == 2


def test_the_fit_recovers_a_gpu_from_noisy_samples() -> None:
    rng = random.Random(0)
    records = [
        OpRecord(
            name=probe.name, work=probe.work,
            seconds=(tuple(predict(GPU, [probe.work]) * rng.uniform(0.95, 1.05) for _ in range(3)),),
        )
        for probe in probes(CUDA)
    ]  # fmt: skip
    (found,) = device_figures.types(ranks(1, GPU.memory_bytes), records, "today")
    fitted = found.device
    assert fitted.flops_per_s == pytest.approx(GPU.flops_per_s, rel=0.15)
    assert fitted.efficiency == pytest.approx(GPU.efficiency, rel=0.15)
    for figure in ("memory_bytes_per_s", "operand_bytes_per_s", "launch_s", "relaunch"):
        assert getattr(fitted, figure) == pytest.approx(getattr(GPU, figure), rel=0.15), figure
    assert max(abs(r.error) for r in found.residuals) < 0.12
    assert all("n=7 " in fitted.source[f"flops_per_s.{dtype}"] for dtype in GPU.flops_per_s)
    assert fitted.host_s == pytest.approx(GPU.launch_s, rel=0.05), "the time of its probe"
    assert "measured today" in fitted.source["host_s"]


@pytest.mark.slow
def test_the_host_issues_a_layer_of_operators() -> None:
    call = fixed_costs.layer(torch.randn, torch.float32, batch=1)
    with Counter() as seen:
        call()
    views = ("view", "t", "transpose", "clone")  # a view that must copy counts as one
    kernels = [op for op in seen.ops if op.split(".")[1] not in views]
    assert len(kernels) == fixed_costs.KERNELS
    (host,) = (probe for probe in probes(CUDA) if probe.name == HOST)
    assert (host.count, host.clock, host.quick) == (fixed_costs.KERNELS, "host", True)
    seconds = seconds_of_host(call, CPU, 5)
    assert len(seconds) == 5
    assert min(seconds) > 0


def test_the_profile_of_a_cpu_has_no_time_of_the_host() -> None:
    assert not [probe for probe in probes(CPU) if probe.name == HOST]
    (found,) = device_figures.types(ranks(1), op_records([1.0], 0.0, random.Random(0)), "today")
    assert found.device.host_s == 0
    assert "host_s" not in found.device.source


class Counter(TorchDispatchMode):
    """Records the names of all operators of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_quick_profile_of_a_gpu_has_a_rate_of_each_dtype() -> None:
    quick = [probe for probe in probes(CUDA) if probe.quick]
    records = [OpRecord(name=p.name, work=p.work, seconds=((GPU.seconds(p.work),),)) for p in quick]
    (found,) = device_figures.types(ranks(1), records, "today")
    assert found.device.flops_per_s == pytest.approx(GPU.flops_per_s, rel=0.05)
    for kind in ("attention", "conv_backward"):
        assert found.device.efficiency[kind] == pytest.approx(GPU.efficiency[kind], rel=0.05)


def test_probes_of_a_gpu_take_longer_than_their_launches_and_end_soon() -> None:
    for probe in probes(CUDA):
        if probe.name not in (LAUNCH, UPDATE):
            assert GPU.seconds(probe.work) * probe.count > 4 * GPU.launch_s, probe.name
            assert P100.seconds(probe.work) * probe.count < 0.5, probe.name


class Recorder(TorchDispatchMode):
    """Records the last operator of a call as a node of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.node: Node | None = None
        self.tensors: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if not any(word in name for word in ("slice", "view", "aten.t.", "detach")):
            self.tensors = {}
            outs = out if isinstance(out, tuple | list) else (out,)
            made = tuple(self._note(o).name if o is not None and o.numel() else None for o in outs)
            self.node = Node(
                name="n", op=name, args=tuple(map(self._arg, args)), kwargs=(), outputs=made,
                source="", module="",
            )  # fmt: skip
        return out

    def _note(self, x: torch.Tensor) -> Tensor:
        tensor = Tensor(
            name=f"t{len(self.tensors)}", shape=tuple(x.shape), dtype=str(x.dtype).split(".")[1]
        )
        self.tensors[tensor.name] = tensor
        return tensor

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return Ref(self._note(arg).name)
        return tuple(map(self._arg, arg)) if isinstance(arg, list | tuple) else arg


# Probes of several operators, or of operators that never occur in a graph.
COMPOSED = (
    "dropout", "sgd", "adamw", "update", "launch", "host", "transposed", "exp", "relu", "sum",
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "probe"),
    [(d, p) for d in (CPU, FAKE) for p in probes(d) if not p.name.startswith(COMPOSED)],
    ids=lambda x: x.name if isinstance(x, Probe) else x.type,
)
def test_probes_have_the_work_that_planning_prices(
    device: torch.device, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a graph, each of these is one operator, built from the function that is timed.
    for function, operator in (
        ("attention", "sdpa"), ("attention_backward", "sdpa_backward"),
        ("cross_entropy_terms", "cross_entropy"), ("cross_entropy_backward",) * 2,
    ):  # fmt: skip
        monkeypatch.setattr(f"hap.profiler.probes.{function}", getattr(torch.ops.hap, operator))
    call = probe.make(Arena(device))
    with Recorder() as seen:
        call()
    assert seen.node is not None
    made = {o for o in seen.node.outputs if o}
    given = tuple(Input(tensor=t, role="input", target=t) for t in seen.tensors if t not in made)
    products = "tfloat32" if probe.work.dtype == "tfloat32" else "float32"
    graph = Graph(
        inputs=given, nodes=(seen.node,), outputs=(), tensors=seen.tensors, products=products
    )
    work = node_work(seen.node, graph)
    in_tf32 = probe.work.dtype == "float32" and probe.work.kind in ALWAYS_LOWERED
    assert (work.kind, work.dtype) == (probe.work.kind, "tfloat32" if in_tf32 else probe.work.dtype)
    assert work.flops == probe.work.flops
    assert work.bytes == pytest.approx(probe.work.bytes, rel=0.01)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=lambda d: d.type)
def test_every_kind_of_work_is_probed_in_one_dtype(device: torch.device) -> None:
    assert {p.work.kind for p in probes(device) if p.quick} >= {*ELEMENTWISE, *PRODUCTS}
    for kind in {*ELEMENTWISE, *PRODUCTS[1:]}:
        assert len({p.work.dtype for p in probes(device) if p.work.kind == kind}) == 1


def test_a_call_is_timed_by_windows() -> None:
    arena = Arena(CPU)
    x = arena.cut(256, 256)
    one = seconds_per_call(lambda: torch.mm(x, x), CPU, QUICK)
    assert len(one) == QUICK.windows
    assert all(s > 0 for s in one)
    assert (arena.cut(100) != 0).all()
    assert arena.cut(64).data_ptr() != arena.cut(64).data_ptr()


@pytest.mark.gpu
def test_the_queue_and_the_host_are_timed_on_cuda() -> None:
    arena = Arena(torch.device("cuda"))
    seconds_in_queue(fixed_costs.long(arena.cut), fixed_costs.small(arena.cut), 1)
    (queued_s,) = seconds_in_queue(fixed_costs.long(arena.cut), fixed_costs.small(arena.cut), 1)
    issued_s = min(seconds_of_host(fixed_costs.layer(arena.cut, torch.float16), arena.device, 8))
    assert queued_s > 0
    assert issued_s > 0


@pytest.mark.gpu
def test_cuda_is_timed_with_events() -> None:
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    seconds = seconds_per_call(lambda: torch.mm(x, x), device, QUICK)
    assert all(1e13 > 2 * 2048**3 / s / 1e2 > 1e9 for s in seconds)


# --- files ----------------------------------------------------------------------------------


def header(**changes: Any) -> Header:
    return replace(Header(ranks=tuple(ranks(2)), quick=True, date="today"), **changes)


def test_samples_are_kept_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml.samples.jsonl"
    records = op_records([1.0, 2.0], 0.0, random.Random(0))[:3]
    sent = [
        ExchangeRecord(
            kind="all_reduce", how=how, nbytes=8, groups=((0, 1),), skew="even", src=(0.5, 0.5),
            dst=(0.5, 0.5), seconds=(1e-3, 2e-3),
        )
        for how in ("one shot", "two step")
    ]  # fmt: skip
    with Journal(path, header(), resume=False) as journal:
        for record in (*records, sent[0]):
            journal.add(record)
    assert list(read(path)) == [header(), *records, sent[0]]
    with path.open("a") as file:
        file.write(line(sent[1])[:40])  # truncated
    with Journal(path, header(date="later"), resume=True) as journal:
        assert list(journal.records.values()) == [*records, sent[0]]
        journal.add(sent[1])
    assert [r for r in read(path) if not isinstance(r, Header)] == [*records, *sent]
    for other in (header(quick=False), header(ranks=tuple(ranks(3)))):
        with pytest.raises(InputError, match="other ranks"):
            Journal(path, other, resume=True)
    path.write_text(path.read_text().replace('"ms"', "").replace('"name"', "name", 1))
    with pytest.raises(InputError, match=":2"):
        Journal(path, header(), resume=True)
    with Journal(path, header(), resume=False) as journal:
        assert not journal.records
        journal.add(sent[0])
    assert list(read(path)) == [header(), sent[0]]


# --- real ranks -----------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
def test_two_ranks_are_profiled_planned_for_and_resumed(tmp_path: Path) -> None:
    output = tmp_path / "two.yaml"
    settings = profiling.Settings(output=str(output), nodes=("a", "b"), quick=True)
    steps: list[tuple[int, int, str]] = []

    def launch(measure: Any, *, args: tuple[Any, ...], **options: Any) -> Any:
        return spawn(shortly, 2, args=(measure, *args), timeout_s=400, **options)

    def progress(done: int, total: int, what: str) -> None:
        steps.append((done, total, what))

    found = profiling.profile(settings, 2, launch=launch, progress=progress)
    assert steps[-1][0] == steps[-1][1]
    loaded = load_cluster(output)
    assert loaded == found.cluster
    assert loaded.nodes == ("a", "b")
    assert set(loaded.collectives) == set(IMPLEMENTATIONS)
    assert all("measured 20" in d.source["flops_per_s.float32"] for d in loaded.devices)
    assert [p for p in tmp_path.iterdir() if ".part" in p.name] == []
    words = ["plan", str(ROOT / "benchmarks/models/mlp.py:tiny"), "--cluster", str(output)]
    plan = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "plan.json")])
    assert plan.exit_code == 0, plan.stderr

    lines = settings.samples.read_text().splitlines(keepends=True)
    settings.samples.write_text("".join(lines[:-2]) + lines[-2][:30])
    steps.clear()
    profiling.profile(replace(settings, resume=True), 2, launch=launch, progress=progress)
    again = settings.samples.read_text().splitlines(keepends=True)
    assert len(again) == len(lines)
    assert again[1:-2] == lines[1:-2]  # kept exactly
    assert again[-2:] != lines[-2:]  # measured again


@pytest.mark.slow
@pytest.mark.gloo
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    settings = profiling.Settings(output=str(tmp_path / "c.yaml"), nodes=("a", "b"), quick=True)
    pids: dict[int, int] = {}

    def progress(done: int, total: int, what: str) -> None:
        if done == 1:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(HapError, match=r"rank 1: killed by SIGKILL"):
        launch = partial(spawn, world_size=2, before_rank=pids.__setitem__, timeout_s=120)
        profiling.profile(settings, 2, launch=launch, progress=progress)
    assert not (tmp_path / "c.yaml").exists()
    assert len(list(read(settings.samples))) >= 2  # measurements are kept


def silent_rank() -> str:
    """Rank 1 stops; rank 0 waits to be told, then resumes it."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    heard: list[str] = []
    told = threading.Event()

    def lost(text: str) -> None:
        heard.append(text)
        told.set()

    with Heartbeats(connect(), ["a", "rank 1 (on b)"], dist.get_rank(), lost, 4) as beats:
        beats.at("mm 512")
        dist.barrier()
        if dist.get_rank() == 1:
            told.wait(3)  # the store now knows its progress
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            told.wait(60)
            os.kill(pids[1], signal.SIGCONT)
        report("awake")
    return heard[0] if heard and dist.get_rank() == 0 else ""


@pytest.mark.slow
@pytest.mark.gloo
def test_a_rank_that_stops_is_named_by_the_others() -> None:
    told, _ = spawn(silent_rank, 2, timeout_s=150)
    assert told == "no heartbeat from rank 1 (on b) for 4 s, last seen at mm 512: it counts as lost"


HASTY = """\
from hap.cli.commands import main
from hap.cli import rank_watch
rank_watch.PATIENCE_S = 8.0
main()
"""
"""The command ``hap``, which takes a rank for dead sooner."""


@pytest.mark.gloo
@pytest.mark.slow
def test_under_torchrun_the_dead_rank_is_named_and_the_run_ends(tmp_path: Path) -> None:
    """Two processes share only a store, as on two machines; no launcher watches them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", HASTY, "profile", "--quick", "--nodes", "a,b"]
    processes = [
        subprocess.Popen(
            [*words, "-o", str(tmp_path / "c.yaml")], stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert processes[0].stderr is not None
        first = processes[0].stderr.readline()
        assert "samples" in first
        processes[1].kill()
        _, errors = processes[0].communicate(timeout=100)
        assert processes[0].returncode == LOST
        assert "no heartbeat from rank 1 (on b) for 8 s" in errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
