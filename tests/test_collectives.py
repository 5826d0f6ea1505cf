"""Process groups match the emulator, for every implementation and for uneven sizes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.emulate import run_ranks
from hap.runtime.launch import rank_device, spawn

WORLD = 3
SPLITS = [(2, 2, 2), (5, 0, 1), (0, 0, 6), (1, 3, 2)]
OTHER = [(2, 1, 1), (0, 4, 0), (1, 0, 3), (4, 0, 0)]  # sizes of the other dim
NUMBERS = (torch.float32, torch.float64, torch.int64)
ALL = (*NUMBERS, torch.bool, torch.bfloat16)


def whole(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return random small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def shard(x: Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> Tensor:
    return x.split(list(sizes), dim)[rank]


def gathers(comm: Comm) -> Iterator[tuple[str, Tensor]]:
    for dtype in ALL:
        for sizes in SPLITS:
            for dim, shape in ((0, (6, 4)), (1, (4, 6)), (1, (2, 6, 3)), (0, (6,))):
                x = shard(whole(dtype, *shape), dim, sizes, comm.rank)
                for how in ("padded", "grouped"):
                    name = f"all_gather {how} {dtype} {shape} dim {dim} {sizes}"
                    yield name, comm.all_gather(x, dim, sizes, how)


def reductions(comm: Comm) -> Iterator[tuple[str, Tensor]]:
    for dtype in NUMBERS:
        for sizes in SPLITS:
            for dim, shape in ((0, (6, 4)), (1, (4, 6)), (1, (2, 6, 3)), (0, (6,))):
                x = whole(dtype, *shape, seed=comm.rank)
                for how in ("padded", "grouped"):
                    name = f"reduce_scatter {how} {dtype} {shape} dim {dim} {sizes}"
                    yield name, comm.reduce_scatter(x, dim, sizes, how)
        for shape in ((), (1,), (7,), (4, 6), (0, 3)):
            x = whole(dtype, *shape, seed=comm.rank)
            for how in ("one shot", "two step"):
                yield f"all_reduce {how} {dtype} {shape}", comm.all_reduce(x, how)
            yield f"all_reduce_max {dtype} {shape}", comm.all_reduce_max(x)


def normalisers(comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """Reduce log-sum-exps; the terms of some ranks, or of all, are -inf."""
    for dtype in (torch.float32, torch.float64):
        for shape in ((), (7,), (4, 6), (0, 3)):
            x = whole(dtype, *shape, seed=comm.rank)
            if comm.rank != 1:
                x = x.clone().view(-1)
                x[::2] = -torch.inf
                x = x.view(shape)
            for how in ("terms gathered", "two reductions"):
                yield f"all_reduce_lse {how} {dtype} {shape}", comm.all_reduce_lse(x, how)
    nothing = torch.full((2, 3), -torch.inf)
    for how in ("terms gathered", "two reductions"):
        yield f"all_reduce_lse {how} of nothing", comm.all_reduce_lse(nothing, how)
        xs = [whole(torch.float32, 3, seed=comm.rank), nothing]
        for i, out in enumerate(comm.all_reduce_lse_many(xs, how)):
            yield f"{how} all_reduce_lse_many {i}", out


def exchanges(comm: Comm) -> Iterator[tuple[str, Tensor]]:
    for dtype in ALL:
        for a, b in zip(SPLITS, OTHER, strict=True):
            cases = ((0, 1, (6, 4), a, b), (1, 0, (4, 6), a, b), (2, 0, (4, 2, 6), a, b))
            for src, dst, shape, src_sizes, dst_sizes in cases:
                x = shard(whole(dtype, *shape), src, src_sizes, comm.rank)
                for how in ("exact", "gathered"):
                    name = f"all_to_all {how} {dtype} {shape} {src}->{dst} {src_sizes} {dst_sizes}"
                    yield name, comm.all_to_all(x, src, dst, src_sizes, dst_sizes, how)


def strided(comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """Run collectives on inputs that are not contiguous, like views inside a program."""
    x = whole(torch.float64, 6, 4, seed=comm.rank).t()
    yield "all_reduce of a transpose", comm.all_reduce(x, "one shot")
    yield "two-step all_reduce of a transpose", comm.all_reduce(x, "two step")
    for how in ("padded", "grouped"):
        part = shard(whole(torch.float64, 4, 6).t(), 0, (5, 0, 1), comm.rank)
        yield f"{how} all_gather of a transpose", comm.all_gather(part, 0, (5, 0, 1), how)
        yield f"{how} reduce_scatter of a transpose", comm.reduce_scatter(x, 1, (1, 3, 2), how)
    part = shard(whole(torch.float64, 4, 6).t(), 0, (1, 3, 2), comm.rank)
    yield "all_to_all of a transpose", comm.all_to_all(part, 0, 1, (1, 3, 2), (2, 1, 1), "exact")


def fused(comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """Run several tensors in one collective."""
    shapes, dims = ((6, 4), (2, 6), (6,)), (0, 1, 0)
    for how in ("padded", "grouped"):
        for k in range(len(SPLITS)):
            sizes = [SPLITS[k], SPLITS[k - 1], SPLITS[k - 2]]
            wholes = [whole(torch.float32, *shape, seed=7) for shape in shapes]
            xs = [shard(x, d, s, comm.rank) for x, d, s in zip(wholes, dims, sizes, strict=True)]
            for i, out in enumerate(comm.all_gather_many(xs, dims, sizes, how)):
                yield f"{how} all_gather_many {k} {i}", out
            xs = [whole(torch.float32, *shape, seed=comm.rank) for shape in shapes]
            for i, out in enumerate(comm.reduce_scatter_many(xs, dims, sizes, how)):
                yield f"{how} reduce_scatter_many {k} {i}", out
    for how in ("one shot", "two step"):
        xs = [whole(torch.float32, *shape, seed=comm.rank) for shape in shapes]
        for i, out in enumerate(comm.all_reduce_many(xs, how)):
            yield f"{how} all_reduce_many {i}", out


def battery(comm: Comm) -> dict[str, Tensor | bool | str]:
    """Run all collectives; also report whether inputs are kept and whether the ranks agree."""
    found: dict[str, Tensor | bool | str] = {}
    for part in (gathers, reductions, normalisers, exchanges, strided, fused):
        for name, out in part(comm):
            assert name not in found
            found[name] = out.clone()
    kept = whole(torch.float32, 6, 4, seed=comm.rank)
    given = kept.clone()
    for how in ("padded", "grouped"):
        comm.reduce_scatter(given, 0, (2, 2, 2), how)
    for how in ("one shot", "two step"):
        comm.all_reduce(given, how)
    found["inputs are kept"] = torch.equal(given, kept)
    found["same text"] = comm.agree("a plan")
    found["other text"] = comm.agree("a plan" if comm.rank else "another")
    return found


def _battery_on_group() -> dict[str, Tensor | bool | str]:
    return battery(ProcessGroupComm())


@cache
def emulated() -> list[dict[str, Tensor | bool | str]]:
    return run_ranks(WORLD, battery)


@pytest.mark.slow
@pytest.mark.gloo
def test_process_groups_do_what_the_emulator_says() -> None:
    real = spawn(_battery_on_group, WORLD, timeout_s=240)
    for rank, (found, expected) in enumerate(zip(real, emulated(), strict=True)):
        assert found.keys() == expected.keys()
        for name, want in expected.items():
            got = found[name]
            if isinstance(want, Tensor) and isinstance(got, Tensor):
                assert got.dtype == want.dtype, (rank, name)
                assert got.shape == want.shape, (rank, name)
                rounding = {"rtol": 1e-6, "atol": 0.0} if "lse" in name else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(got, want, **rounding, msg=f"{rank} {name}")
            else:
                assert got == want, (rank, name)


def test_the_emulator_matches_the_definitions() -> None:
    """Compare with the whole tensors, which the test knows."""
    ranks = emulated()
    for found in ranks:
        assert found["inputs are kept"] and found["same text"]
        assert not found["other text"]
    for dtype in NUMBERS:
        total = sum(whole(dtype, 6, 4, seed=r) for r in range(WORLD))
        for rank, found in enumerate(ranks):
            for sizes in SPLITS:
                name = f"{dtype} (6, 4) dim 0 {sizes}"
                gathered = found[f"all_gather padded {name}"]
                assert isinstance(gathered, Tensor)
                assert torch.equal(gathered, whole(dtype, 6, 4))
                mine = found[f"reduce_scatter grouped {name}"]
                assert isinstance(mine, Tensor)
                assert torch.equal(mine, shard(total, 0, sizes, rank))  # type: ignore[arg-type]
            for a, b in zip(SPLITS, OTHER, strict=True):
                out = found[f"all_to_all exact {dtype} (6, 4) 0->1 {a} {b}"]
                assert isinstance(out, Tensor)
                assert torch.equal(out, shard(whole(dtype, 6, 4), 1, b, rank))


def test_a_log_sum_exp_is_that_of_all_the_terms() -> None:
    for found in emulated():
        for how in ("terms gathered", "two reductions"):
            nothing = found[f"all_reduce_lse {how} of nothing"]
            assert isinstance(nothing, Tensor)
            assert (nothing == -torch.inf).all()
            terms = torch.stack([whole(torch.float32, 3, seed=r) for r in range(WORLD)])
            out = found[f"{how} all_reduce_lse_many 0"]
            assert isinstance(out, Tensor)
            torch.testing.assert_close(out, terms.exp().sum(0).log())


def test_fused_collectives_are_the_single_ones() -> None:
    shapes, dims = ((6, 4), (2, 6), (6,)), (0, 1, 0)
    for found_rank, found in enumerate(emulated()):
        for k in range(len(SPLITS)):
            sizes = [SPLITS[k], SPLITS[k - 1], SPLITS[k - 2]]
            for i, (shape, dim, size) in enumerate(zip(shapes, dims, sizes, strict=True)):
                gathered = found[f"padded all_gather_many {k} {i}"]
                assert isinstance(gathered, Tensor)
                assert torch.equal(gathered, whole(torch.float32, *shape, seed=7))
                total = sum(whole(torch.float32, *shape, seed=r) for r in range(WORLD))
                assert isinstance(total, Tensor)
                mine = found[f"padded reduce_scatter_many {k} {i}"]
                assert isinstance(mine, Tensor)
                assert torch.equal(mine, shard(total, dim, size, found_rank))
                summed = found[f"one shot all_reduce_many {i}"]
                assert isinstance(summed, Tensor)
                assert torch.equal(summed, total)


def test_a_world_of_one_has_nothing_to_exchange() -> None:
    comm, x = LocalComm(), torch.randn(3, 4)
    for out in (
        comm.all_gather(x, 0, (3,), "padded"),
        comm.reduce_scatter(x, 1, (4,), "grouped"),
        comm.all_reduce(x, "one shot"),
        comm.all_reduce_lse(x, "terms gathered"),
        comm.all_reduce_max(x),
        comm.all_to_all(x, 0, 1, (3,), (4,), "exact"),
        *comm.all_gather_many([x], [0], [(3,)], "padded"),
    ):
        assert torch.equal(out, x)
    assert comm.agree("anything")


def on_nccl() -> list[str]:
    """Return the collectives that change their input on NCCL in a world of one rank."""
    comm, wrong = ProcessGroupComm(), []
    device = torch.device("cuda", torch.cuda.current_device())
    x = whole(torch.float32, 3, 4).to(device)

    def check(name: str, out: Tensor) -> None:
        if out.device != device or not torch.equal(out, x):
            wrong.append(name)

    for dim, size in enumerate(x.shape):
        for how in ("padded", "grouped"):
            check(f"all_gather {how} {dim}", comm.all_gather(x, dim, (size,), how))
            check(f"reduce_scatter {how} {dim}", comm.reduce_scatter(x, dim, (size,), how))
            several = comm.all_gather_many([x, x], [dim] * 2, [(size,)] * 2, how)
            several += comm.reduce_scatter_many([x, x], [dim] * 2, [(size,)] * 2, how)
            for k, out in enumerate(several):
                check(f"fused {how} {dim} {k}", out)
    for how in ("exact", "gathered"):
        check(f"all_to_all {how}", comm.all_to_all(x, 0, 1, (3,), (4,), how))
    for how in ("one shot", "two step"):
        check(f"all_reduce {how}", comm.all_reduce(x, how))
        for out in comm.all_reduce_many([x, x], how):
            check(f"all_reduce_many {how}", out)
    for how in ("terms gathered", "two reductions"):
        check(f"all_reduce_lse {how}", comm.all_reduce_lse(x, how))
        for out in comm.all_reduce_lse_many([x, x], how):
            check(f"all_reduce_lse_many {how}", out)
    check("all_reduce_max", comm.all_reduce_max(x))
    check("all_reduce of a part", comm.subgroup([[0]]).all_reduce(x, "one shot"))
    return wrong if comm.agree("a plan") else [*wrong, "agree"]


@pytest.mark.gpu
@pytest.mark.gloo
def test_nccl_runs_every_collective_in_a_world_of_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: no collective was tried with nccl")
    assert spawn(on_nccl, 1, backend="nccl", timeout_s=300) == [[]]


def test_each_rank_runs_its_own_backward() -> None:
    """On a GPU the ranks would share a thread of autograd, in which the first one waits for the others."""
    assert run_ranks(2, lambda comm: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_an_error_of_one_rank_ends_the_others() -> None:
    def run(comm: Comm) -> Tensor:
        if comm.rank == 1:
            raise ArithmeticError("rank 1 is lost")
        return comm.all_reduce(torch.ones(2), "one shot")

    with pytest.raises(ArithmeticError, match="rank 1 is lost"):
        run_ranks(3, run)


def test_ctrl_c_releases_ranks_that_wait_and_leaves_the_others_behind() -> None:
    busy = threading.Event()

    def run(comm: Comm) -> Tensor:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
            busy.wait(60)
        return comm.all_reduce(torch.ones(2), "one shot")

    others = set(threading.enumerate())
    # A shell's background process ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, run)
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 30  # of a busy machine
    while len(left := set(threading.enumerate()) - others) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    busy.set()
    assert len(left) == 1
    assert all(thread.daemon for thread in left)


def test_the_emulator_refuses_shards_of_another_size() -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, lambda comm: comm.all_gather(torch.ones(2), 0, (1, 3), "padded"))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_ranks_of_a_group_without_nccl_are_on_the_cpu(backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert rank_device() == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_ranks_are_on_cuda_if_any_backend_of_the_group_is_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert rank_device() == torch.device("cuda", 1)
