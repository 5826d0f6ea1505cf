"""Optimizers that use norms of whole tensors, correct on shards; norms over shards.

A shard of a :class:`hap.runtime.hap_module.HapModule` knows the ranks that hold the rest of its
tensor. On parameters that are no shards, these are the textbook optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hap.complex_tensors import as_real
from hap.errors import InputError


class Reduces(Protocol):
    """The collectives that global norms need."""

    def all_reduce(self, x: Tensor, how: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rank's part of a parameter; ``copies`` ranks hold the same elements."""

    comm: Reduces
    copies: int


def mark(parameter: nn.Parameter, shard: Shard) -> None:
    """Mark a parameter as a shard."""
    parameter.hap_shard = shard  # type: ignore[attr-defined]


def tensor_norms(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each whole tensor of which ``values`` are this rank's shards.

    Every rank of a module must call it, with values of the same parameters in the same order;
    one all-reduce exchanges them. Without shards, the norms are those of ``values``.

    Args:
        params: the parameters; their shapes and cuts are those of the values.
        values: for example the parameters themselves, their gradients or updates.

    Returns:
        A vector with one norm per value, in float32 or better, the same on every rank.

    Raises:
        InputError: the lists differ in length, or some parameters are shards and others not.
    """
    if len(params) != len(values):
        raise InputError(f"{len(params)} parameters, but {len(values)} values")
    if not values:
        return torch.zeros(0)
    values = [as_real(v) for v in values]
    wide = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    squares = torch.stack([v.detach().to(wide).square().sum() for v in values])
    shards: list[Shard | None] = [getattr(p, "hap_shard", None) for p in params]
    known = [s for s in shards if s is not None]
    if not known:
        return squares.sqrt()
    if len(known) < len(shards):
        raise InputError(
            "some of these parameters are shards and others are not",
            hint="give the optimizer the parameters of one module",
        )
    copies = torch.tensor([s.copies for s in known], dtype=wide, device=squares.device)
    return known[0].comm.all_reduce(squares / copies, "one shot").sqrt()


class _Whole(torch.optim.Optimizer, ABC):
    """An optimizer that scales each tensor's update by a ratio of whole tensors' norms."""

    whole_norms = True
    """Request norms of whole tensors, so that shards train like the whole."""

    @abstractmethod
    def _update(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Return ``top / bottom``, or 1 where either is zero."""
    return torch.where((top > 0) & (bottom > 0), top / bottom, torch.ones_like(top))


class Lamb(_Whole):
    """Adam with updates scaled to each tensor's norm (You et al., "Large Batch Optimization
    for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2).

    The direction is ``r = m̂ / (sqrt(v̂) + eps) + weight_decay * w`` and the step
    ``w -= lr * |w| / |r| * r``, norms over whole tensors; the ratio is 1 where a norm is zero.

    Raises:
        InputError: a rate is negative, or a beta outside of [0, 1).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise InputError(f"betas are {betas}", hint="both must be in [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        first, second = group["betas"]
        updates = []
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            state["step"] += 1
            mean, squares, gradient = map(as_real, (state["exp_avg"], state["exp_avg_sq"], p.grad))
            m = mean.lerp_(gradient, 1 - first)
            v = squares.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            root = (v / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
            update = m.div(root).div_(1 - first ** state["step"])
            updates.append(update.add_(as_real(p), alpha=group["weight_decay"]))
        ratios = _ratio(tensor_norms(params, params), tensor_norms(params, updates))
        for p, update, ratio in zip(params, updates, ratios.unbind(), strict=True):
            as_real(p).sub_(update * (group["lr"] * ratio).to(update.dtype))


class Lars(_Whole):
    """Momentum with a rate per tensor (You et al., "Large Batch Training of Convolutional
    Networks", 2017).

    ``u = momentum * u + lr * trust * |w| / (|g| + weight_decay * |w|) * (g + weight_decay * w)``
    and ``w -= u``, norms over whole tensors; the factor after ``lr`` is 1 where a norm is zero.

    Raises:
        InputError: a rate is negative, or the momentum outside of [0, 1).
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:  # fmt: skip
        _check(lr=lr, weight_decay=weight_decay, trust=trust)
        if not 0 <= momentum < 1:
            raise InputError(f"momentum is {momentum}", hint="it must be in [0, 1)")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        decay = group["weight_decay"]
        gradients = [p.grad for p in params if p.grad is not None]
        sizes, slopes = tensor_norms(params, params), tensor_norms(params, gradients)
        local = group["trust"] * sizes / (slopes + decay * sizes)
        local = torch.where((sizes > 0) & (slopes > 0), local, torch.ones_like(local))
        for p, g, rate in zip(params, gradients, local.unbind(), strict=True):
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            step = g.add(p, alpha=decay).mul_((group["lr"] * rate).to(as_real(p).dtype))
            p.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(step))


def _check(**rates: float) -> None:
    for name, rate in rates.items():
        if rate < 0:
            raise InputError(f"{name} is {rate}", hint="it must not be negative")
