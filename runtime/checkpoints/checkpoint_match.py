"""Compare a checkpoint with the model and the optimizer that are to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hap.errors import CheckpointError
from hap.runtime.checkpoints.checkpoint_folder import damaged, read_index
from hap.runtime.checkpoints.checkpoint_layout import Layout, fresh, layout
from hap.runtime.checkpoints.checkpoint_optimizer import blank
from hap.runtime.checkpoints.checkpoint_shard import StoredShard
from hap.runtime.checkpoints.checkpoint_storage import SafetensorsReader, own_state
from hap.runtime.checkpoints.checkpoint_values import decode
from hap.runtime.checkpoints.checkpoint_writing import Writing

MODEL = "model/"
"""Begins the names of the model's tensors in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds beside the states that ``hap.load`` restored.

    Attributes:
        step: the ``step`` given to ``hap.save``.
        extra: the ``extra`` given to ``hap.save``.
        path: the checkpoint's folder.
        plan: a digest of the plan that saved it; empty for an ordinary module.
        batch_size: rows of that plan's global batch; 0 for an ordinary module.
        weights_only: it holds no optimizer, like those of ``hap import``.
        skipped: newer checkpoints in the folder that are incomplete, and why.
    """

    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    path: Path
    plan: str = ""
    batch_size: int = 0
    weights_only: bool = False
    skipped: tuple[str, ...] = ()


class Match(NamedTuple):
    """What a load reads, and all that it changes once every rank has read.

    Attributes:
        targets: per name, the module's shard, and memory to read it into.
        states: memory for the optimizer's shards.
        optimizer: its state dict, with those shards in it.
        beside: states of the scheduler and the scaler.
        drawn: seed and step of the module's random numbers.
        rng: states of the random generators.
    """

    targets: dict[str, tuple[StoredShard, StoredShard]]
    states: dict[str, StoredShard]
    optimizer: dict[str, Any] | None
    beside: dict[str, Any]
    drawn: tuple[int, int] | None
    rng: dict[str, Any] | None
    reader: SafetensorsReader
    saved: Saved


def match(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    given: Mapping[str, Any],
    path: Path,
    skipped: Sequence[str],
    writing: Writing,
) -> Match:
    """Compare a checkpoint with what is to be loaded, and allocate memory for this rank's part.

    Args:
        given: the scheduler and the scaler.

    Raises:
        CheckpointError: they differ, or the checkpoint is damaged.
    """
    index = read_index(path)
    held = layout(model)
    with damaged(path):
        targets = _targets(held, index, path)
        stored = index["optimizer"]
        for kind, one in given.items():
            wanted = one is not None and one.state_dict()  # a disabled scaler has no state
            if wanted and stored is not None and not index[kind]:
                raise CheckpointError(
                    f"the checkpoint holds no state of a {kind}", where=str(path),
                    hint=f"load without the {kind}",
                )  # fmt: skip
        states: dict[str, StoredShard] = {}
        rest = None
        if optimizer is not None and stored is not None:
            states, rest = blank(optimizer, model, held.parameters, stored)
        own = own_state(path, writing.rank, writing.world_size, index)
        drawn = index["module"]
        return Match(
            targets=targets,
            states=states,
            optimizer=rest,
            beside={
                kind: decode(index[kind])
                for kind, one in given.items()
                if one is not None and index[kind]
            },
            drawn=(drawn["seed"], drawn["step"]) if drawn else None,
            rng=decode(own["rng"]) if "rng" in own else None,
            reader=SafetensorsReader(path, index),
            saved=Saved(
                step=index["step"], extra=decode(index["extra"]), path=path, plan=index["plan"],
                batch_size=index["batch_size"], weights_only=stored is None,
                skipped=tuple(skipped),
            ),
        )  # fmt: skip


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
    saved_same = index["same"]
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
        cast = not saved_same and dtype.is_floating_point == shard.tensor.is_floating_point()
        if dtype != shard.tensor.dtype and not cast:  # imported weights may be of any precision
            raise fail(f"{name} is {entry['dtype']} in it and {shard.tensor.dtype} in the model")
        found[MODEL + name] = shard, fresh(shard, dtype, shard.tensor.device)
    known = {name for every in names.values() for name in every}
    for name in entries:
        if name not in known and (not saved_same or name in saved_same):
            raise fail(f"the model lacks {name}")
    return found
