"""Exchanges by messages, at sizes on both sides of the change of algorithm."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hap.runtime import messages
from hap.runtime.launch import spawn

ROWS = (0, 1, 7, messages._ALL_AT_ONCE // 8, messages._ALL_AT_ONCE // 8 + 1, 3 * 2**15)
"""Elements per rank, of 8 bytes each, on both sides of the largest size that is sent at once."""


def wrong() -> list[str]:
    """Return the exchanges with a wrong result on this rank."""
    n, me = dist.get_world_size(), dist.get_rank()
    found = []
    for rows in ROWS:
        term = torch.arange(n * rows, dtype=torch.float64)  # rank r contributes r + 1 times this
        total = term * (n * (n + 1) // 2)
        mine = torch.full((rows,), -1.0, dtype=torch.float64)
        messages.reduce_scatter(mine, term * (me + 1), None)
        if not torch.equal(mine, total.tensor_split(n)[me]):
            found.append(f"reduce_scatter {rows}")
        whole = torch.full_like(term, -1.0)
        messages.all_gather(whole, mine, None)
        if not torch.equal(whole, total):
            found.append(f"all_gather {rows}")
        # Rank r sends ``rows * (k + 1)`` elements to rank k, each of them r.
        gives, takes = [rows * (k + 1) for k in range(n)], [rows * (me + 1)] * n
        given = torch.full((sum(gives),), float(me))
        taken = torch.full((sum(takes),), -1.0)
        messages.all_to_all(taken, given, takes, gives, None)
        if not torch.equal(taken, torch.arange(float(n)).repeat_interleave(rows * (me + 1))):
            found.append(f"all_to_all {rows}")
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_messages_do_what_the_collectives_do(ranks: int) -> None:
    assert spawn(wrong, ranks) == [[]] * ranks


@pytest.mark.gloo
def test_reduce_scatter_keeps_its_input() -> None:
    assert spawn(changed, 3) == [False] * 3


def changed() -> bool:
    """Return whether a reduce-scatter changes its input."""
    term = torch.randn(3 * 2**15)
    before = term.clone()
    messages.reduce_scatter(torch.empty(2**15), term, None)
    return not torch.equal(term, before)
