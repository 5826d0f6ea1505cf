"""Exchanges by messages, of every size on both sides of where they change their way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hap.runtime import messages
from hap.runtime.launch import spawn

ROWS = (0, 1, 7, messages._ALL_AT_ONCE // 8, messages._ALL_AT_ONCE // 8 + 1, 3 * 2**15)
"""Elements of a rank, of 8 bytes each: the largest that go all at once, and the least of a ring."""


def wrong() -> list[str]:
    """On each rank, what differs from what the exchanges are."""
    n, me = dist.get_world_size(), dist.get_rank()
    found = []
    for rows in ROWS:
        term = torch.arange(n * rows, dtype=torch.float64)  # of which rank r has r + 1 times
        total = term * (n * (n + 1) // 2)
        mine = torch.full((rows,), -1.0, dtype=torch.float64)
        messages.reduce_scatter(mine, term * (me + 1), None)
        if not torch.equal(mine, total.tensor_split(n)[me]):
            found.append(f"reduce_scatter {rows}")
        whole = torch.full_like(term, -1.0)
        messages.all_gather(whole, mine, None)
        if not torch.equal(whole, total):
            found.append(f"all_gather {rows}")
        # Rank r gives rank k so many rows, k + 1 times, each r.
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
def test_what_is_given_is_left_as_it_was() -> None:
    assert spawn(changed, 3) == [False] * 3


def changed() -> bool:
    """Is a rank's term another after its sum has gone around?"""
    term = torch.randn(3 * 2**15)
    before = term.clone()
    messages.reduce_scatter(torch.empty(2**15), term, None)
    return not torch.equal(term, before)
