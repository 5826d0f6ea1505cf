"""What a plan needs to know of the user's optimizer: how many tensors it keeps per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hap.errors import ModelError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def default_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains a model whose file has no ``optimizer``."""
    return torch.optim.AdamW(params, lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The optimizer's class, and its state tensors of the parameter's size."""

    name: str
    states: int

    def __str__(self) -> str:
        return f"{self.name} ({self.states} states per parameter)"


def examine(make: MakeOptimizer) -> OptimizerKind:
    """Take one real step on a small parameter and count what the optimizer keeps.

    Raises:
        ModelError: ``optimizer(params)`` fails, or returns no optimizer.
    """
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.zeros(2, 3)
    try:
        optimizer = make([parameter])
        optimizer.step()
    except Exception as error:
        raise ModelError(
            f"optimizer(params) fails on one parameter: {type(error).__name__}: {error}",
            hint="return a torch.optim optimizer that steps without a closure",
        ) from error
    kept = optimizer.state.get(parameter, {}).values()
    states = sum(isinstance(t, torch.Tensor) and t.shape == parameter.shape for t in kept)
    return OptimizerKind(name=type(optimizer).__name__, states=states)
