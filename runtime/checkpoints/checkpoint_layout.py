"""The block of each parameter and buffer that a rank stores, and the rank that writes it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_shard import StoredShard
from hap.runtime.hap_module import HapModule


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of one rank's module, by the names of the model.

    Attributes:
        parameters: trained and frozen parameters, by their first name.
        buffers: persistent buffers, and others: all, or by a plan those that the forward updates.
        same: each name of the model's state dict -> the first name of the tensor.
    """

    parameters: dict[str, StoredShard]
    buffers: dict[str, StoredShard]
    same: dict[str, str]

    @property
    def tensors(self) -> dict[str, StoredShard]:
        return self.parameters | self.buffers


def layout(module: nn.Module) -> Layout:
    """Return the layout of a module by a plan, or of an ordinary module in one process."""
    if isinstance(module, HapModule):
        return _planned(module)
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        same[name] = first.setdefault(id(tensor), name)
    return Layout(
        parameters={n: StoredShard.whole(p.detach()) for n, p in module.named_parameters()},
        buffers={n: StoredShard.whole(b.detach()) for n, b in module.named_buffers()},
        same=same,
    )


class _Block(NamedTuple):
    """Where a rank's block of an input begins, and whether the rank writes it."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    written: bool


_blocks: weakref.WeakKeyDictionary[HapModule, dict[str, _Block]] = weakref.WeakKeyDictionary()


def _blocks_of(module: HapModule) -> dict[str, _Block]:
    """Return the block of each parameter and buffer that the step reads, computed once."""
    if module in _blocks:
        return _blocks[module]
    plan, rank = module._plan, module._comm.rank
    mine = written_by(plan, module._inputs.values(), rank)
    found = {}
    for name, value in module._inputs.items():
        shape = plan.graph.tensors[value].shape
        offsets = [0] * len(shape)
        for level in plan.levels(value, rank):
            if level:
                offsets[level.dim] += level.start
        found[name] = _Block(shape, tuple(offsets), value in mine)
    _blocks[module] = found
    return found


def _planned(module: HapModule) -> Layout:
    blocks = _blocks_of(module)

    def stored(name: str, tensor: Tensor) -> StoredShard:
        block = blocks.get(name)
        if block is None:  # the step does not use it: each rank holds the whole
            return StoredShard.whole(tensor.detach(), written=module._comm.rank == 0)
        return StoredShard(tensor.detach(), block.shape, block.offsets, written=block.written)

    updated = set(module._code.buffers)
    kept = module._persistent
    same = {name: first for name, first in module._same.items() if name in kept}
    return Layout(
        parameters={n: stored(n, p) for n, p in module.named_parameters()},
        buffers={n: stored(n, b) for n, b in module.named_buffers() if n in kept or n in updated},
        same=same,
    )


def written_by(plan: Plan, tensors: Iterable[str], rank: int) -> set[str]:
    """Return the inputs of which a rank writes its block.

    Every element of an input is written by exactly one rank. Replicas are distributed so that
    ranks write about equally many elements. The result is the same in all processes.
    """
    machines = plan.groups
    load = [0] * plan.world_size
    mine = set()
    graph = plan.graph.tensors
    for tensor in sorted(set(tensors), key=lambda t: (-math.prod(graph[t].shape), t)):
        shape = graph[tensor].shape
        cuts = [(None, *plan.levels(tensor, ranks[0]))[-2:] for ranks in machines]
        across = cuts[0][0]
        chosen = range(len(machines))
        if across is None:
            chosen = range(
                first := min(chosen, key=lambda m: sum(load[r] for r in machines[m])), first + 1
            )
        for machine in chosen:
            outer, inner = cuts[machine]
            part = list(shape)
            if outer:
                part[outer.dim] = outer.sizes[outer.place]
            count, ranks = math.prod(part), machines[machine]
            if inner is None:
                ranks = (min(ranks, key=lambda r: load[r]),)
            for place, writer in enumerate(ranks):
                share = inner.sizes[place] / max(sum(inner.sizes), 1) if inner else 1
                load[writer] += round(count * share)
                if writer == rank:
                    mine.add(tensor)
    return mine


def fresh(shard: StoredShard, dtype: torch.dtype, device: torch.device) -> StoredShard:
    """Return the same block in new memory."""
    return shard.like(torch.empty(shard.tensor.shape, dtype=dtype, device=device))
