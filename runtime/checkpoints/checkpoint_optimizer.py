"""An optimizer's state by the names of parameters: tensors in shards, everything else as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hap.errors import InputError
from hap.runtime.checkpoints.checkpoint_layout import fresh
from hap.runtime.checkpoints.checkpoint_shard import StoredShard
from hap.runtime.checkpoints.checkpoint_values import SHARD, decode, encode, tensor_as_json

OF = "of"
"""The path of a marked state inside of a dict, list or tuple, such as ``momenta[0.9]``."""


def tensor_name(state: str, parameter: str) -> str:
    return f"optimizer/{state}/{parameter}"


@dataclass(frozen=True, slots=True)
class _State:
    """One state of a parameter: a tensor, or a dict, list or tuple that has some."""

    name: str
    key: str
    parameter: Tensor
    whole: StoredShard
    shards: dict[str, StoredShard]
    where: str = ""

    def take(self, x: Tensor, path: str) -> Any:
        """Return a tensor as JSON, or add it to the shards and return its mark."""
        inner = self.key + path.removeprefix(self.where)
        if x.shape == self.parameter.shape != ():
            shard = self.shards[tensor_name(inner, self.name)] = self.whole.like(x.detach())
            dtype = str(shard.tensor.dtype).removeprefix("torch.")
            return {SHARD: dtype} | ({OF: inner} if inner != self.key else {})
        if x.numel() != 1 and self.whole.shape != self.whole.tensor.shape:
            raise InputError(
                f"{path} has shape {tuple(x.shape)}, but this rank's part of the parameter has "
                f"{tuple(self.parameter.shape)}",
                hint="a checkpoint joins the parts of all ranks: keep states in the parameter's shape",
            )
        return tensor_as_json(x, path)

    def blank(self, mark: Mapping[str, Any]) -> Tensor:
        """Return an empty tensor for a mark, and add it to the shards that are read."""
        shard = fresh(self.whole, getattr(torch, mark[SHARD]), self.parameter.device)
        self.shards[tensor_name(mark.get(OF, self.key), self.name)] = shard
        return torch.view_as_complex(shard.tensor) if self.parameter.is_complex() else shard.tensor


def take(
    optimizer: torch.optim.Optimizer, module: nn.Module, parameters: Mapping[str, StoredShard]
) -> tuple[dict[str, StoredShard], dict[str, Any]]:
    """Return the shards of an optimizer's state, and the rest of it as JSON.

    Raises:
        InputError: a state of a parameter that is cut has another shape than the shard.
    """
    names = _names(optimizer, module)
    shards: dict[str, StoredShard] = {}
    rest: dict[str, Any] = {}
    for parameter, name in names.items():
        if parameter not in optimizer.state:
            continue
        kept = rest[name] = {}
        for key, value in optimizer.state[parameter].items():
            where = f"the optimizer's state {key!r} of {name}"
            of = _State(name, key, parameter, parameters[name], shards, where)
            kept[key] = encode(value, where, of.take)
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
                else f"no parameter group of the checkpoint matches that of {own[0]}",
                hint="make the optimizer with the parameter groups of the saved run, or load the "
                "weights alone: pass None as the optimizer",
            )
        places = range(len(state), len(state) + len(own))
        groups.append(decode(options[frozenset(own)]) | {"params": list(places)})
        for place, parameter, name in zip(places, group["params"], own, strict=True):
            state[place] = entries = {}
            for key, value in saved["state"].get(name, {}).items():
                of = _State(name, key, parameter, parameters[name], shards)
                entries[key] = decode(value, of.blank)
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
