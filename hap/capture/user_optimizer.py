"""Call the user's ``optimizer`` function, and inspect the optimizer that it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hap.errors import HapError, ModelError
from hap.ir.plan import OptimizerKind

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""``optimizer(params)``, or ``optimizer(named_parameters)``, which gets (name, parameter) pairs."""

NAMED = "named_parameters"


def default_optimizer(params: Any) -> torch.optim.Optimizer:
    """Return the default optimizer, for a model file without ``optimizer``."""
    return torch.optim.AdamW(params, lr=1e-3)


def make_optimizer(make: MakeOptimizer, module: nn.Module) -> torch.optim.Optimizer:
    """Call the user's function on the trained parameters of a module, whole or in shards."""
    return _call(make, {n: p for n, p in module.named_parameters() if p.requires_grad})


def _call(make: MakeOptimizer, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    try:
        wanted = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        wanted = []
    return make(list(params.items()) if wanted[:1] == [NAMED] else list(params.values()))


def examine(make: MakeOptimizer, module: nn.Module | None = None) -> OptimizerKind:
    """Take real steps on small parameters, and count the tensors of the optimizer's state.

    The parameters have the names and numbers of dims of the module's trained ones; without a
    module there is one of two dims. Parameters cut in two must train like the whole ones.

    Raises:
        ModelError: ``optimizer(params)`` fails, returns no optimizer, or returns one that reads
            whole parameters, which shards do not provide.
    """
    shapes: dict[str, tuple[int, ...]] = {"weight": (4, 6)}
    if module is not None:
        dims = {n: p.dim() for n, p in module.named_parameters() if p.requires_grad}
        shapes = {n: (4, 6, 3, 2, 2)[:d] if d < 6 else (2,) * d for n, d in dims.items()} or shapes
    try:
        optimizer, whole = _trained(make, shapes)
        alike = all(
            _joins([_trained(make, shapes, dim, part)[1] for part in (slice(1), slice(1, None))],
                   dim, whole)
            for dim in (0, -1)
        )  # fmt: skip
    except HapError:
        raise
    except Exception as error:
        raise ModelError(
            f"optimizer(params) fails on small parameters: {type(error).__name__}: {error}",
            hint="return a torch.optim optimizer that steps without a closure",
        ) from error
    name = type(optimizer).__name__
    if not getattr(optimizer, "whole_norms", False) and not alike:
        raise ModelError(
            f"{name} looks across a parameter: shards don't train like the whole",
            hint="use an elementwise optimizer (SGD, Adam, AdamW, Adagrad, ...), or Lamb or Lars "
            "of hap.optim, which ask all ranks",
        )
    states = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = optimizer.state.get(p, {}).values()
            found = sum(isinstance(t, torch.Tensor) and t.shape == p.shape != () for t in kept)
            states = max(states, found)
    return OptimizerKind(name=name, states=states)


def _trained(
    make: MakeOptimizer, shapes: Mapping[str, tuple[int, ...]], dim: int = 0,
    part: slice = slice(None),
) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:  # fmt: skip
    """Take two steps on the part of every parameter along one dim."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        whole = torch.randn(shape, generator=generator)
        return whole.transpose(0, dim)[part].transpose(0, dim).clone() if shape else whole

    drawings = {name: [drawn(shape) for _ in range(3)] for name, shape in shapes.items()}
    params = {name: nn.Parameter(value) for name, (value, *_) in drawings.items()}
    optimizer = _call(make, params)
    for step in (1, 2):
        for name, parameter in params.items():
            parameter.grad = drawings[name][step]
        optimizer.step()
    return optimizer, {name: p.detach() for name, p in params.items()}


def _joins(
    parts: Sequence[Mapping[str, torch.Tensor]], dim: int, whole: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether the parts along ``dim`` form the whole."""
    return all(
        torch.allclose(torch.cat([p[n] for p in parts], dim) if t.dim() else parts[0][n], t,
                       rtol=1e-4, atol=1e-6)
        for n, t in whole.items()
    )  # fmt: skip
