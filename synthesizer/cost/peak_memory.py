"""Peak memory of every rank, by kinds of data.

Values live from first definition to last use, also in the backward. Inputs and outputs of a
(fused) collective exist together, from its issue to its end (``until`` of
:class:`hap.synthesizer.cost.liveness.LiveRanges`). Collectives run one after the other, so the
largest buffers of those under way count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hap.ir.graph import ITEM_BYTES, Graph, Node
from hap.ir.loss_chunks import CHUNKS
from hap.ir.placement import Placement, R
from hap.ir.program import Convert, Instruction, Program
from hap.synthesizer.cost.cost_structure import CostStructure, structure_of
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.liveness import Indices, LiveRanges
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.rules.rule_table import Row

KINDS = (
    "parameters", "optimizer states", "batch and buffers", "gathered parameters", "gradients",
    "saved activations", "temporary values", "workspace", "communication buffers",
)  # fmt: skip

_STATES_OF_ADAM = 2

Floats = npt.NDArray[np.float64]
Until = Sequence[int] | None

Buffers = Callable[[Sequence[Instruction]], PerRank]
"""Bytes of a collective besides its tensors; usually :func:`communication_buffers`."""


def memory(
    graph: Graph, program: Program, cost: Prices, buffers: Buffers | None = None,
    until: Until = None, *, updating: bool = True, throughout: Collection[int] = (),
) -> tuple[PerRank, PerRank]:  # fmt: skip
    """Return (stored bytes of parameters and optimizer states, peak bytes of the step) per rank.

    Args:
        updating: whether the optimizer's step follows.
        buffers: buffers of collectives, if the ranks of ``cost`` do not work together.
        until: the ends of collectives; default: none overlaps with computing.
        throughout: instructions whose results exist from the start to the end.
    """
    structure = structure_of(graph, program, cost)
    given = _given(graph, structure, cost)
    columns = _columns(structure, cost, buffers)
    live = _live(structure, until, throughout)
    alive, own, between = _moments(program, cost, buffers, structure, live, columns, given)
    peak: PerRank = (alive + own + between).max(axis=0)[columns.of_rank]
    if updating:
        peak = np.maximum(peak, _sum(_while_updating(structure, cost, given)))
    return given["parameters"] + given["optimizer states"], peak


def at_peak(
    graph: Graph, program: Program, cost: Prices, until: Until = None, *, updating: bool = True
) -> dict[str, PerRank]:
    """Return kind -> the bytes that each rank holds at its peak; as in :func:`memory`."""
    structure = structure_of(graph, program, cost)
    live, columns = _live(structure, until), _columns(structure, cost, None)
    given = _given(graph, structure, cost)
    alive, own, between = (
        nbytes[:, columns.of_rank]
        for nbytes in _moments(program, cost, None, structure, live, columns, given)
    )
    moments = (alive + own + between).argmax(axis=0)
    fullest = live.moments[moments] - 1
    found = {kind: np.zeros(len(fullest)) for kind in KINDS}
    for kind, nbytes in given.items():
        found[kind] = found[kind] + nbytes
    for storage, first, last in zip(structure.storages, live.first, live.last, strict=True):
        there = (first <= fullest) & (fullest <= last)
        value = storage.value
        nbytes = cost.local_bytes(graph.tensors[value.tensor], value.placement)
        found[storage.kind] += np.where(there, nbytes, 0.0)
    here = moments, np.arange(len(moments))
    found["workspace"], found["communication buffers"] = own[here], between[here]
    if updating:
        update = _while_updating(structure, cost, given)
        later = _sum(update) > _sum(found)
        nothing = np.zeros(len(fullest))
        found = {kind: np.where(later, update.get(kind, nothing), found[kind]) for kind in KINDS}
    return found


def _sum(kinds: Mapping[str, PerRank]) -> PerRank:
    found: PerRank = np.sum(list(kinds.values()), axis=0)
    return found


def _live(
    structure: CostStructure, until: Until, throughout: Collection[int] = ()
) -> LiveRanges:  # fmt: skip
    if until is None and not throughout:
        return structure.live
    return structure.live_until(until, throughout)


def _given(graph: Graph, structure: CostStructure, cost: Prices) -> dict[str, PerRank]:
    """Return the bytes of the inputs, which exist from the start to the end."""
    parts = _parts(structure, cost)[structure.part_of_input]
    local = structure.bytes_of_input[:, None] * parts
    roles = np.array([i.role == "parameter" for i in graph.inputs])
    trained = np.array([i.target in graph.gradients for i in graph.inputs])
    return {
        "parameters": local[roles].sum(axis=0),
        "optimizer states": (cost.optimizer_states * local[roles & trained]).sum(axis=0),
        "batch and buffers": local[~roles].sum(axis=0),
    }


def _moments(
    program: Program, cost: Prices, buffers: Buffers | None, structure: CostStructure,
    live: LiveRanges, columns: _Columns, given: Mapping[str, PerRank],
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """Return live bytes, workspace and buffers; dims moment of ``live.moments``, column."""
    ranks, moments = columns.ranks, len(live.moments)
    parts = [cost.parts.of(*value) for value in structure.parts.first]
    vectors = {id(vector): vector for vector in parts}
    place = {vector: at for at, vector in enumerate(vectors)}
    of_storage = np.array([place[id(vector)] for vector in parts])[structure.part_of_storage]
    # Storages with equal parts are added up before they are multiplied by their part of each rank.
    into = live.changes * len(vectors) + np.repeat(of_storage, 2)
    nbytes = np.stack([structure.bytes_of_storage, -structure.bytes_of_storage], axis=1)
    changes = np.bincount(into, nbytes.reshape(-1), minlength=(moments + 1) * len(vectors))
    held = np.cumsum(changes.reshape(moments + 1, -1)[:-1], axis=0)
    alive: Floats = held @ np.array(list(vectors.values()))[:, ranks] + _sum(given)[ranks]
    known: dict[object, PerRank] = {}
    own, between = np.zeros_like(alive), np.zeros_like(alive)
    for at, node, row in structure.chunked:
        own[live.under_way[at]] = workspace(node, row, cost)[ranks]
    for at in structure.converts:
        group = program.instructions[slice(*structure.bounds[at])]
        key = structure.moved[at], group[0].implementation if isinstance(group[0], Convert) else ""
        if key not in known:
            found = buffers(group) if buffers else communication_buffers(group, cost)
            known[key] = found[ranks]
        now = live.under_way[at]
        between[now] = np.maximum(between[now], known[key])
    return alive, own, between


class _Columns(NamedTuple):
    """Columns of the memory tables: one for all ranks with equal parts and equal buffers.

    ``ranks``: a rank of each column. ``of_rank``: the column of each rank.
    """

    ranks: Indices
    of_rank: Indices


def _columns(structure: CostStructure, cost: Prices, buffers: Buffers | None) -> _Columns:
    world_size = cost.hardware.cluster.world_size
    if buffers or cost.parts.ring_size < world_size:  # buffers may differ despite equal parts
        return _Columns(np.arange(world_size), np.arange(world_size))
    of = [cost.parts.of(*value) for value in structure.parts.first]
    parts = list({id(vector): vector for vector in of}.values())
    held = np.array([*parts, cost.hardware.chunk]).T
    columns: dict[bytes, int] = {}
    of_rank = [columns.setdefault(row.tobytes(), len(columns)) for row in held]
    ranks = np.unique(of_rank, return_index=True)[1]
    return _Columns(ranks, np.array(of_rank))


def update_bytes(graph: Graph, program: Program, cost: Prices) -> PerRank:
    """Return the bytes that the optimizer's step holds besides parameters, gradients and states.

    On GPUs torch's optimizers update all parameters at once. Adam then holds the square roots of one
    state of all of them, unless it is fused; those with fewer states hold nothing.
    """
    return _update_bytes(_given(graph, structure_of(graph, program, cost), cost), cost)


def _update_bytes(given: Mapping[str, PerRank], cost: Prices) -> PerRank:
    if cost.optimizer_states < _STATES_OF_ADAM or cost.graph.fused_update:
        return np.zeros_like(cost.parts.one)
    one_state: PerRank = given["optimizer states"] / cost.optimizer_states
    return one_state * cost.hardware.on_gpu


def while_updating(graph: Graph, program: Program, cost: Prices) -> dict[str, PerRank]:
    """Return kind -> the bytes that each rank holds in the optimizer's step alone."""
    structure = structure_of(graph, program, cost)
    return _while_updating(structure, cost, _given(graph, structure, cost))


