"""What an emitted program calls at run time: its collectives, and its random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hap.runtime.collectives import Comm
from hap.runtime.overlap import InlineLane, Lane, Pending


class Context:
    """The ``ctx`` of a rank's forward and backward.

    Random masks come from a generator seeded by (seed, step, operator, place of the shard):
    replicas draw the same numbers on every rank, shards draw different ones, and a run can be
    repeated. Masks do depend on how the plan cuts the tensor.
    """

    def __init__(
        self, comm: Comm, seed: int = 0, *, across: Comm | None = None, lane: Lane | None = None
    ) -> None:
        self.comm = comm
        self._lane = lane or InlineLane()
        self.across = across or comm
        """Between machines, where the plan has two mesh axes."""
        self.seed = seed
        self.step = 0
        self.training = True
        self.all_gather = comm.all_gather
        self.reduce_scatter = comm.reduce_scatter
        self.all_reduce = comm.all_reduce
        self.all_reduce_lse = comm.all_reduce_lse
        self.all_to_all = comm.all_to_all
        self.all_gather_many = comm.all_gather_many
        self.reduce_scatter_many = comm.reduce_scatter_many
        self.all_reduce_many = comm.all_reduce_many
        self.all_reduce_lse_many = comm.all_reduce_lse_many

    def issue(self, kind: str, *args: Any) -> Pending:
        """Start a collective, by the name of its method; computing goes on meanwhile."""
        return self._lane.issue(getattr(self, kind), *args)

    def wait(self, pending: Pending) -> Tensor:
        """The result of what :meth:`issue` started."""
        return self._lane.wait(pending)

    def between(self, kind: str, *args: Any) -> Any:
        """A collective between machines, by the name of its method."""
        return getattr(self.across, kind)(*args)

    def between_slice(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This machine's shard of what every machine holds whole."""
        place = self.across.rank
        return x.narrow(dim, sum(sizes[:place]), sizes[place])

    def between_mask(self, x: Tensor) -> Tensor:
        """``x`` on the first machine, zeros elsewhere."""
        return x if self.across.rank == 0 else torch.zeros_like(x)

    def dropout(self, x: Tensor, p: float, site: str, place: int | str) -> Sequence[Tensor]:
        """(x with each element zeroed with probability p and scaled, the mask of the kept)."""
        if not self.training or p == 0:
            return x, torch.ones_like(x, dtype=torch.bool)
        key = f"{self.seed}/{self.step}/{site}/{place}".encode()
        generator = torch.Generator(device=x.device)
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        mask.bernoulli_(1 - p, generator=generator)
        return (x * mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask

    def dropout_backward(self, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
        """The gradient of what :meth:`dropout` let through."""
        return (grad * mask).mul_(scale) if self.training else grad
