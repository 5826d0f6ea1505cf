"""Baselines (DDP, ZeRO, tensor and expert parallelism) as restricted searches.

A baseline searches a smaller space, with the placements and shares of its method. It does not
trade time for memory. docs/baselines.md describes each one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.graph import Graph
from hap.ir.placement import Placement, R, S
from hap.ir.regather import backward_alias_of
from hap.synthesizer.axis_roles import batch_axes, expert_weights, tensor_parallel_axes, weights
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.hap_paper import plan_as_paper
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.synthesize import Synthesizer, proportional_shares

Restriction = Callable[[Space], Allowed]
"""The placements of one method; raises ``HapError`` with the reason if it can't run the model."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train: a name, its source, and the maker of its program.

    ``usual``: planned with every plan; the others on demand, to save time.
    """

    name: str
    note: str
    plan: Callable[[Space, Cluster, int], Candidate]
    usual: bool = False


def restricted(
    restriction: Restriction, narrow: Callable[[Space], Space] = lambda space: space, *,
    even: bool = False,
) -> Callable[[Space, Cluster, int], Candidate]:  # fmt: skip
    """Return the cheapest program within ``restriction``, with shares by speed, or ``even`` ones.

    ``narrow`` removes rows from the space, where placements alone don't define the method.
    """

    def plan(space: Space, cluster: Cluster, optimizer_states: int) -> Candidate:
        part, allowed, hardware = narrow(space), restriction(space), space.hardware(cluster)
        made = Synthesizer(part, cluster, optimizer_states, allowed, hardware=hardware)
        weights = np.ones_like(hardware.speed) if even else hardware.speed
        return made.cheapest(proportional_shares(space.axes, weights))

    return plan


def data_parallel(space: Space) -> Allowed:
    """Split tensors with a batch dim along it; store parameters whole."""
    return _on_batch(space, _whole(space))


def on_axis(space: Space, axis: str) -> Allowed:
    """Split tensors with a dim on one axis of the batch along it; store parameters whole."""
    dims = [dim for dim, name in space.axes.of.items() if name == axis]
    if len(dict(dims)) < len(dims):
        raise HapError("some tensor has several dims along the batch")
    return _split(space, dict(dims), _whole(space))


def _whole(space: Space) -> dict[str, Placement]:
    return {i.tensor: R for i in space.graph.role("parameter")}


def sharded_storage(space: Space) -> Allowed:
    """Data parallel, with parameters stored in shards where possible: ZeRO of any stage."""
    return _on_batch(space, _shards(space))


def _shards(space: Space) -> dict[str, Placement]:
    """Return parameter -> the first dim on which it can be stored in shards, or whole."""
    return {
        i.tensor: next((p for p in space.sources[i.tensor] if p.sharded), R)
        for i in space.graph.role("parameter")
    }


def replicas_kept(space: Space) -> Space:
    """Let the backward read the replicas that the forward gathered: ZeRO, stage 2."""
    return _backward_reads(space, _whole(space))


def gathered_again(space: Space) -> Space:
    """Let the backward gather the stored shards again: ZeRO, stage 3, and FSDP."""
    return _backward_reads(space, _shards(space))


def _backward_reads(space: Space, wanted: Mapping[str, Placement]) -> Space:
    """Return the space in which the backward's aliases of parameters have one placement."""
    rows = dict(space.rows)
    for parameter, twin in backward_alias_of(space.graph).items():
        node = space.graph.producer[twin].name
        rows[node] = tuple(row for row in rows[node] if row.ins == (wanted[parameter],))
    return replace(space, rows=rows)


def _on_batch(space: Space, stored_as: dict[str, Placement]) -> Allowed:
    """Use parameters whole; split all other tensors along the batch where all operators can."""
    return _split(space, _batch_dims(space), stored_as)


def _split(space: Space, split: dict[str, int], stored_as: dict[str, Placement]) -> Allowed:
    """Use parameters whole; split tensors along the given dims where all operators can."""
    options: list[tuple[str | None, Sequence[Placement]]] = [*space.sources.items()]
    for node in space.graph.nodes:
        rows = [(*row.ins, *row.outs) for row in space.rows[node.name]]
        options += zip((*node.inputs, *node.outputs), zip(*rows, strict=True), strict=True)
    for name in {n for n, given in options if n in split and S(split[n]) not in given}:
        del split[name]

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        if tensor in stored_as:
            return p == (stored_as[tensor] if stored else R)
        return p == S(split[tensor]) if tensor in split else True

    return allowed