def _while_updating(
    structure: CostStructure, cost: Prices, given: Mapping[str, PerRank]
) -> dict[str, PerRank]:
    found, parts = dict(given), _parts(structure, cost)
    for kind, nbytes in structure.bytes_kept.items():
        found[kind] = found.get(kind, 0.0) + nbytes @ parts
    return {**found, "workspace": _update_bytes(given, cost)}


def _parts(structure: CostStructure, cost: Prices) -> Floats:
    """Return the parts of the classes ``structure.parts``; dims class, rank."""
    parts = [cost.parts.of(*value) for value in structure.parts.first]
    return np.array(parts) if parts else cost.parts.one[None]


def workspace(node: Node, row: Row, cost: Prices) -> PerRank:
    """Return the bytes that a node's kernels hold besides its inputs and outputs."""
    pieces = CHUNKS.get(node.op, 0)
    if not pieces:
        return np.zeros_like(cost.parts.one)
    tensors = cost.graph.tensors
    ins = [(tensors[name], p) for name, p in zip(node.inputs, row.ins, strict=True)]
    logits, placed = max(ins, key=lambda each: each[0].numel)
    part = cost.parts.of(logits.name, placed)
    elements, rows = logits.numel * part, logits.shape[0] * (part if placed.dim == 0 else 1)
    line = np.divide(elements, rows, out=np.zeros_like(elements), where=elements > 0)
    piece = np.minimum(elements, np.maximum(line, cost.hardware.chunk))
    width = max(4, ITEM_BYTES[logits.dtype])
    pieces += width > ITEM_BYTES[logits.dtype]
    found: PerRank = pieces * width * piece
    return found


