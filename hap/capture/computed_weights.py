"""Weights that a forward pre-hook of torch computes: the deprecated weight_norm and spectral_norm, and pruning.

Such a hook writes its result into an attribute of the module before each forward. A copy of the
module for a trace computes the attribute when the forward reads it, as a parametrization does.
(torch 2.13)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Compute = Callable[[nn.Module], Tensor]


def computed_weights(module: nn.Module) -> dict[str, Compute]:
    """Return the attributes of a module that its hooks write, with the functions that compute them."""
    known = (_computed(hook) for hook in module._forward_pre_hooks.values())
    return dict(found for found in known if found)


def _computed(hook: Any) -> tuple[str, Compute] | None:
    match hook:
        case WeightNorm():
            return hook.name, hook.compute_weight
        case SpectralNorm():
            return hook.name, lambda module: hook.compute_weight(module, module.training)
        case BasePruningMethod():
            return hook._tensor_name, hook.apply_mask
    return None


def last_computed(model: nn.Module) -> dict[int, Tensor]:
    """Return a memo for ``copy.deepcopy``, which copies no tensor that is a result of others."""
    values = [
        vars(module)[name]
        for module in model.modules()
        for name in computed_weights(module)
        if name in vars(module)
    ]
    return {id(value): value.detach().clone() for value in values}


def compute_when_read(model: nn.Module) -> None:
    """Replace the hooks of all modules by properties of the same names."""
    for module in model.modules():
        computed = computed_weights(module)
        if not computed:
            continue
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if _computed(hook)]:
            del hooks[key]
        for name in computed:
            vars(module).pop(name, None)
        kind = type(module)
        read = {name: property(compute) for name, compute in computed.items()}
        module.__class__ = type(kind.__name__, (kind,), read)
