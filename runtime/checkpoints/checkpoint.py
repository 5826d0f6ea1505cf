"""Save and load training: weights, optimizer, step, random numbers, by any plan."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from hap.errors import CheckpointError, InputError, reason_of
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder, newest
from hap.runtime.checkpoints.checkpoint_layout import Layout, layout
from hap.runtime.checkpoints.checkpoint_match import MODEL, Saved, match
from hap.runtime.checkpoints.checkpoint_optimizer import take
from hap.runtime.checkpoints.checkpoint_shard import ShardLoadPlanner, ShardSavePlanner, StoredShard
from hap.runtime.checkpoints.checkpoint_storage import SafetensorsWriter
from hap.runtime.checkpoints.checkpoint_values import (
    encode,
    random_states,
    set_random_states,
    tensor_as_json,
)
from hap.runtime.checkpoints.checkpoint_writing import (
    join_all,
    raise_told,
    wait_for_saves,
    writing_of,
)
from hap.runtime.hap_module import HapModule

__all__ = ["Saved", "load", "save", "wait_for_saves"]


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    keep: int | None = None,
    block: bool = False,
) -> None:
    """Save a checkpoint into ``folder/step-N``; every rank must call it, between two steps.

    The call copies this rank's shards to CPU memory and returns. A thread then writes them, while
    training goes on. The next call waits for it. No rank gathers whole tensors.

    Args:
        model: the module of :func:`hap.compile`, or an ordinary module in a single process.
        optimizer: its optimizer; ``None``: save the model alone.
        folder: seen by all machines. It is made by the first call.
        step: names the checkpoint; a complete one of the same step is replaced.
        extra: more to save: numbers, strings, lists, tuples, dicts and small tensors. Rank 0's is
            kept; tensors must be the same on all ranks.
        scheduler: a learning-rate scheduler, or anything with ``state_dict`` and
            ``load_state_dict``.
        scaler: a gradient scaler.
        keep: delete all but this many of the newest checkpoints afterwards; ``None``: none.
        block: return after the checkpoint is complete.

    Raises:
        CheckpointError: the *previous* checkpoint could not be written (with ``block``, also this
            one): a full disk, for example. Memory and older checkpoints are unchanged.
        InputError: ``extra`` has a value without a JSON form, or a tensor that differs between ranks;
            ``keep`` is less than 1; the folder has a complete checkpoint of a later step.
    """
    if keep is not None and keep < 1:
        raise InputError(f"keep is {keep}", hint="keep at least 1 checkpoint")
    if not isinstance(step, int) or step < 0:
        raise InputError(f"step is {step!r}", hint="give the number of steps trained so far")
    _check_module(model)
    writing = writing_of(model)
    writing.finish()
    place = CheckpointFolder(Path(folder).absolute())

    seen: dict[str, str] = {}

    def noted(tensor: torch.Tensor, where: str) -> dict[str, Any]:
        found = tensor_as_json(tensor, where)
        seen[where] = hashlib.sha256(str(found).encode()).hexdigest()
        return found

    def prepared() -> tuple[dict[str, StoredShard], dict[str, Any]]:
        if writing.rank == 0:
            make(place, writing.folders)
            place.check_newest(step)
        shards, state = taken(model, optimizer, step, layout(model))
        kept = encode(dict(extra or {}), tensor=noted)
        state |= {"world_size": writing.world_size, "extra": kept}
        return shards, state | beside(scheduler, scaler)

    shards, state = writing.together(prepared, seen)
    own = {"rng": encode(random_states(), "rng")}
    copies: dict[str, StoredShard] = {}
    for name, shard in shards.items():
        copies[name] = shard.like(_copied(shard.tensor)) if shard.written else shard
    if any(shard.tensor.is_cuda for shard in shards.values()):
        torch.cuda.synchronize()
    writer = SafetensorsWriter(place, step, writing.rank, state, own, keep)

    def write() -> None:
        write_shards(
            copies, storage_writer=writer, planner=ShardSavePlanner(),
            process_group=writing.group, no_dist=writing.alone,
        )  # fmt: skip

    writing.start(write, str(place.at(step)))
    if block:
        writing.finish()


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    scaler: Any = None,
) -> Saved:
    """Load the newest complete checkpoint of a folder; every rank must call it.

    The checkpoint may be of another plan: other shares, other dims, another number of ranks, one
    mesh axis or two, or an ordinary module. Each rank reads its own shards. The states of the
    random generators are restored as well.

    Args:
        model: the module of :func:`hap.compile`, or an ordinary module in a single process.
        optimizer: of the class and with the parameter groups of the one that was saved; ``None``:
            load the model alone.
        folder: given to :func:`save`, or the folder ``step-N`` of one checkpoint.
        scheduler, scaler: as given to :func:`save`.

    Returns:
        What was saved beside, such as ``step`` and ``extra``.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is of another model or optimizer.
            Model and optimizer are then unchanged on all ranks.
    """
    writing = writing_of(model)
    writing.finish()
    join_all()  # the checkpoint may be one that another module is writing
    path, skipped = writing.of_first(lambda: newest(Path(folder).absolute()))
    for line in skipped if writing.rank == 0 else ():
        warnings.warn(f"incomplete checkpoint skipped: {line}", stacklevel=2)
    given = {"scheduler": scheduler, "scaler": scaler}
    found = writing.together(lambda: match(model, optimizer, given, path, skipped, writing))
    shards = {name: shard for name, (_, shard) in found.targets.items()} | found.states
    try:
        read_shards(
            shards, storage_reader=found.reader, planner=ShardLoadPlanner(),
            process_group=writing.group, no_dist=writing.alone,
        )  # fmt: skip
    except BaseException as error:
        raise_told(error, f"{path} was not loaded")
    with torch.no_grad():
        for target, shard in found.targets.values():
            target.tensor.copy_(shard.tensor)
    if optimizer is not None and found.optimizer is not None:
        optimizer.load_state_dict(found.optimizer)
    for kind, state in found.beside.items():
        given[kind].load_state_dict(state)
    if isinstance(model, HapModule) and found.drawn:
        model._ctx.seed, model._ctx.step = found.drawn
    if found.rng:
        set_random_states(found.rng)
    return found.saved


def beside(scheduler: Any, scaler: Any) -> dict[str, Any]:
    """Return the states of a scheduler and a scaler as JSON; ``None`` for what there is not."""
    return {
        "scheduler": scheduler and encode(scheduler.state_dict(), "the scheduler's state"),
        "scaler": scaler and encode(scaler.state_dict(), "the scaler's state"),
    }


def taken(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, held: Layout
) -> tuple[dict[str, StoredShard], dict[str, Any]]:
    """Return the shards of a checkpoint, and the JSON that describes them."""
    shards = {MODEL + name: shard for name, shard in held.tensors.items()}
    state: dict[str, Any] = {"step": step, "plan": "", "batch_size": 0, "module": None}
    if isinstance(model, HapModule):
        context = model._ctx
        state["plan"] = hashlib.sha256(model._digest.encode()).hexdigest()
        state["batch_size"] = model._plan.batch_size
        state["module"] = {"seed": context.seed, "step": context.step}
    state["same"], state["complex"] = held.same, sorted(held.complex)
    state["optimizer"] = None
    if optimizer is not None:
        states, state["optimizer"] = take(optimizer, model, held.parameters)
        shards |= states
    return shards, state


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        return tensor.contiguous().to("cpu", non_blocking=True)
    return tensor.clone(memory_format=torch.contiguous_format)


def make(folder: CheckpointFolder, known: set[str]) -> None:
    """Make a folder of checkpoints; one that this run made before must still be there."""
    path = str(folder.path)
    if path in known and not folder.path.is_dir():
        raise CheckpointError(
            "the folder of checkpoints is gone", where=path,
            hint="mount or make it again; the state in memory is unchanged",
        )  # fmt: skip
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"no folder for checkpoints can be made there: {reason_of(error)}", where=path,
            hint="give another folder",
        ) from None  # fmt: skip
    known.add(path)


def _check_module(model: nn.Module) -> None:
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and not isinstance(model, HapModule):
        raise InputError(
            "this module is not one of hap.compile, and there are several ranks",
            hint="save the module that hap.compile returned, or on one process alone",
        )
