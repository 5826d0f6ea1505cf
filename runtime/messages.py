"""The collectives that exchange a tensor per pair of ranks: one call on NCCL, messages on CPUs.

gloo has one connection between two ranks. Where it is told to send first, the word that a rank is
ready to receive waits behind what it is sending, and the two directions take turns: half the rate
of the link. So here receives are posted first, and every rank sends to every other at once: an
all-to-all, an all-gather or a reduce-scatter moves as many bytes as on a ring, both ways together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None

# torch 2.13 renames both; 2.11 has the old names only.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(out: Tensor, x: Tensor, group: Group) -> None:
    """Every rank's ``x``, in the order of ranks along dim 0 of ``out``; both contiguous."""
    if x.is_cuda:
        all_gather_single(out, x, group=group)
        return
    takes = out.tensor_split(dist.get_world_size(group))
    _messages([x] * len(takes), takes, group)


def reduce_scatter(out: Tensor, x: Tensor, group: Group) -> None:
    """This rank's rows of the sum of every rank's ``x``, in the order of ranks; both contiguous.

    On CPUs all ranks add in the order of ranks.
    """
    if x.is_cuda:
        reduce_scatter_single(out, x, group=group)
        return
    gives = x.tensor_split(dist.get_world_size(group))
    takes = [torch.empty_like(out) for _ in gives]
    _messages(gives, takes, group)
    out.copy_(takes[0])
    for term in takes[1:]:
        out.add_(term)


def all_to_all(
    out: Tensor, x: Tensor, takes: Sequence[int], gives: Sequence[int], group: Group
) -> None:
    """``gives[r]`` elements of ``x`` for each rank ``r``, ``takes[r]`` of ``out`` from it."""
    if x.is_cuda:
        dist.all_to_all_single(out, x, list(takes), list(gives), group=group)
    else:
        _messages(x.split(list(gives)), out.split(list(takes)), group)


def _messages(gives: Sequence[Tensor], takes: Sequence[Tensor], group: Group) -> None:
    """Sends each rank its tensor and fills one from each; what is empty is empty at both ends."""
    n, me = len(gives), dist.get_rank(group)
    works = [
        dist.irecv(takes[rank], group=group, group_src=rank)
        for rank in ((me - step) % n for step in range(1, n))
        if takes[rank].numel()
    ]
    works += [
        dist.isend(gives[rank], group=group, group_dst=rank)
        for rank in ((me + step) % n for step in range(1, n))
        if gives[rank].numel()
    ]
    takes[me].copy_(gives[me])
    for work in works:
        assert work is not None  # of a rank outside of the group only
        work.wait()
