"""Roles of axes, derived from the products that they occur in: batch, experts, tensor-parallel.

A *weight* is a parameter or made of parameters and constants alone. A row that shards a dim of a
weight shows its role: ``column`` (an output feature: the result is sharded), ``contract`` (an input
feature: the result is partial) or ``batch``: an expert (all are sharded, or rows of others are skipped).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hap.ir.graph import Graph, Node
from hap.ir.placement import P, R, S
from hap.synthesizer.cost.operator_work import FLOPS
from hap.synthesizer.rules import Row
from hap.synthesizer.search.program_space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A dim of a weight on ``axis`` has a role in ``node``."""

    node: Node
    weight: str
    axis: str
    role: str


def batch_axes(space: Space) -> set[str | None]:
    """Return the axes of dim 0 of all inputs with dims: several if texts and images have rows each."""
    inputs = (i.tensor for i in space.graph.role("input"))
    return {space.axes.of.get((name, 0)) for name in inputs if space.graph.tensors[name].shape}


def batch_axis(space: Space) -> str | None:
    """Return the axis on which every input with dims can be split along dim 0, if any."""
    names = batch_axes(space)
    return names.pop() if len(names) == 1 else None


def weights(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Return tensor -> its parameters, for tensors made of parameters and constants alone."""
    made: dict[str, frozenset[str]] = {
        i.tensor: frozenset([i.tensor] if i.role == "parameter" else [])
        for i in graph.inputs if i.role in ("parameter", "constant")
    }  # fmt: skip
    for node in graph.nodes:
        if made.keys() >= set(node.inputs):
            roots = frozenset(p for name in node.inputs for p in made[name])
            made.update((o, roots) for o in node.outputs if o)
    return {tensor: roots for tensor, roots in made.items() if roots}


def uses(space: Space) -> tuple[Use, ...]:
    """Return the roles of the dims of all weights in the operators of the forward."""
    graph, known = space.graph, weights(space.graph)
    found = []
    for node in graph.nodes:
        others = [k for k, name in enumerate(node.inputs) if name not in known]
        if node.name in graph.backward or not others:
            continue
        for k, name in enumerate(node.inputs):
            if name not in known:
                continue
            for row in space.rows[node.name]:
                role = _role(row, k, others)
                if role:
                    axis = space.axes.of[name, row.ins[k].dim]
                    found.append(Use(node=node, weight=name, axis=axis, role=role))
    return tuple(found)


def _role(row: Row, weight: int, others: Sequence[int]) -> str:
    if not row.ins[weight].sharded:
        return ""
    if all(row.ins[k] == R for k in others):
        return "batch" if P in row.outs else "column"
    return "contract" if P in row.outs else "batch"


def expert_weights(space: Space) -> Mapping[str, int]:
    """Return weight -> its dim that counts experts: independent products with separate weights."""
    known = weights(space.graph)
    products = [u for u in uses(space) if u.role == "batch" and u.node.op in FLOPS]
    axes = {u.axis for u in products}
    roots = {p for u in products for p in known[u.weight]}
    return {
        tensor: dim
        for tensor, parameters in known.items() if parameters & roots
        for dim in _dims_on(space, tensor, axes)
    }  # fmt: skip


def tensor_parallel_axes(space: Space) -> frozenset[str]:
    """Return the axes that Megatron-LM splits (Shoeybi et al., 2019): every second one on any path.

    Products join an input axis to an output axis. Splitting every second axis makes each weight
    column-parallel or row-parallel, with whole tensors between such pairs. Each connected part of
    the model has two such splits; the result splits more weights, or else begins with columns
    at the data. Axes of the batch, axes that some operator can't read in
    shards, and the second of two axes that one product joins stay whole.
    """
    found = uses(space)
    inputs = {i.tensor for i in space.graph.role("input")}
    experts = {u.axis for u in found if u.role == "batch" and u.node.op in FLOPS}
    given = {name for (tensor, _), name in space.axes.of.items() if tensor in inputs}
    usable = set(space.axes.axes) - experts - given - _unreadable(space)
    joined: dict[str, dict[str, int]] = {}
    for use in found:
        for other in found if use.role == "contract" else ():
            if (other.node, other.weight, other.role) == (use.node, use.weight, "column"):
                size = space.graph.tensors[use.weight].numel
                for a, b in ((use.axis, other.axis), (other.axis, use.axis)):
                    joined.setdefault(a, {})[b] = joined.get(a, {}).get(b, 0) + size
    depth: dict[str, int] = {}
    chosen: set[str] = set()
    for start in sorted(joined, key=lambda name: name not in given):  # stable
        if start in depth:
            continue
        part = _depths(joined, start)
        depth.update(part)
        colours = [
            _apart(joined, [a for a, d in part.items() if d % 2 == odd and a in usable])
            for odd in (1, 0)
        ]
        chosen.update(max(colours, key=lambda axes: sum(sum(joined[a].values()) for a in axes)))
    return frozenset(chosen)


def _depths(joined: Mapping[str, Mapping[str, int]], start: str) -> dict[str, int]:
    """Return axis -> number of products between it and ``start``, for all reachable axes."""
    depth, queue = {start: 0}, [start]
    for axis in queue:
        for near in joined[axis]:
            if near not in depth:
                depth[near] = depth[axis] + 1
                queue.append(near)
    return depth


def _apart(joined: Mapping[str, Mapping[str, int]], axes: Sequence[str]) -> list[str]:
    """Return the axes without those that a product joins to an earlier one, or to themselves."""
    kept: list[str] = []
    for axis in axes:
        if axis not in joined[axis] and not joined[axis].keys() & set(kept):
            kept.append(axis)
    return kept


def _unreadable(space: Space) -> set[str]:
    """Return axes on which some operator can't read a tensor in shards."""
    found = set()
    for tensor, dim in space.axes.of:
        for node in space.graph.consumers[tensor]:
            places = [k for k, name in enumerate(node.inputs) if name == tensor]
            if not any(row.ins[k] == S(dim) for row in space.rows[node.name] for k in places):
                found.add(space.axes.of[tensor, dim])
    return found


def _dims_on(space: Space, tensor: str, axes: set[str]) -> Iterator[int]:
    for dim in range(len(space.graph.tensors[tensor].shape)):
        if space.axes.of.get((tensor, dim)) in axes:
            yield dim