def expert_parallel(space: Space) -> Allowed:
    """Data parallel, except for experts: each belongs to one rank (GShard, Lepikhin 2020)."""
    experts = expert_weights(space)
    if not experts:
        raise HapError("the model has no experts")
    data, batch = data_parallel(space), _batch_dims(space)
    axes = {space.axes.of[tensor, dim] for tensor, dim in experts.items()}
    tokens = {
        (tensor, dim) for (tensor, dim), name in space.axes.of.items()
        if name in axes and tensor in batch
    }  # fmt: skip
    if not tokens:
        raise HapError("tokens are routed to experts by index, not along a dim of experts")
    gradients = _gradients(space.graph)

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        expert = gradients.get(tensor, tensor)
        if expert in experts:
            return p == S(experts[expert])
        return (p.sharded and (tensor, p.dim) in tokens) or data(tensor, p, stored)

    return allowed


def tensor_parallel(space: Space) -> Allowed:
    """Megatron-LM: weights split by columns, then by rows; every rank reads the whole batch."""
    axes = tensor_parallel_axes(space)
    if not axes:
        raise HapError("no pair of layers can be split by columns and then by rows")
    fixed, known = {t for t, h in space.holdings.items() if h == ((R,),)}, weights(space.graph)
    inputs = {i.tensor for i in space.graph.role("input")}
    gradients = _gradients(space.graph)
    split: dict[str, int] = {}
    for (tensor, dim), name in space.axes.of.items():
        if name in axes:
            split.setdefault(tensor, dim)

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        if tensor in fixed:
            return True
        if stored and tensor in inputs:
            return p == R
        weight = gradients.get(tensor, tensor)
        if weight in known and weight in split:
            return p == S(split[weight])
        return not p.sharded or space.axes.of.get((tensor, p.dim)) in axes

    return allowed


METHODS = (
    Method("data parallel, even", "DDP", restricted(data_parallel, even=True), usual=True),
    Method("data parallel, proportional", "rows by speed", restricted(data_parallel), usual=True),
    Method("ZeRO-2, proportional", "stored in shards, gathered once",
           restricted(sharded_storage, replicas_kept), usual=True),
    Method("ZeRO-3 (FSDP), proportional", "stored in shards, gathered again by the backward",
           restricted(sharded_storage, gathered_again)),
    Method("tensor parallel, even", "Megatron-LM: columns, then rows",
           restricted(tensor_parallel, even=True)),
    Method("expert parallel, even", "GShard: all-to-all to the experts and back",
           restricted(expert_parallel, even=True)),
    Method("HAP 2024", "the paper's space, costs and ratios", plan_as_paper),
)  # fmt: skip
"""The methods in the order of the screen."""


def baselines(
    space: Space, cluster: Cluster, optimizer_states: int, *, every: bool = False
) -> dict[str, Candidate | str]:
    """Return name -> candidate, or the reason why a method can't run; ``every``: all methods."""
    found: dict[str, Candidate | str] = {}
    for method in METHODS:
        if method.usual or every:
            try:
                found[method.name] = method.plan(space, cluster, optimizer_states)
            except HapError as error:
                found[method.name] = error.what
    return found


def _batch_dims(space: Space) -> dict[str, int]:
    """Return tensor -> the dim that counts the batch's rows."""
    axes = batch_axes(space) - {None}
    dims = [dim for dim, name in space.axes.of.items() if name in axes]
    if not axes or (len(axes) > 1 and len(dict(dims)) < len(dims)):
        raise HapError("the inputs have no common batch dim")
    return dict(dims)


def _gradients(graph: Graph) -> dict[str, str]:
    """Return gradient -> its parameter."""
    return {graph.gradients[i.target]: i.tensor for i in graph.role("parameter")
            if i.target in graph.gradients}  # fmt: skip
