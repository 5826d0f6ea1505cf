"""A copy of an optimizer that trains small parameters in place of its own, to try it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hap.capture import torch_private


def small_copy(
    optimizer: Optimizer, wanted: Collection[int], small: Mapping[tuple[int, int], nn.Parameter]
) -> Optimizer:
    """Return a new optimizer with the settings of another one, without its state and hooks.

    Its other attributes are copied too, also optimizers inside of it. What refers to a parameter refers to a small
    one in the copy.

    Args:
        wanted: ids of the parameters that small ones replace; the copy does not train the others.
        small: by the number of the group and the number of dims.
    """
    memo: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        own = {d: p for (k, d), p in small.items() if k == number}
        for p in group["params"]:
            kept = id(p) in wanted and p.dim() in own
            memo[id(p)] = own[p.dim()] if kept else nn.Parameter(torch.zeros((1,) * p.dim()))
        memo[id(group)] = {**_settings(group), "params": [*own.values()]}
    return _copied(optimizer, memo)


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    new: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)], memo[id(optimizer.state)] = new, defaultdict[Any, Any](dict)
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copied(value, memo)
    for name, value in vars(optimizer).items():
        if name.startswith(torch_private.STEP_HOOKS):
            vars(new)[name] = type(value)()  # no hooks
        elif name != "step":  # a scheduler's, which counts the steps of the original
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, with a rate that changes parameters: one of a warm-up may begin at 0."""
    kept = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    rate = kept.pop("initial_lr", kept.get("lr"))
    if "lr" in kept:
        kept["lr"] = 1e-3 if isinstance(rate, float | int) and rate == 0 else rate
    return kept
