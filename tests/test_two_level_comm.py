"""Two-level clusters: communicators of subgroups, and hierarchical collectives over them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.emulate import run_ranks
from hap.runtime.launch import spawn
from hap.runtime.two_level_comm import NAME, TwoLevelComm


def mesh(comm: Comm) -> dict[str, Any]:
    """Run collectives on rows, columns and uneven parts of four ranks, and on parts of parts."""
    rows, columns = comm.subgroup([[0, 1], [2, 3]]), comm.subgroup([[0, 2], [1, 3]])
    uneven = comm.subgroup([[0], [1, 2, 3]])
    alone = rows.subgroup([[0], [1]])
    x = torch.tensor([1.0, 10.0]) ** comm.rank
    sizes = [1, 3, 2][: uneven.world_size]
    return {
        "rows": rows.all_reduce(x, "two step"),
        "columns": columns.all_gather(x, 0, [2, 2], "grouped"),
        "uneven": uneven.all_gather(torch.full((sizes[uneven.rank],), comm.rank), 0, sizes, "grouped"),
        "both": columns.all_reduce(rows.all_reduce(x, "one shot"), "one shot"),
        "alone": alone.all_reduce(x, "one shot"),
        "ranks": (rows.rank, columns.rank, uneven.rank, alone.rank),
        "agree": (rows.agree(str(comm.rank // 2)), rows.agree(str(comm.rank))),
    }  # fmt: skip


def check_mesh(found: list[dict[str, Any]]) -> None:
    powers = [torch.tensor([1.0, 10.0**rank]) for rank in range(4)]
    for rank, seen in enumerate(found):
        row, column = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
        assert torch.equal(seen["rows"], powers[row[0]] + powers[row[1]])
        assert torch.equal(seen["columns"], torch.cat([powers[r] for r in column]))
        assert seen["uneven"].tolist() == ([0] if rank == 0 else [1, 2, 2, 2, 3, 3])
        assert seen["both"].tolist() == [4.0, 1111.0]
        assert torch.equal(seen["alone"], powers[rank])
        assert seen["ranks"] == (rank % 2, rank // 2, max(rank - 1, 0), 0)
        assert seen["agree"] == (True, False)


def test_subgroups_of_the_emulator() -> None:
    check_mesh(run_ranks(4, mesh))


def test_parts_must_be_a_partition() -> None:
    comm = LocalComm()
    assert comm.subgroup([[0]]) is comm
    for parts in ([[0], [0]], [[1]], [], [[1, 0]]):
        with pytest.raises(ValueError, match="no partition"):
            comm.subgroup(parts)
    with pytest.raises(ValueError, match="no partition"):
        run_ranks(2, lambda comm: comm.subgroup([[1, 0]]))


def test_an_error_of_one_rank_ends_those_that_wait_in_a_subgroup() -> None:
    def run(comm: Comm) -> torch.Tensor:
        part = comm.subgroup([[0, 1], [2]]).subgroup([[0, 1]] if comm.rank < 2 else [[0]])
        if comm.rank == 1:
            raise ArithmeticError("rank 1 is lost")
        return part.all_reduce(torch.ones(2), "one shot")

    with pytest.raises(ArithmeticError, match="rank 1 is lost"):
        run_ranks(3, run)


# --- hierarchical collectives ---------------------------------------------------------------

WORLDS = [(2, 2), (2, 3), (2, 1), (1, 2, 1), (3, 3)]
DTYPES = (torch.float32, torch.int64, torch.bfloat16)


def whole(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return random small integers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 4, shape, generator=generator).to(dtype)


def splits(rows: int, world: int) -> list[tuple[int, ...]]:
    """Return splits: even, the remainder last; random with zeros; all on the first or last rank."""
    rng = random.Random(rows * 100 + world)
    cuts = sorted(rng.randint(0, rows) for _ in range(world - 1))
    drawn = tuple(b - a for a, b in itertools.pairwise([0, *cuts, rows]))
    even = (*[rows // world] * (world - 1), rows - rows // world * (world - 1))
    none = (0,) * (world - 1)
    return [even, drawn, (rows, *none), (*none, rows)]


def battery(flat: Comm, counts: tuple[int, ...]) -> list[tuple[str, Tensor, Tensor]]:
    """Return (name, result of the flat collective, result of the hierarchical one)."""
    comm, rank, found = TwoLevelComm(flat, counts), flat.rank, []
    world = sum(counts)

    def both(name: str, call: Callable[..., Tensor], plain: str) -> None:
        found.append((name, call(how=plain).clone(), call(how=NAME).clone()))

    for dtype, (dim, shape) in itertools.product(DTYPES, [(0, (7, 3)), (1, (2, 3)), (0, (5,))]):
        for sizes in splits(shape[dim], world):
            name = f"{dtype} {shape} {dim} {sizes}"
            x = whole(dtype, *shape).split(list(sizes), dim)[rank]
            both(f"all_gather {name}", partial(comm.all_gather, x, dim, sizes), "grouped")
            if dtype != torch.bfloat16:  # gloo cannot reduce it
                x = whole(dtype, *shape, seed=rank)
                both(
                    f"reduce_scatter {name}", partial(comm.reduce_scatter, x, dim, sizes), "padded"
                )
    for shape in ((), (1,), (7,), (4, 6), (0, 3)):
        x = whole(torch.float64, *shape, seed=rank)
        both(f"all_reduce {shape}", partial(comm.all_reduce, x), "two step")
    both(
        "transposed",
        partial(comm.all_reduce, whole(torch.float64, 3, 4, seed=rank).t()),
        "one shot",
    )
    if len(set(counts)) == 1:
        for src, dst, shape in ((0, 1, (7, 5)), (2, 0, (6, 2, 5)), (1, 0, (4, 9))):
            for a, b in itertools.product(splits(shape[src], world), splits(shape[dst], world)):
                x = whole(torch.float32, *shape).split(list(a), src)[rank]
                both(f"all_to_all {shape} {src} {dst} {a} {b}",
                     partial(comm.all_to_all, x, src, dst, a, b), "exact")  # fmt: skip
    sizes = [splits(6, world)[1], splits(3, world)[2]]
    xs = [whole(torch.float32, 6, 2, seed=rank), whole(torch.float32, 2, 3, seed=rank)]
    many = [comm.reduce_scatter_many(xs, [0, 1], sizes, how) for how in ("padded", NAME)]
    found += [(f"reduce_scatter_many {k}", *pair) for k, pair in enumerate(zip(*many, strict=True))]
    many = [comm.all_gather_many(many[0], [0, 1], sizes, how) for how in ("padded", NAME)]
    found += [(f"all_gather_many {k}", *pair) for k, pair in enumerate(zip(*many, strict=True))]
    return found


def _on_group(counts: tuple[int, ...]) -> tuple[Any, list[tuple[str, Tensor, Tensor]]]:
    dist.new_group([0, 2])  # a group of the program's own, of which other ranks are no members
    comm = ProcessGroupComm()
    return mesh(comm) if comm.world_size == 4 else None, battery(comm, counts)


def check_battery(ranks: list[list[tuple[str, Tensor, Tensor]]]) -> None:
    for rank, found in enumerate(ranks):
        for name, flat, staged in found:
            assert staged.dtype == flat.dtype, (rank, name)
            assert staged.shape == flat.shape, (rank, name)
            assert torch.equal(staged, flat), (rank, name)


@pytest.mark.parametrize("counts", WORLDS)
def test_stages_give_what_flat_collectives_give(counts: tuple[int, ...]) -> None:
    check_battery(run_ranks(sum(counts), lambda comm: battery(comm, counts)))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("counts", WORLDS[:3])
def test_subgroups_and_stages_of_real_processes(counts: tuple[int, ...]) -> None:
    meshes, batteries = zip(
        *spawn(_on_group, sum(counts), args=(counts,), timeout_s=240), strict=True
    )
    check_battery(list(batteries))
    if sum(counts) == 4:
        check_mesh(list(meshes))
