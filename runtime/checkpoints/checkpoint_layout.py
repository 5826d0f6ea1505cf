"""The block of each parameter and buffer that a rank stores, and the rank that writes it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Sequence
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
        complex: the first names of complex tensors, which are stored as pairs.
    """

    parameters: dict[str, StoredShard]
    buffers: dict[str, StoredShard]
    same: dict[str, str]
    complex: set[str]

    @property
    def tensors(self) -> dict[str, StoredShard]:
        return self.parameters | self.buffers


def layout(module: nn.Module, present: Collection[int] | None = None) -> Layout:
    """Return the layout of a module by a plan, or of an ordinary module in one process.

    Args:
        present: the ranks that write, which hold everything; default: all.
    """
    if isinstance(module, HapModule):
        return _planned(module, present)
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        same[name] = first.setdefault(id(tensor), name)
    return Layout(
        parameters={n: StoredShard.whole(p.detach()) for n, p in module.named_parameters()},
        buffers={n: StoredShard.whole(b.detach()) for n, b in module.named_buffers()},
        same=same,
        complex=_complex(module),
    )


def _complex(module: nn.Module) -> set[str]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name for name, tensor in tensors.items() if tensor.is_complex()}


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


def _planned(module: HapModule, present: Collection[int] | None) -> Layout:
    blocks, rank, first_rank = _blocks_of(module), module._comm.rank, 0
    if present is not None:
        writes = writers(module._plan, module._inputs.values(), present)
        assert writes is not None, "the ranks that are present do not hold everything"
        mine = {name for name, value in module._inputs.items() if rank in writes[value]}
        blocks = {name: b._replace(written=name in mine) for name, b in blocks.items()}
        first_rank = min(present)

    def stored(name: str, tensor: Tensor) -> StoredShard:
        block = blocks.get(name)
        if block is None:  # the step does not use it: each rank holds the whole
            return StoredShard.whole(tensor.detach(), written=rank == first_rank)
        return StoredShard(tensor.detach(), block.shape, block.offsets, written=block.written)

    updated = set(module._code.buffers)
    kept = module._persistent
    same = {name: first for name, first in module._same.items() if name in kept}
    return Layout(
        parameters={n: stored(n, p) for n, p in module.named_parameters()},
        buffers={n: stored(n, b) for n, b in module.named_buffers() if n in kept or n in updated},
        same=same,
        complex=module._complex | _complex(module),
    )


def written_by(plan: Plan, tensors: Iterable[str], rank: int) -> set[str]:
    """Return the inputs of which a rank writes its block; see :func:`writers`."""
    found = writers(plan, tensors, range(plan.world_size))
    assert found is not None
    return {tensor for tensor, ranks in found.items() if rank in ranks}


def writers(
    plan: Plan, tensors: Iterable[str], present: Collection[int]
) -> dict[str, set[int]] | None:
    """Return per input the ranks that write their blocks of it; ``None``: some element is lost.

    Every element of an input is written by exactly one of the ranks that are present. Replicas are
    distributed so that ranks write about equally many elements. The result is the same in all
    processes. With two mesh axes, one machine must have all of a tensor that each machine holds.
    """
    machines = plan.groups
    load = [0] * plan.world_size
    found: dict[str, set[int]] = {}
    graph = plan.graph.tensors
    for tensor in sorted(set(tensors), key=lambda t: (-math.prod(graph[t].shape), t)):
        parts = [_part(plan, tensor, ranks, present) for ranks in machines]
        chosen = [n for n, part in enumerate(parts) if part.held]
        if (None, *plan.levels(tensor, machines[0][0]))[-2]:  # cut between machines
            if len(chosen) < len(machines):
                return None
        elif not chosen:
            return None
        else:
            chosen = [min(chosen, key=lambda n: sum(load[r] for r in machines[n]))]
        found[tensor] = set()
        for machine in chosen:
            part, ranks = parts[machine], machines[machine]
            if part.sizes is None:
                here = [r for r in ranks if r in present]
                ranks = (min(here, key=lambda r: load[r]),) if here else ()
            for place, writer in enumerate(ranks):
                share = part.sizes[place] / max(sum(part.sizes), 1) if part.sizes else 1
                load[writer] += round(part.elements * share)
                found[tensor].add(writer)
    return found


class _Part(NamedTuple):
    """The part of an input that the ranks of one machine hold.

    Attributes:
        sizes: by which its ranks cut the part; ``None``: each of them holds all of it.
        held: whether those that are present hold all of it.
    """

    elements: int
    sizes: tuple[int, ...] | None
    held: bool


def _part(plan: Plan, tensor: str, ranks: Sequence[int], present: Collection[int]) -> _Part:
    outer, inner = (None, *plan.levels(tensor, ranks[0]))[-2:]
    shape = list(plan.graph.tensors[tensor].shape)
    if outer:
        shape[outer.dim] = outer.sizes[outer.place]
    elements = math.prod(shape)
    if inner is None:
        held = any(r in present for r in ranks) or (elements == 0 and outer is not None)
        return _Part(elements, None, held)
    held = all(r in present for r, size in zip(ranks, inner.sizes, strict=True) if size)
    return _Part(elements, tuple(inner.sizes), held or elements == 0)


def survivable(plan: Plan) -> bool:
    """Is there a rank without which the others hold every parameter and buffer?"""
    inputs = [i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")]
    everyone = range(plan.world_size)
    return plan.world_size > 1 and any(
        writers(plan, inputs, [r for r in everyone if r != lost]) is not None for lost in everyone
    )


def fresh(shard: StoredShard, dtype: torch.dtype, device: torch.device) -> StoredShard:
    """Return the same block in new memory."""
    return shard.like(torch.empty(shard.tensor.shape, dtype=dtype, device=device))
