"""The batch split over time: the program of a step in microbatches, and its shares."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.errors import HapError, InfeasibleError, PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph
from hap.ir.mesh import divide
from hap.ir.microbatch import phases
from hap.ir.microbatch_sizes import even_parts, sized_stages
from hap.ir.placement import Placement, R
from hap.ir.program import Program
from hap.ir.stages import PipelineStages
from hap.ir.widening import widened_later
from hap.synthesizer.axis_roles import batch_axis
from hap.synthesizer.baselines import data_parallel
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
    for allowed in (wide, _on_one_axis(space, wide), usual):
        with contextlib.suppress(PlanError, InfeasibleError):
            return _divided(space, clock, optimizer_states, allowed)
    return _divided(space, clock, optimizer_states, _on_one_axis(space, usual))


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


def _on_one_axis(space: Space, usual: Allowed) -> Allowed:
    """Allow shards along the axis of the batch alone."""
    axis = batch_axis(space)

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        return usual(tensor, p, stored) and (
            not p.sharded or space.axes.of.get((tensor, p.dim)) == axis
        )

    return allowed