def communication_buffers(group: Sequence[Instruction], cost: Prices) -> PerRank:
    """Return the bytes of a collective besides its inputs and outputs.

    Padded collectives pass through a tensor of ``world size`` largest parts; fused ones lay
    their tensors end to end before or after (``hap.runtime.collectives``). The results of an
    all-reduce are parts of the tensor that is reduced in place; on CPUs, one in two steps holds the
    parts that a rank receives.
    """
    converts = [s for s in group if isinstance(s, Convert)]
    nothing: PerRank = np.zeros_like(cost.parts.one)
    if not converts or len(converts) < len(group) or converts[0].local:
        return nothing
    kind, how, fused = converts[0].kind, converts[0].implementation, len(converts) > 1
    if kind == "all_reduce" and how == "one shot":
        return nothing

    def total(placed: Callable[[Convert], Placement]) -> PerRank:
        tensors = cost.graph.tensors
        return sum((cost.local_bytes(tensors[c.tensor], placed(c)) for c in converts), nothing)

    whole = total(lambda c: R)
    joined = whole if fused else nothing
    if kind == "all_reduce":
        return whole * (1 - 1 / cost.parts.ring_size) if how == "two step" else joined
    parts = total(lambda c: c.dst if kind == "reduce_scatter" else c.src)
    if kind == "all_to_all":
        return parts + total(lambda c: c.dst) if how == "exact" else whole + _padded(parts, cost)
    if kind == "all_gather":  # the fused output replaces the padded buffer
        return np.maximum(_padded(parts, cost) if how == "padded" else nothing, joined)
    return _padded(parts, cost) if how == "padded" else joined + whole


def _padded(parts: PerRank, cost: Prices) -> PerRank:
    """Return the bytes of a buffer with the largest part of a ring for each of its ranks."""
    size = cost.parts.ring_size
    return np.repeat(parts.reshape(-1, size).max(axis=1) * size, size)
