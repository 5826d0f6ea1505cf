"""Two-level clusters: communicators of some ranks, and the collectives in stages over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.emulate import run_ranks
from hap.runtime.launch import spawn


def mesh(comm: Comm) -> dict[str, Any]:
    """Rows, columns and uneven parts of a world of four; then parts of parts."""
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


def _mesh_on_group() -> dict[str, Any]:
    return mesh(ProcessGroupComm())


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


@pytest.mark.gloo
def test_subgroups_of_real_processes() -> None:
    check_mesh(spawn(_mesh_on_group, 4, timeout_s=120))


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
