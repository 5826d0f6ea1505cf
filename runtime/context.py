"""Context of emitted code: collectives and random numbers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hap.runtime.collectives import Comm
from hap.runtime.lanes import InlineLane, Lane, Pending, Result


class Context:
    """The ``ctx`` of a rank's forward and backward.

    Random masks come from a generator seeded by (seed, step, operator, offset of the shard):
    replicas draw the same numbers on every rank, shards draw different ones, and a run is
    reproducible. Masks depend on the plan's placement of the tensor.
    """

    def __init__(
        self, comm: Comm, seed: int = 0, *, across: Comm | None = None, lane: Lane | None = None
    ) -> None:
        self.comm = comm
        self._lane = lane or InlineLane()
        self.across = across or comm
        """The communicator between machines, if the plan has two mesh axes."""
        self.seed = seed
        self.step = 0
        self.training = True
        self._scales: dict[tuple[float, torch.device], Tensor] = {}
        self._modes: dict[tuple[bool, torch.device], Tensor] = {}
        self.microbatch: int | None = None
        """The microbatch that runs, in a pipeline."""
        self.total: Callable[[str, Tensor | None], Tensor] = _no_sums
        """Returns the sum over the microbatches that a node makes, given its last term.

        Without a term the sum is complete. In a pipeline.
        """
        self.wanted = True
        """Whether the step's gradients are wanted; a pipeline computes them with the loss."""
        self.loss_scale: Callable[[], float] | None = None
        """Returns the factor of the loss in the next backward, for a pipeline; a gradient scaler's."""
        self.in_order = False
        """Whether collectives run synchronously, by :meth:`in_turn`."""
        self.dropping = True
        """If False, dropout is disabled in training too, to compare with one device."""
        self.at_once: int | None = None
        """Elements of a random tensor that are drawn at once; all of them if ``None``."""
        self.drawn: dict[str, Tensor] | None = None
        """If not ``None``, collects a copy of all random numbers, by ``step/operator``, and ``/microbatch`` in a pipeline."""
        self._lost: dict[str, Tensor] = {}
        """The parts of this rank's gradients that the last rounding removed, by operator; unscaled."""
        self._scale_of: tuple[int, float] = (-1, 1.0)
        """A step, and the factor of its loss."""
        self.all_gather = comm.all_gather
        self.reduce_scatter = comm.reduce_scatter
        self.all_reduce = comm.all_reduce
        self.all_reduce_lse = comm.all_reduce_lse
        self.all_to_all = comm.all_to_all
        self.all_gather_many = comm.all_gather_many
        self.reduce_scatter_many = comm.reduce_scatter_many
        self.all_reduce_many = comm.all_reduce_many
        self.all_reduce_lse_many = comm.all_reduce_lse_many

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run each collective synchronously inside this context."""
        lane, self._lane, self.in_order = self._lane, InlineLane(), True
        try:
            yield
        finally:
            self._lane, self.in_order = lane, False

    def issue(self, kind: str, *args: Any) -> Pending:
        """Start a collective, by the name of its method, and return without waiting for it."""
        return self._lane.issue(getattr(self, kind), *args)

    def wait(self, pending: Pending) -> Tensor:
        """Return the result of a collective that :meth:`issue` started."""
        return self._lane.wait(pending)

    def idle(self, wait: Callable[[], Result]) -> Result:
        """Wait for another stage."""
        return self._lane.idle(wait)

    def between(self, kind: str, *args: Any) -> Any:
        """Run a collective between machines, by the name of its method."""
        return getattr(self.across, kind)(*args)

    def between_slice(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return this machine's shard of a tensor that is replicated between machines."""
        place = self.across.rank
        return x.narrow(dim, sum(sizes[:place]), sizes[place])

    def between_mask(self, x: Tensor) -> Tensor:
        """Return ``x`` on the first machine, zeros elsewhere."""
        return x if self.across.rank == 0 else torch.zeros_like(x)

    def dropout(self, x: Tensor, p: float, site: str, place: int | str) -> Sequence[Tensor]:
        """Return (x, each element zeroed with probability p or scaled; the mask of kept ones)."""
        mask = self.mask(x.shape, x.device, p, site, place)
        if not self._drops or p == 0:
            return x, mask
        return scaled(x, mask, kept_scale(p)), mask

    def draw(
        self, kind: str, numbers: Sequence[float], shape: Sequence[int], site: str,
        place: int | str, *, dtype: torch.dtype, device: torch.device,
    ) -> Tensor:  # fmt: skip
        """Return this rank's part of a random tensor, or :func:`fixed`'s constant if not dropping.

        Args:
            kind: ``rand``, ``randn``, ``bernoulli`` or ``randint``, with torch's ``numbers``.
        """
        x = torch.empty(shape, dtype=dtype, device=device)
        if not self.dropping:
            return x.fill_(fixed(kind, numbers))
        generator = self._generator(device, site, place)
        for part in self._drawn_at_once(x):
            if kind == "rand":
                part.uniform_(generator=generator)
            elif kind == "randn":
                part.normal_(generator=generator)
            elif kind == "bernoulli":
                part.bernoulli_(numbers[0], generator=generator)
            else:
                low, high = (0, *numbers)[-2:]
                part.random_(int(low), int(high), generator=generator)
        return self._noted(site, x)

    def _drawn_at_once(self, x: Tensor) -> Sequence[Tensor]:
        """Return a new tensor, or parts of it that replicas on unlike GPUs draw alike."""
        return [x] if self.at_once is None else x.view(-1).split(self.at_once)

    def _noted(self, site: str, x: Tensor) -> Tensor:
        if self.drawn is not None:
            part = "" if self.microbatch is None else f"/{self.microbatch}"
            self.drawn[f"{self.step}/{site}{part}"] = x.detach().to("cpu", copy=True)
        return x

    def _generator(self, device: torch.device, site: str, place: int | str) -> torch.Generator:
        key = f"{self.seed}/{self.step}/{site}/{place}".encode()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
        return generator

    def dropout_backward(self, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Return the gradient of :meth:`dropout` with respect to its input."""
        return scaled(grad, mask, scale) if self._drops else grad

    def mask(
        self, shape: Sequence[int], device: torch.device, p: float, site: str, place: int | str
    ) -> Tensor:
        """Return the mask of elements that dropout keeps: all True unless the module trains."""
        if not self._drops or p == 0:
            return torch.ones(shape, dtype=torch.bool, device=device)
        mask = torch.empty(shape, dtype=torch.bool, device=device)
        generator = self._generator(device, site, place)
        for part in self._drawn_at_once(mask):
            part.bernoulli_(1 - p, generator=generator)
        return self._noted(site, mask)

    def kept_factor(self, factor: float, device: torch.device) -> Tensor:
        """Return a scalar tensor: the factor of kept elements, or 1 unless the module trains."""
        factor = factor if self._drops else 1.0
        if (factor, device) not in self._scales:
            self._scales[factor, device] = torch.tensor(factor, device=device)
        return self._scales[factor, device]

    def trains(self, device: torch.device) -> Tensor:
        """Return whether the module trains, as a scalar tensor."""
        key = self.training, device
        if key not in self._modes:
            self._modes[key] = torch.tensor(self.training, device=device)
        return self._modes[key]

    @property
    def _drops(self) -> bool:
        return self.training and self.dropping

    def by_mode(self, training: Tensor, otherwise: Tensor) -> Tensor:
        """See :func:`hap.capture.batch_norm.by_mode`."""
        return training if self.training else otherwise

    def in_training(self, x: Tensor) -> Tensor:
        """See :func:`hap.capture.batch_norm.in_training`."""
        return x if self.training else torch.zeros_like(x)

    def rounded_with_feedback(self, x: Tensor, dtype: torch.dtype, site: str) -> Tensor:
        """See :func:`hap.capture.gradient_rounding.rounded_with_feedback`."""
        scale, before = self._loss_scale_of_step(), self._lost.get(site)
        whole = x if before is None else x + before * scale
        rounded = whole.to(dtype)
        lost = (whole - rounded) / scale
        # A step whose gradients overflow is skipped: what was lost before stays.
        kept = torch.zeros_like(lost) if before is None else before
        self._lost[site] = torch.where(torch.isfinite(lost), lost, kept)
        return rounded

    def _loss_scale_of_step(self) -> float:
        """Return the factor of the loss in this step; reading a scaler's waits for the device."""
        if self._scale_of[0] != self.step:
            factor = 1.0 if self.loss_scale is None else self.loss_scale()
            self._scale_of = self.step, factor
        return self._scale_of[1]


def _no_sums(node: str, term: Tensor | None) -> Tensor:
    raise AssertionError(f"{node} sums over microbatches, and the program has none")


def scaled(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return ``x`` times ``scale`` where ``mask`` is true, else zeros; on CUDA by one kernel."""
    if x.is_cuda:
        return torch.ops.aten.native_dropout_backward(x, mask, scale)  # type: ignore[no-any-return]
    return (x * mask).mul_(scale)


def kept_scale(p: float) -> float:
    """Return the factor of elements that dropout keeps."""
    return 1 / (1 - p) if p < 1 else 0.0


def fixed(kind: str, numbers: Sequence[float]) -> float:
    """Return the constant that replaces random numbers when runs are compared."""
    if kind == "bernoulli":  # a mask that keeps p: scaled by 1/p, it is 1
        return numbers[0]
    if kind == "randint":
        return (0, *numbers)[-2]
    return 0.5
