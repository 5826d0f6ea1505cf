"""The batch split over time: the program of a step in microbatches, and its shares."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.errors import HapError, InfeasibleError, NoProgramError, PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.mesh import divide
from hap.ir.microbatch import phases
from hap.ir.microbatch_sizes import even_parts, sized_stages
from hap.ir.placement import P, Placement, R
from hap.ir.program import Program
from hap.ir.stages import PipelineStages, repeatable
from hap.ir.widening import widened_later
from hap.synthesizer.axis_roles import batch_axes, batch_axis
from hap.synthesizer.baselines import data_parallel, on_axis
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.synthesize import Synthesizer

PLACES = 2
"""Microbatches for which the program is searched; it is the same for any number."""

_SUMMED_S = 1000.0
"""Seconds that a link over time takes for all parameters: the program sums only what it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """The program over the axis of time; a place of it is a microbatch."""

    graph: Graph
    program: Program
    _parts: dict[int, Graph] = field(default_factory=dict, repr=False, compare=False)
    """By number of microbatches; 0: the whole batch."""

    def shares(self, microbatches: int) -> Shares | None:
        """Return shares of every axis, as equal as they can be; ``None`` if some would be empty."""
        units = self.program.used_axes()
        if any(n < microbatches for n in units.values()):
            return None
        return {name: even_parts(n, microbatches) for name, n in units.items()}

    def divides(self, microbatches: int) -> bool:
        """Return whether microbatches are equally large."""
        return not any(n % microbatches for n in self.program.used_axes().values())

    def part(self, microbatches: int) -> Graph:
        """Return the step of the first, largest microbatch."""
        if microbatches not in self._parts:
            shares = self.shares(microbatches)
            assert shares is not None
            self._parts[microbatches] = divide(self.graph, self.program, shares, 0)
        return self._parts[microbatches]

    def whole(self, microbatches: int = 1) -> Graph:
        """Return the step of a microbatch with the sizes of the batch, if all were as large as the first."""
        if 0 not in self._parts:
            shares = {name: (n, 0) for name, n in self.program.used_axes().items()}
            self._parts[0] = divide(self.graph, self.program, shares)
        found = self._parts[0]
        if self.divides(microbatches):
            return found
        part = self.part(microbatches).tensors
        tensors = {
            name: replace(tensor, shape=tuple(
                whole if own == whole else own * microbatches
                for own, whole in zip(part[name].shape, tensor.shape, strict=True)
            ))
            for name, tensor in found.tensors.items()
        }  # fmt: skip
        return replace(found, tensors=tensors)

    def runs(self, stages: PipelineStages, microbatches: int) -> bool:
        """Return whether stages, with shares of the first microbatch, can run all microbatches."""
        shares = self.shares(microbatches)
        assert shares is not None
        if self.divides(microbatches):
            return True
        try:
            sized_stages(self.graph, self.program, shares, stages)
        except PlanError:
            return False
        return True


def over_time(space: Space, cluster: Cluster, optimizer_states: int) -> OverTime:
    """Return the program that runs a step in microbatches.

    Raises:
        HapError: the step can't be run in parts; the message says why.
    """
    device = replace(cluster.devices[0], memory_bytes=2**60)
    places = tuple(replace(device, name=f"time:{k}", node="time") for k in range(PLACES))
    graph = space.graph
    nbytes = sum(graph.tensors[i.tensor].nbytes for i in graph.role("parameter"))
    slow = Link(max(nbytes, 1) / _SUMMED_S, 1e-3)
    clock = Cluster(name="time", devices=places, intra={"time": slow}, inter=slow)
    usual = data_parallel(space)
    wide = _wide_sums(space, usual)
    # Gradients in half precision are cheaper to reduce in shards, which needs them between parts: hence the
    # programs on one axis. Some models have no program whose sums are all behind their casts.
    found: HapError | None = None
    for allowed in (
        wide, _on_one_axis(space, wide), usual, _on_one_axis(space, usual), *_with_whole_inputs(space)
    ):  # fmt: skip
        try:
            return _divided(space, clock, optimizer_states, allowed)
        except (PlanError, InfeasibleError, NoProgramError) as error:
            found = found or error
    assert found is not None
    raise found


def _divided(space: Space, clock: Cluster, states: int, allowed: Allowed) -> OverTime:
    search = Synthesizer(space, clock, states, allowed)
    pair = search.cheapest(next(search.starts()))
    found = OverTime(graph=space.graph, program=pair.program)
    if not found.program.used_axes():
        raise HapError("no operator of the step can be split along the batch")
    phases(found.whole())
    return found


def _wide_sums(space: Space, usual: Allowed) -> Allowed:
    """Forbid sums over the microbatches of what is cast to a wider dtype afterwards.

    So autocast's gradients are added up in the parameter's dtype, as PyTorch accumulates them.
    """
    narrow = widened_later(space.graph)

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        return usual(tensor, p, stored) and not (p == R and tensor in narrow)

    return allowed


def _with_whole_inputs(space: Space) -> Iterator[Allowed]:
    """Split what depends on one axis of the batch; all else runs once per step, on whole inputs.

    Images whose features replace tokens of a text have an axis of their own: which features a microbatch's
    text needs is known at run time alone. Their gradients are summed over the microbatches.
    """
    cheap = repeatable(space.graph)
    free = {o for n in space.graph.nodes if n.name in cheap for o in n.outputs if o}
    free.update(i.tensor for i in space.graph.role("input"))
    for axis in _by_work(space):
        with contextlib.suppress(HapError):  # a tensor with two dims on the axis
            yield from _split_on(space, axis, free)


def _split_on(space: Space, axis: str, free: Collection[str]) -> Iterator[Allowed]:
    split, once = on_axis(space, axis), _of_whole_inputs(space, axis)
    wide = _wide_sums(space, lambda tensor, p, stored: True)

    def usual(tensor: str, p: Placement, stored: bool) -> bool:
        if p.sharded:
            return space.axes.of.get((tensor, p.dim)) == axis
        return not (p == P and tensor in once) and (tensor in free or split(tensor, p, stored))

    yield lambda *given: usual(*given) and (given[0] in once or wide(*given))
    yield usual


def _by_work(space: Space) -> list[str]:
    """Return the axes of dim 0 of the inputs, first those along which most operations can be split."""
    graph, work = space.graph, dict.fromkeys(sorted(filter(None, batch_axes(space))), 0.0)
    of: dict[str, set[str]] = {}
    for (tensor, _), name in space.axes.of.items():
        of.setdefault(tensor, set()).add(name)
    for node in graph.nodes:
        for name in work.keys() & {a for o in node.outputs if o for a in of.get(o, ())}:
            work[name] += node_work(node, graph).flops
    return sorted(work, key=lambda name: -work[name])


def _of_whole_inputs(space: Space, axis: str) -> frozenset[str]:
    """Return the tensors of what runs once per step: their operators read no tensor with a dim on the axis."""
    graph = space.graph
    split = {tensor for (tensor, _), name in space.axes.of.items() if name == axis}
    found = {i.tensor for i in graph.role("input") if i.tensor not in split}
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs) and split.isdisjoint(node.inputs):
            found.update(o for o in node.outputs if o and o not in split)
    return frozenset(found)


def _on_one_axis(space: Space, usual: Allowed) -> Allowed:
    """Allow shards along the axis of the batch alone."""
    axis = batch_axis(space)

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        return usual(tensor, p, stored) and (
            not p.sharded or space.axes.of.get((tensor, p.dim)) == axis
        )

    return allowed
