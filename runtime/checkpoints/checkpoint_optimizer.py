"""An optimizer's state by the names of parameters: tensors in shards, everything else as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import InputError
from hap.runtime.checkpoints.checkpoint_layout import fresh
from hap.runtime.checkpoints.checkpoint_shard import StoredShard
from hap.runtime.checkpoints.checkpoint_values import decode, encode

SHARD = "$shard"
"""Marks a state that is cut as its parameter is; the value is the dtype."""


def tensor_name(state: str, parameter: str) -> str:
    return f"optimizer/{state}/{parameter}"


def take(
    optimizer: torch.optim.Optimizer, module: nn.Module, parameters: Mapping[str, StoredShard]
) -> tuple[dict[str, StoredShard], dict[str, Any]]:
    """Return the shards of an optimizer's state, and the rest of it as JSON."""
    names = _names(optimizer, module)
    shards: dict[str, StoredShard] = {}
    rest: dict[str, Any] = {}
    for parameter, name in names.items():
        if parameter not in optimizer.state:
            continue
        kept = rest[name] = {}
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.shape == parameter.shape != ():
                shard = parameters[name].like(value.detach())
                shards[tensor_name(key, name)] = shard
                kept[key] = {SHARD: str(shard.tensor.dtype).removeprefix("torch.")}
            else:
                kept[key] = encode(value, f"the optimizer's state {key!r} of {name}")
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(
            {
                "names": [names[p] for p in group["params"]],
                "options": encode(options, f"parameter group {number}"),
            }
        )
    kind = type(optimizer).__name__
    return shards, {"class": kind, "groups": groups, "state": rest}


def blank(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    parameters: Mapping[str, StoredShard],
    saved: Mapping[str, Any],
) -> tuple[dict[str, StoredShard], dict[str, Any]]:
    """Return empty shards to read a saved state into, and the state dict that they complete.

    The state dict is for ``optimizer.load_state_dict``.

    Raises:
        InputError: the optimizer is of another class, or groups its parameters differently.
    """
    kind = type(optimizer).__name__
    if saved["class"] != kind:
        raise InputError(
            f"the checkpoint holds the state of {saved['class']}, this run has {kind}",
            hint=f"make a {saved['class']}, or load the weights alone: pass None as the optimizer",
        )
    names = _names(optimizer, module)
    options = {frozenset(g["names"]): g["options"] for g in saved["groups"]}
    known = {name for group in saved["groups"] for name in group["names"]}
    shards: dict[str, StoredShard] = {}
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        own = [names[p] for p in group["params"]]
        if frozenset(own) not in options:
            absent = [name for name in own if name not in known]
            raise InputError(
                f"the checkpoint's optimizer lacks {absent[0]}"
                if absent
                else f"no parameter group of the checkpoint is that of {own[0]}",
                hint="make the optimizer with the parameter groups of the saved run, or load the "
                "weights alone: pass None as the optimizer",
            )
        places = range(len(state), len(state) + len(own))
        groups.append(decode(options[frozenset(own)]) | {"params": list(places)})
        for place, parameter, name in zip(places, group["params"], own, strict=True):
            state[place] = entries = {}
            for key, value in saved["state"].get(name, {}).items():
                if not (isinstance(value, dict) and SHARD in value):
                    entries[key] = decode(value)
                    continue
                shard = fresh(parameters[name], getattr(torch, value[SHARD]), parameter.device)
                shards[tensor_name(key, name)] = shard
                pairs = parameter.is_complex()
                entries[key] = torch.view_as_complex(shard.tensor) if pairs else shard.tensor
    kept = {place: entries for place, entries in state.items() if entries}
    return shards, {"state": kept, "param_groups": groups}


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[Tensor, str]:
    """Return the names of an optimizer's parameters, in its order."""
    named = {parameter: name for name, parameter in module.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p not in named for p in params):
        raise InputError(
            "the optimizer holds a parameter that is not of this module",
            hint="make the optimizer from module.parameters(), after hap.compile",
        )
    return {p: named[p] for p in params}
