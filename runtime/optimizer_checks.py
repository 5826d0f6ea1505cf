"""Refuse an optimizer that doesn't train a planned module as one device would: before its first step."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hap.capture.small_optimizer import small_copy
from hap.capture.user_optimizer import ELEMENTWISE, DrawsNumbers, examine
from hap.errors import HapError, PlanError
from hap.ir.storage_levels import TensorCut
from hap.runtime.hap_module import HapModule

_shards: Any = WeakIdKeyDictionary()
"""Parameter of a model that was given to ``hap.compile`` -> a weak reference to its shard."""

_planned: Any = WeakIdKeyDictionary()
"""Shard, of a parameter that is cut -> the name of the plan's optimizer."""

_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizer -> the number of its groups when it was found to be right."""

_lock, _registered = threading.Lock(), list[object]()


def watch(model: nn.Module, module: HapModule) -> None:
    """Check from now on each optimizer of the whole model, or of the module that has its shards.

    The check is a hook of all optimizers of this process. Later steps of one optimizer look it up in a dict.
    """
    plan, rank = module._plan, module._comm.rank
    inner = slice(
        1 if plan.stages else 0, None
    )  # a stage holds a parameter whole, or nothing of it
    shards = dict(module.named_parameters())
    for name, parameter in model.named_parameters():
        if (shard := shards.get(name)) is None:  # the forward changes it
            continue
        _shards[parameter] = weakref.ref(shard)
        tensor = module._inputs.get(name)
        levels = plan.levels(tensor, rank)[inner] if tensor else ()
        if any(map(_cuts, levels)) and not plan.optimizer.whole_parameters:
            _planned[shard] = plan.optimizer.name
    with _lock:
        _checked.clear()
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before_step))


def _cuts(level: TensorCut | None) -> bool:
    return level is not None and max(level.sizes) < sum(level.sizes)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[Any, Any]) -> None:
    """Raise ``PlanError`` unless an optimizer trains its parameters as on one device."""
    if torch.compiler.is_compiling() or _checked.get(optimizer) == len(optimizer.param_groups):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not _has_gradients(optimizer, [p for p in parameters if p in _shards]):
        return  # the next step has, or shows that there are none
    cut = [p for p in parameters if p in _planned]
    closures = any(map(callable, (*args[1:2], kwargs.get("closure"))))
    if _needs_whole(optimizer, cut, closures=closures):
        name = type(optimizer).__name__
        raise PlanError(
            f"{name} reads whole parameters, but the plan for {_planned[cut[0]]} cuts them into shards",
            hint="give hap.plan the function that makes it: optimizer=lambda params: ...",
        )
    _checked[optimizer] = len(optimizer.param_groups)


def _has_gradients(optimizer: Optimizer, originals: list[nn.Parameter]) -> bool:
    """Return whether the parameters of whole models have gradients, if the optimizer has any of them.

    Raises:
        PlanError: their shards have gradients, and they have none.
    """
    if not originals or any(p.grad is not None for p in originals):
        return True
    shards = [_shards[p]() for p in originals]
    if any(shard is not None and shard.grad is not None for shard in shards):
        raise PlanError(
            f"{type(optimizer).__name__} has the parameters of the model that was given to hap.compile, "
            "which get no gradients: the shards of the new module get them",
            hint="make the optimizer after hap.compile, from the parameters of the module that it returns",
        )
    return False


def _needs_whole(optimizer: Optimizer, cut: list[nn.Parameter], *, closures: bool) -> bool:
    """Return whether parts of parameters would train in another way than whole ones.

    It examines copies of the optimizer, with a small parameter for each number of dims of each group. A
    warning says if that fails.

    Raises:
        PlanError: it draws random numbers, which differ between ranks.
    """
    if not cut or type(optimizer) in ELEMENTWISE or getattr(optimizer, "whole_norms", False):
        return False
    if type(optimizer) is torch.optim.LBFGS:
        return True
    shards, small = set(map(id, cut)), dict[tuple[int, int], nn.Parameter]()
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) in shards and p.requires_grad:
                small.setdefault((number, p.dim()), p)
    if not small:
        return False

    def make(params: list[nn.Parameter]) -> Optimizer:
        return small_copy(optimizer, shards, dict(zip(small, params, strict=True)))

    try:
        with warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            models = nn.ParameterList(small.values())
            return examine(make, models, closures=closures).whole_parameters
    except DrawsNumbers as error:
        raise PlanError(error.what, hint=error.hint) from None
    except HapError as error:
        warnings.warn(
            f"{type(optimizer).__name__} was not examined ({error.what}). It must update each element alone: "
            "the plan cuts parameters into shards",
            stacklevel=2,
        )
        return False
