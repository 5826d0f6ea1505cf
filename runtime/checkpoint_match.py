"""Compare a checkpoint with the model and the optimizer that are to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hap.errors import CheckpointError
from hap.runtime.checkpoint_folder import damaged, read_index
from hap.runtime.checkpoint_layout import Layout, fresh, layout
from hap.runtime.checkpoint_optimizer import blank
from hap.runtime.checkpoint_shard import StoredShard
from hap.runtime.checkpoint_storage import SafetensorsReader, own_state
from hap.runtime.checkpoint_writing import Writing

MODEL = "model/"
"""Begins the names of the model's tensors in a checkpoint."""


class Match(NamedTuple):
    """What a load reads: the module's shards with fresh ones, and the optimizer's state dict."""

    entries: Mapping[str, Any]
    targets: dict[str, tuple[StoredShard, StoredShard]]
    states: dict[str, StoredShard]
    optimizer: dict[str, Any] | None
    own: Any
    reader: SafetensorsReader


def match(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    given: Mapping[str, Any],
    path: Path,
    writing: Writing,
) -> Match:
    """Compare a checkpoint with what is to be loaded, and allocate memory for this rank's part."""
    index = read_index(path)
    held = layout(model)
    with damaged(path):
        targets = _targets(held, index, path)
        stored = index["optimizer"]
        for kind, one in given.items():
            if one is not None and stored is not None and index[kind] is None:
                raise CheckpointError(
                    f"the checkpoint holds no state of a {kind}", where=str(path),
                    hint=f"load without the {kind}, or save with it",
                )  # fmt: skip
        states: dict[str, StoredShard] = {}
        rest = None
        if optimizer is not None and stored is not None:
            states, rest = blank(optimizer, model, held.parameters, stored)
        own = own_state(path, writing.rank, writing.world_size, index)
    return Match(index, targets, states, rest, own, SafetensorsReader(path, index))


def _targets(
    held: Layout, index: Mapping[str, Any], path: Path
) -> dict[str, tuple[StoredShard, StoredShard]]:
    """Return per name in the checkpoint the module's shard, and a fresh one to read into."""
    entries = {
        name.removeprefix(MODEL): entry
        for name, entry in index["tensors"].items()
        if name.startswith(MODEL)
    }
    names: dict[str, list[str]] = {name: [name] for name in held.tensors}
    for name, first in held.same.items():
        if name != first:
            names[first].append(name)

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint is of another model: {reason}", where=str(path),
            hint="load it into the model that was saved, or give another folder",
        )  # fmt: skip

    found = {}
    persistent = set(held.same)
    for first, shard in held.tensors.items():
        name = next((n for n in names[first] if n in entries), "")
        if not name:
            if first in persistent:
                raise fail(f"it lacks {first}")
            continue  # a buffer that is not persistent, and starts anew
        entry = entries[name]
        if list(entry["shape"]) != list(shard.shape):
            there, here = tuple(entry["shape"]), tuple(shard.shape)
            raise fail(f"{name} has shape {there} in it and {here} in the model")
        dtype = getattr(torch, entry["dtype"])
        if dtype != shard.tensor.dtype:
            raise fail(f"{name} is {entry['dtype']} in it and {shard.tensor.dtype} in the model")
        found[MODEL + name] = shard, fresh(shard, dtype, shard.tensor.device)
    known = {name for every in names.values() for name in every}
    saved_same = index["same"]
    for name in entries:
        if name not in known and (not saved_same or name in saved_same):
            raise fail(f"the model lacks {name}")
    return found
