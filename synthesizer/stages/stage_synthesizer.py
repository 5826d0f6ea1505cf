"""The search of one stage's program and shares on its group of devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hap.cluster.topology import Cluster
from hap.ir.axes import Axes, Axis, Shares
from hap.ir.graph import Graph
from hap.ir.microbatch import Phase, is_sum, phases
from hap.ir.program import Program
from hap.ir.weight_gathers import forward_gathers
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.operator_work import product_operations
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.share_solver import solve_shares
from hap.synthesizer.shares.storage_sharding import program_axes
from hap.synthesizer.stages.device_blocks import Ranks
from hap.synthesizer.stages.gradient_buckets import in_buckets
from hap.synthesizer.stages.overlapped_turns import overlapped
from hap.synthesizer.stages.stage_memory import stage_bytes
from hap.synthesizer.stages.stage_times import SumsOverTime, stage_cost
from hap.synthesizer.synthesize import Synthesizer

_ANY_BYTES = 2**60

ROUNDS = 3
"""Most solutions of shares for a program that lacks memory."""


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """A stage that is searched on some ranks.

    Attributes:
        whole: the stage for the whole batch; its conversions take as long as those of all microbatches.
        part: the stage for one of ``count`` microbatches.
        in_flight: microbatches whose inputs must fit the memory, if the stage recomputes its forward.
    """

    whole: Graph
    part: Graph
    ranks: Ranks
    count: int
    in_flight: int

    @cached_property
    def space(self) -> Space:
        """The space of the whole batch, whose axes have the units of a microbatch.

        Tensors of a microbatch that are as large as those of the whole batch, such as the terms of
        a weight's gradient, are converted once per microbatch. Several devices receive a tensor in shards
        if it has any: they gather it over their own links, and no row crosses a boundary twice.
        """
        space = build_space(self.whole)
        units = {name: axis.units for name, axis in space.axes.axes.items()}
        for (tensor, dim), name in space.axes.of.items():
            units[name] = math.gcd(units[name], self.part.tensors[tensor].shape[dim])
        axes = {name: Axis(name=name, units=blocks) for name, blocks in units.items()}
        tensors = self.part.tensors
        of_node, whole = phases(self.part), self.whole.tensors
        returned = {o.tensor for o in self.part.outputs if o.role == "returned"}
        repeated = {
            o: self.count
            for node in self.part.nodes
            if of_node[node.name] is Phase.PART
            for o in node.outputs
            if o
            and tensors[o].shape == whole[o].shape
            and (o not in returned or self.part.consumers[o])
        }
        at_once = {
            name: tensors[name].numel / whole[name].numel
            for name in self.whole.saved
            if tensors[name].numel < whole[name].numel
        }
        summed = frozenset(o for n in self.whole.nodes if is_sum(n) for o in n.outputs if o)
        sources = dict(space.sources)
        if len(self.ranks) > 1:
            for i in self.whole.role("received"):
                sources[i.tensor] = space.sources[i.tensor][:1]
        return replace(
            space, axes=Axes(axes=axes, of=space.axes.of), repeated=repeated, sources=sources,
            at_once=at_once, summed=summed,
        )  # fmt: skip


class StageSynthesizer(Synthesizer):
    """Searches a stage on its group of devices; its sums over time are free."""

    def __init__(
        self, task: StageTask, cluster: Cluster, optimizer_states: int,
        allowed: Allowed | None = None,
    ) -> None:  # fmt: skip
        # The activations of the whole batch are never in memory at once.
        roomy = tuple(replace(d, memory_bytes=_ANY_BYTES) for d in cluster.devices)
        hardware = HardwareModel(replace(cluster, devices=roomy), product_operations(task.whole))
        super().__init__(task.space, cluster, optimizer_states, allowed, hardware=hardware)
        self._crossing = SumsOverTime()
        self._task = task
        self._lacks: dict[Candidate, PerRank] = {}

    def chosen(self, *, in_order: bool = True) -> tuple[Program, Shares]:
        """Return the program and shares of a microbatch.

        Args:
            in_order: order the instructions so that collectives overlap computing.

        Raises:
            HapError: the allowed placements admit no program.
        """
        return self.in_order(self.pair) if in_order else of_microbatch(self.pair)

    @cached_property
    def pair(self) -> Candidate:
        """The program and shares of the whole batch, within the memory of microbatches if some were found.

        Raises:
            HapError: the allowed placements admit no program.
        """
        pair = self.search(next(self.starts()))
        if self.cluster.world_size > 1:
            pair = self.search(self.balance(pair))
            pair = min((pair, self.judge(pair.program, self.balance(pair))), key=self._objective)
            pair = self._within_memory(pair)
        return pair

    @property
    def fill(self) -> float:
        """The part of its memory that the fullest rank needs with one microbatch in flight, whose forward runs again."""
        program, cost = self._priced_part(self.pair)
        return float((self._held(program, cost, in_flight=1) / self._memory).max())

    def _within_memory(self, pair: Candidate) -> Candidate:
        """Return the program with shares by which ranks lack less memory, if some lack any.

        Shares are solved for the step of the whole batch. Its room on a rank is that of the microbatches, scaled by
        what either holds there.
        """
        for _ in range(ROUNDS):
            if not self._lacking(pair).any():
                break
            room = self._memory * pair.serial.peak_bytes / self._held(*self._priced_part(pair))
            devices = tuple(
                replace(d, memory_bytes=int(b))
                for d, b in zip(self.cluster.devices, room, strict=True)
            )
            hardware = HardwareModel(
                replace(self.cluster, devices=devices), product_operations(self._task.whole)
            )
            axes, program = program_axes(self.space.axes, pair.program), pair.program
            found = solve_shares(
                self.space.graph, axes, program, hardware, self._states, pair.shares
            )
            tried = self.judge(program, found.shares)
            if self._objective(tried) >= self._objective(pair):
                break
            pair = tried
        return pair

    def in_order(self, pair: Candidate) -> tuple[Program, Shares]:
        """Return the program of a microbatch in an order in which collectives overlap, and the shares.

        It lacks no more memory than in the order of the search.
        """
        part, (program, shares) = self._task.part, of_microbatch(pair)
        cost = stage_cost(part, program, shares, self.hardware, self._states)
        most = self._lacking(pair).max()
        for order in (overlapped(part, program, cost), program):
            tried = in_buckets(part, order, cost)
            if self._lack(tried, cost).max() <= most:
                return tried, shares
        return program, shares

    def _lacking(self, pair: Candidate) -> PerRank:
        if pair not in self._lacks:
            self._lacks[pair] = self._lack(*self._priced_part(pair))
        return self._lacks[pair]

    def _priced_part(self, pair: Candidate) -> tuple[Program, CostModel]:
        """Return the program of a microbatch, with its prices."""
        program, shares = of_microbatch(pair)
        return program, stage_cost(self._task.part, program, shares, self.hardware, self._states)

    def _lack(self, program: Program, cost: CostModel) -> PerRank:
        """Return the bytes that each rank lacks for microbatches whose forwards run again."""
        lacking: PerRank = np.maximum(self._held(program, cost) - self._memory, 0.0)
        return lacking

    def _held(self, program: Program, cost: CostModel, in_flight: int | None = None) -> PerRank:
        task = self._task
        return stage_bytes(
            task.part, program, cost, task.count, in_flight or task.in_flight, recompute=True,
            each=forward_gathers(task.part, program),
        ).peak_bytes  # fmt: skip


def of_microbatch(pair: Candidate) -> tuple[Program, Shares]:
    """Return the program and the shares of a microbatch."""
    return pair.program, {a: pair.shares[a] for a in pair.program.used_axes()}
