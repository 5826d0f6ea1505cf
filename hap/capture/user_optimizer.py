"""Call the user's ``optimizer`` function, and inspect the optimizer that it returns."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hap.capture import torch_private
from hap.errors import HapError, ModelError
from hap.ir.optimizer_kind import OptimizerKind

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""``optimizer(params)``, or ``optimizer(named_parameters)``, which gets (name, parameter) pairs."""

NAMED = "named_parameters"

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
        "SGD", "SparseAdam",
    )
)  # fmt: skip
"""Optimizers of torch that train each element by itself."""

SCALES = (1.0, 1.0, 2.0, 2.0, 1e-4, 1e4, 1.0, 1.0)
"""Sizes of the gradients in the steps that examine an optimizer: clipping acts on some alone, an optimizer may find its
rate in gradients of one size, and that of a warm-up may be zero at first."""


def default_optimizer(params: Any) -> torch.optim.Optimizer:
    """Return the default optimizer, for a model file without ``optimizer``."""
    return torch.optim.AdamW(params, lr=1e-3)


def make_optimizer(make: MakeOptimizer, module: nn.Module) -> torch.optim.Optimizer:
    """Call the user's function on the trained parameters of a module, whole or in shards.

    Raises:
        ModelError: the optimizer trains other tensors than these parameters.
    """
    return _call(make, {n: p for n, p in module.named_parameters() if p.requires_grad})


def _call(make: MakeOptimizer, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    try:
        wanted = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        wanted = []
    optimizer = make(list(params.items()) if wanted[:1] == [NAMED] else list(params.values()))
    given = set(map(id, params.values()))
    others = [p for p in _tensors(optimizer) if id(p) not in given]
    if others:
        raise ModelError(
            f"optimizer(params) trains {len(others)} tensors that are not in params, the first of "
            f"shape {tuple(others[0].shape)}",
            hint="make the optimizer from params alone: they are the shards that a rank trains",
        )
    return optimizer


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def copy_attributes(source: nn.Parameter, to: nn.Parameter) -> None:
    """Set the plain attributes of one parameter, such as a user's ``no_decay``, on another."""
    for name, value in vars(source).items():
        if isinstance(value, bool | int | float | str | tuple | list | dict):
            setattr(to, name, value)


_alone = threading.Lock()


class DrawsNumbers(ModelError):
    """An optimizer draws random numbers."""


def examine(
    make: MakeOptimizer, module: nn.Module | None = None, *, closures: bool = False
) -> OptimizerKind:
    """Take real steps on small parameters, and count the tensors of the optimizer's state.

    The parameters have the names, numbers of dims and attributes of the module's trained ones;
    without a module there is one of two dims. If parameters cut in two do not train like the whole
    ones, every rank has to keep them whole. A warning names parameters that the optimizer leaves out.

    Args:
        closures: pass each step a closure, whose gradients follow the parameters.

    Raises:
        DrawsNumbers: it draws random numbers, which differ between ranks; a ``ModelError``.
        ModelError: ``optimizer(params)`` fails, returns no optimizer, or returns one that trains
            other tensors or none.
    """
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad} if module else {}
    models = trained or {"weight": nn.Parameter(torch.zeros(1, 1))}
    _alone.acquire()  # the default dtype is that of all threads
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of states that are made from a shape
    run = partial(_trained, make, models, closures)
    try:
        optimizer, params, whole = run()
        alike = _is_plain(optimizer) or all(
            _joins([run(dim, part)[2] for part in (slice(1), slice(1, None))], dim, whole)
            for dim in range(max(p.dim() for p in models.values()))
        )  # fmt: skip
    except HapError:
        raise
    except Exception as error:
        raise ModelError(
            f"optimizer(params) fails on small parameters: {type(error).__name__}: {error}",
            hint="return a torch.optim optimizer that steps without a closure",
        ) from error
    finally:
        torch.set_default_dtype(before)
        _alone.release()
    name = type(optimizer).__name__
    across = not alike and not getattr(optimizer, "whole_norms", False)
    if across and not _equal(whole, run()[2]):
        raise DrawsNumbers(
            f"{name} trains the same parameters in another way each time, as if it drew random numbers",
            hint="ranks would train different models: use an optimizer that draws no numbers",
        )
    if not any(values.diff(dim=0).any() for values in whole.values()):
        raise ModelError(
            f"{name} changes no parameter in its first {len(SCALES)} steps: hap can't tell whether it "
            "may train shards of parameters",
            hint="let it begin with a learning rate above zero",
        )
    kept = set(map(id, _tensors(optimizer)))
    left = [n for n, p in params.items() if id(p) not in kept]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(f"{name} does not train {', '.join(left[:3])}{more}", stacklevel=2)
    states = 0
    for p in _tensors(optimizer):
        state = optimizer.state.get(p, {}).values()
        found = sum(isinstance(t, torch.Tensor) and t.shape == p.shape != () for t in state)
        states = max(states, found)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return OptimizerKind(name=name, states=states, whole_parameters=across, fused=fused)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to train each element by itself: one of torch's, whose step nothing changes."""
    changed = "step" in vars(optimizer) or torch_private.has_step_hooks(optimizer)
    return type(optimizer) in ELEMENTWISE and not changed


def _equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(values, second[name]) for name, values in first.items())


def _trained(
    make: MakeOptimizer, models: Mapping[str, nn.Parameter], closures: bool, dim: int = 0,
    part: slice = slice(None),
) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter], dict[str, torch.Tensor]]:  # fmt: skip
    """Train the part of every small parameter along one dim, or along its last if it has fewer.

    Returns:
        The optimizer, its parameters, and their values before, between and after the steps.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(dims: int) -> torch.Tensor:
        shape = (4, 6, 3, 2, 2)[:dims] if dims < 6 else (2,) * dims
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        cut = min(dim, dims - 1)
        return whole.transpose(0, cut)[part].transpose(0, cut).clone() if shape else whole

    params = {name: nn.Parameter(drawn(model.dim())) for name, model in models.items()}
    for name, model in models.items():
        copy_attributes(model, params[name])
    optimizer = _call(make, params)
    values = {name: [p.detach().clone()] for name, p in params.items()}
    common = {name: drawn(model.dim()) for name, model in models.items()}
    for scale in SCALES:
        slopes = {name: scale * (mean + drawn(models[name].dim())) for name, mean in common.items()}
        pull = scale if closures else 0.0

        def closure(slopes: Any = slopes, pull: float = pull) -> torch.Tensor:
            for name, parameter in params.items():
                parameter.grad = slopes[name] + pull * parameter.detach()
            return torch.zeros(())

        closure()
        optimizer.step(*(closure,) if closures else ())
        for name, parameter in params.items():
            values[name].append(parameter.detach().clone())
    return optimizer, params, {name: torch.stack(steps) for name, steps in values.items()}


def _joins(
    parts: Sequence[Mapping[str, torch.Tensor]], dim: int, whole: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether the updates of the parts along ``dim`` form those of the whole."""
    for name, values in whole.items():
        cut = min(dim + 1, values.dim() - 1)
        joined = torch.cat([p[name] for p in parts], cut) if cut else parts[0][name]
        updates = values.diff(dim=0).flatten(1) if cut else values.diff(dim=0)[:, None]
        errors = (joined.diff(dim=0).view_as(updates) - updates).abs().amax(1)
        rounding = 16 * torch.finfo(values.dtype).eps * values.abs().max()
        if not (errors <= 1e-6 * updates.abs().amax(1) + rounding).all():
            return False
    return True
