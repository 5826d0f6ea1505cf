"""Point-to-point exchanges among ranks: one call on NCCL, messages on CPUs.

gloo has one connection between two ranks. If both send first, the notice that a rank is ready to
receive queues behind its own data, and the two directions alternate: half the link's rate. gloo's
all-to-all does so, and its ring of two ranks; its reduce-scatter is an all-reduce of twice the
bytes. Here receives are posted first.
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


_ALL_AT_ONCE = 2**16
"""Bytes of a rank's rows up to which a reduce-scatter is one exchange instead of a ring."""


def all_gather(out: Tensor, x: Tensor, group: Group) -> None:
    """Write every rank's ``x`` into ``out``, in rank order along dim 0; both are contiguous.

    ``x`` may be this rank's part of ``out``.
    """
    takes = out.tensor_split(dist.get_world_size(group))
    if x.is_cuda or len(takes) > 2:
        all_gather_single(out, x, group=group)
    else:
        _all_at_once([x] * len(takes), takes, group)


def reduce_scatter(out: Tensor, x: Tensor, group: Group) -> None:
    """Write this rank's rows of the sum of all ranks' ``x`` into ``out``; both are contiguous.

    ``out`` may be this rank's rows of ``x``.
    """
    if x.is_cuda:
        reduce_scatter_single(out, x, group=group)
        return
    gives = x.tensor_split(dist.get_world_size(group))
    if out.nbytes > _ALL_AT_ONCE and len(gives) > 1:
        _ring(out, gives, group)
        return
    takes = [torch.empty_like(out) for _ in gives]
    _all_at_once(gives, takes, group)
    out.copy_(takes[0])
    for term in takes[1:]:
        out.add_(term)


def all_reduce(x: Tensor, group: Group) -> None:
    """Replace ``x`` by the sum of all ranks' tensors: a reduce-scatter, then an all-gather, in place.

    Args:
        x: contiguous; the ranks of the group divide its elements evenly.
    """
    mine = x.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
    reduce_scatter(mine, x, group)
    all_gather(x, mine, group)


def all_to_all(
    out: Tensor, x: Tensor, takes: Sequence[int], gives: Sequence[int], group: Group
) -> None:
    """Send ``gives[r]`` elements of ``x`` to each rank ``r``; receive ``takes[r]`` into ``out``."""
    if x.is_cuda:
        dist.all_to_all_single(out, x, list(takes), list(gives), group=group)
    else:
        _all_at_once(x.split(list(gives)), out.split(list(takes)), group)


def _all_at_once(gives: Sequence[Tensor], takes: Sequence[Tensor], group: Group) -> None:
    """Send a tensor to each rank, receive one from each. Both ends skip an empty tensor."""
    n, me = len(gives), dist.get_rank(group)
    others = [(me + step) % n for step in range(1, n)]
    works = [receive(takes[rank], rank, group) for rank in others[::-1] if takes[rank].numel()]
    works += [send(gives[rank], rank, group) for rank in others if gives[rank].numel()]
    if takes[me].data_ptr() != gives[me].data_ptr():
        takes[me].copy_(gives[me])
    for work in works:
        work.wait()


def _ring(out: Tensor, terms: Sequence[Tensor], group: Group) -> None:
    """Ring reduce-scatter: each rank adds its term to the partial sums that it passes on.

    After Thakur et al., "Optimization of collective communication operations in MPICH", 2005.
    """
    n, me = len(terms), dist.get_rank(group)
    sums = [torch.empty_like(out) for _ in range(n - 1)]
    coming = [receive(each, (me - 1) % n, group) for each in sums]
    gone, mine = [], terms[me - 1]
    for step, each in enumerate(sums):
        gone.append(send(mine, (me + 1) % n, group))
        coming[step].wait()
        last = step == n - 2  # the term that is added last is this rank's own
        mine = torch.add(each, terms[me - 2 - step], out=out if last else each)
    for work in gone:
        work.wait()


def receive(into: Tensor, rank: int, group: Group) -> dist.Work:
    """Start to receive into a contiguous tensor from a rank of the group."""
    work = dist.irecv(into, group=group, group_src=rank)
    assert work is not None  # it is None only outside of the group
    return work


def send(tensor: Tensor, rank: int, group: Group) -> dist.Work:
    """Start to send a contiguous tensor to a rank of the group."""
    work = dist.isend(tensor, group=group, group_dst=rank)
    assert work is not None
    return work
