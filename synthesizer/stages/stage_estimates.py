"""Estimate pipelines: groups of devices, cuts and microbatches, before any search of a stage."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean

import numpy as np

from hap.cluster.topology import Cluster
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.message_cost import least_send
from hap.synthesizer.cost.operator_work import product_operations
from hap.synthesizer.device_selection import CLOSE
from hap.synthesizer.schedule.pipeline_simulator import (
    OnceTransfer,
    StageSeconds,
    simulate_pipeline,
)
from hap.synthesizer.stages.cut_places import cut_places
from hap.synthesizer.stages.device_blocks import DeviceBlocks, Ranks, shape
from hap.synthesizer.stages.flights import in_flight
from hap.synthesizer.stages.group_reduction import GroupReduction
from hap.synthesizer.stages.segment_costs import (
    BACKWARD,
    FORWARD,
    ONCE,
    Floats,
    SegmentCosts,
    estimated,
    optimistic,
    segment_costs,
    together_s,
)
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_dp import Boundaries, Chain, ChainSearch
from hap.synthesizer.stages.stage_transfers import even_send_s
from hap.synthesizer.stages.time_axis import OverTime

MICROBATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
QUICK = 8
"""Most microbatches in a quick estimate."""

FAR = 1.6
"""Ratio of numbers of microbatches from which on one does not replace the other."""

MOST_STAGES = 8

MANY_ROWS = 16
"""Rows of a microbatch per device above which whole rows are as good as any parts of them."""

INSIDE = 1.05
"""Most that a group inside one machine is estimated to take over one device of the sum of its speeds."""

MOVED = 2
"""Most places by which a cut moves at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Count:
    """The searches for one number of microbatches."""

    costs: SegmentCosts
    optimistic: ChainSearch
    between: Boundaries
    excess: Floats
    """Seconds of a microbatch on each group, by those of one device of the sum of its speeds."""


class StageEstimates:
    """Estimates pipelines of a step on a cluster, and bounds them from below.

    Args:
        states: tensors of a parameter's size in the optimizer's state.
        keep: ranks that each pipeline must use.
        quick: whether one number of microbatches is enough.
    """

    def __init__(
        self, over_time: OverTime, cluster: Cluster, states: int,
        keep: frozenset[int] = frozenset(), *, quick: bool = False,
    ) -> None:  # fmt: skip
        self._quick = quick
        self._over_time, self._cluster, self._states, self._keep = over_time, cluster, states, keep
        self.blocks = DeviceBlocks(cluster, keep)
        self._sketched: dict[int, list[Sketch]] = {}
        self._searches: dict[int, ChainSearch] = {}
        self._reduction = GroupReduction(cluster, self.blocks)
        self._over = defaultdict[int, list[float]](list)
        self._fuller: dict[int, float] = {}
        self._sent: dict[tuple[Ranks, Ranks], tuple[float, float]] = {}
        self._memory = np.array([d.memory_bytes for d in cluster.devices], dtype=np.float64)
        firsts = [kind.ranks[0] for kind in self.blocks.kinds]
        self._hardware = HardwareModel(cluster, product_operations(over_time.graph))
        self._firsts, self._speed = firsts, self._hardware.speed[firsts]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The numbers of microbatches that are tried: where none near one divides the batch, it too."""
        time = self._over_time
        even = [m for m in MICROBATCHES if time.shares(m) and time.divides(m)]
        found = tuple(
            m for m in MICROBATCHES
            if m in even or (time.shares(m) and not any(m < FAR * e < FAR**2 * m for e in even))
        )  # fmt: skip
        return tuple(m for m in found if m <= QUICK)[-1:] if self._quick else found

    @cached_property
    def pipelines_s(self) -> float:
        """Seconds below which no pipeline of two or more stages is."""
        stages = range(2, MOST_STAGES + 1)
        return min(
            (each.optimistic.least_s(s) for each in self._counts.values() for s in stages),
            default=np.inf,
        )

    def one_groups(self) -> Iterator[tuple[float, Ranks]]:
        """Yield seconds below which no program without stages is, per set of devices, and the set.

        All sets are covered, whatever the blocks, but of alike ones one comes. The seconds do not fall:
        they count computing alone, which takes no less without a device. They hold for any number of
        microbatches.
        """
        costs, cluster, known = self._costs(1), self._cluster, set[object]()
        kinds = cluster.types()
        kind = {r: (k, cluster.devices[r].node) for k, ranks in enumerate(kinds) for r in ranks}
        queue, fewer = list[tuple[float, Ranks]](), [tuple(range(cluster.world_size))]
        while queue or fewer:
            if fewer:
                each = [np.bincount([kind[r][0] for r in s], minlength=len(kinds)) for s in fewer]
                least = optimistic(costs, self._speed, np.array(each))(0).all_s[-1]
                for k, ranks in enumerate(fewer):
                    heapq.heappush(queue, (float(least[k]), ranks))
            least_s, ranks = heapq.heappop(queue)
            yield least_s, ranks
            last = {kind[r]: r for r in ranks}.values()
            without = [tuple(r for r in ranks if r != out) for out in last if len(ranks) > 1]
            new = {shape(cluster, s, kind): s for s in without}
            fewer = [s for key, s in new.items() if key not in known]
            known |= new.keys()

    def one_stage(self, ranks: Ranks) -> Iterator[Sketch]:
        """Yield the step as one stage in microbatches that may fit some devices, the fewest first.

        Activations are as the devices' speeds, and what is stored as their memory.
        """
        memory = self._memory[list(ranks)]
        speed = self._hardware.speed[list(ranks)]
        for count in self.counts:
            part = self._over_time.part(count)
            trained = part.least_bytes(1) - part.least_bytes(0)
            stored = part.least_bytes(self._states + 1) - max(part.saved_bytes, trained)
            held = part.saved_bytes * speed / speed.sum() + stored * memory / memory.sum()
            if (held <= memory).all():
                yield Sketch(
                    groups=(ranks,), cuts=(), microbatches=count, estimate_s=math.inf, least_s=0.0
                )

    def least_s(self, count: int, places: Sequence[int], groups: Sequence[int]) -> float:
        """Return seconds below which no pipeline of these cuts and groups is, given by index."""
        return self._counts[count].optimistic.of(places, groups)

    @property
    def covers(self) -> str:
        """What :attr:`pipelines_s` is a bound of, for people."""
        kinds = self.blocks.kinds
        sizes = sorted({len(part) for kind in kinds for part in kind.parts})
        uneven = any(len({*map(len, kind.parts)}) > 1 for kind in kinds)
        some = f"any of {sum(kind.blocks for kind in kinds)} blocks" if uneven else "any blocks"
        shown = " or ".join(map(str, sizes))
        blocks = "any devices" if sizes == [1] else f"{some} of {shown} alike devices"
        counts = ", ".join(map(str, self.counts))
        return (
            f"2 to {MOST_STAGES} stages of {blocks} with any programs, {len(self.places)} cuts, "
            f"{counts} microbatches, any number in flight"
        )

    def sketches(self, below_s: float = np.inf) -> Iterator[Sketch]:
        """Yield estimated pipelines that may take less than ``below_s``, none twice."""
        for count in self.counts:
            if count not in self._sketched:
                self._sketched[count] = list(self._sketches(count))
            yield from (s for s in self._sketched[count] if s.least_s < below_s)

    def _sketches(self, count: int) -> Iterator[Sketch]:
        search = self._search(count)
        for stages in range(1, MOST_STAGES + 1):
            for chain in {(c.places, c.groups): c for c in search.chains(stages)}.values():
                if self._keeps(chain.groups):
                    yield self.of_chain(count, chain)

    def _search(self, count: int) -> ChainSearch:
        """Return the search by usual costs, as far as these were learnt."""
        if count not in self._searches:
            each = self._counts[count]
            usual = estimated(each.costs, self.blocks.devices, each.excess, self._reduction.seconds)
            self._searches[count] = ChainSearch(
                len(self.places) + 1, self.blocks, usual, each.between, MOST_STAGES
            )
        return self._searches[count]

    def _keeps(self, groups: Sequence[int]) -> bool:
        return self._keep <= {r for ranks in self.blocks.ranks(groups) for r in ranks}

    def chain(self, count: int, groups: Sequence[int]) -> Chain | None:
        """Return the cuts that are best for given groups; ``None`` if there are too few cuts, or ranks to keep are left out."""
        return self._search(count).on_groups(groups) if self._keeps(groups) else None

    def of_chain(self, count: int, chain: Chain) -> Sketch:
        """Return the estimate of a pipeline by its simulation."""
        each, groups = self._counts[count], self.blocks.ranks(chain.groups)
        least_s = each.optimistic.of(chain.places, chain.groups)
        return self._sketch(count, each, chain, groups, least_s)

    @cached_property
    def _counts(self) -> dict[int, _Count]:
        found = {}
        for count in self.counts:
            costs = self._costs(count)
            both = np.stack([costs.forward_bytes, costs.backward_bytes])[
                :, : len(self.places), None
            ]
            least_s, usual_s = (
                np.where(both > 0, start + both * rate, 0.0) for start, rate in self._sending
            )
            once = Boundaries(
                microbatches=count, forward_s=least_s[0], backward_s=least_s[1], round_s=least_s[0]
            )
            between = Boundaries(
                microbatches=count, forward_s=usual_s[0], backward_s=usual_s[1],
                round_s=np.add(*usual_s),
            )  # fmt: skip
            segments = len(self.places) + 1
            devices = self.blocks.devices
            least = optimistic(costs, self._speed, devices)
            found[count] = _Count(
                costs=costs,
                optimistic=ChainSearch(segments, self.blocks, least, once, MOST_STAGES),
                between=between, excess=self._rounding(costs, count),
            )  # fmt: skip
        return found

    def learn(self, sketch: Sketch, each_s: Sequence[float], step_s: float) -> None:
        """Correct later estimates by the prediction of a pipeline.

        Args:
            each_s: seconds of a microbatch on each stage.
            step_s: of the pipeline. What the stages do not explain corrects :meth:`expected_s`:
                messages, and reductions beside computing, depend on the number of microbatches.
        """
        count = sketch.microbatches
        ideal_s = np.bincount(sketch.indices, sketch.ideal_s)
        found_s = np.bincount(sketch.indices, each_s)
        for group in {*sketch.indices}:
            over = found_s[group] / max(ideal_s[group], 1e-15)
            self._counts[count].excess[group] = max(1.0, over)
        same = self._changed(sketch, [*map(self.places.index, sketch.cuts)], range(len(each_s)))
        self._over[count].append(step_s / same.estimate_s)
        self._sketched.pop(count, None)
        self._searches.pop(count, None)

    def learn_fill(self, sketch: Sketch, number: int, fill: float) -> None:
        """Correct estimates of memory by the part of it that a stage which does not fit needs at least."""
        if sketch.fills:
            group, ratio = sketch.indices[number], fill / sketch.fills[number]
            self._fuller[group] = min(ratio, self._fuller.get(group, ratio))

    def overfull(self, sketch: Sketch) -> bool:
        """Return whether a stage does not fit by what was learnt of its group."""
        each = zip(sketch.indices, sketch.fills, strict=True)
        return any(fill * self._fuller.get(group, 0.0) > 1 for group, fill in each)

    def expected_s(self, sketch: Sketch) -> float:
        """Return the estimate, corrected by predictions, if there are any with as many microbatches by those."""
        every = [ratio for each in self._over.values() for ratio in each]
        return sketch.estimate_s * geometric_mean(
            self._over.get(sketch.microbatches, every) or [1.0]
        )

    def recut(self, sketch: Sketch) -> Sketch:
        """Move single cuts of a pipeline while that lowers its estimate.

        The search balances stages by their groups' usual sizes and by a bound; an estimate simulates
        the microbatches on the devices that the groups really have.
        """
        best = replace(sketch, estimate_s=math.inf)  # made anew, by what was learnt since
        chosen, tried = [*map(self.places.index, sketch.cuts)], set[tuple[int, ...]]()
        while True:
            near = {
                tuple(sorted({*chosen[:k], place + step, *chosen[k + 1 :]}))
                for k, place in enumerate(chosen) for step in range(-MOVED, MOVED + 1)
            }  # fmt: skip
            for places in sorted(near - tried):
                if len(places) == len(chosen) and places[0] >= 0 and places[-1] < len(self.places):
                    found = self._changed(sketch, places, range(len(sketch.groups)))
                    best = min(best, found, key=lambda s: (s.lacking, s.estimate_s))
            tried |= near
            moved = [*map(self.places.index, best.cuts)]
            if moved == chosen:
                return best
            chosen = moved

    def other_counts(self, sketch: Sketch) -> list[Sketch]:
        """Return the pipeline with the next smaller and the next larger number of microbatches."""
        number = self.counts.index(sketch.microbatches)
        near = (*self.counts[max(number - 1, 0) : number], *self.counts[number + 1 : number + 2])
        places, stages = [*map(self.places.index, sketch.cuts)], range(len(sketch.groups))
        return [self._changed(replace(sketch, microbatches=n), places, stages) for n in near]

    def without_stage(self, sketch: Sketch) -> list[Sketch]:
        """Return the pipelines without one of the stages, whose operators a neighbour runs.

        Only those that are about as fast by the estimate; first the one with the fewest devices.
        """
        chosen, stages = [*map(self.places.index, sketch.cuts)], range(len(sketch.groups))
        same = self._changed(sketch, chosen, stages)
        found = [
            self._changed(sketch, [*chosen[:cut], *chosen[cut + 1 :]], [k for k in stages if k != out])
            for out in stages if len(stages) > 1 and not self._keep & {*sketch.groups[out]}
            for cut in (out - 1, out) if 0 <= cut < len(chosen)
        ]  # fmt: skip
        close = [
            f for f in found
            if f.estimate_s <= CLOSE * same.estimate_s and f.lacking <= same.lacking
        ]  # fmt: skip
        return sorted(close, key=lambda f: (sum(map(len, f.groups)), f.estimate_s))

    def _changed(self, sketch: Sketch, places: Sequence[int], stages: Sequence[int]) -> Sketch:
        """Return a pipeline of other cuts, on the groups of some of the stages."""
        each = self._counts[sketch.microbatches]
        indices = tuple(sketch.indices[k] for k in stages)
        least_s = each.optimistic.of(places, indices)
        chain = Chain(places=tuple(places), groups=indices, least_s=least_s)
        groups = tuple(sketch.groups[k] for k in stages)
        return self._sketch(sketch.microbatches, each, chain, groups, least_s)

    def _rounding(self, costs: SegmentCosts, count: int) -> Floats:
        """Return how much longer groups take if each device gets whole rows of a microbatch."""
        rows = math.ceil(max(self._over_time.program.used_axes().values()) / count)
        alone = costs.work_s[0, :2].sum(axis=(0, 1))
        excess = np.ones(len(self.blocks.vectors))
        if rows > MANY_ROWS * self._cluster.world_size:
            return excess
        for group, devices in enumerate(self.blocks.devices[1:], start=1):
            here = devices > 0
            turns = np.unique(np.outer(np.arange(1, rows + 1), alone[here] / rows))
            done = np.floor(turns[:, None] * rows / alone[here] + 1e-9) @ devices[here]
            excess[group] = turns[np.argmax(done >= rows)] * (devices[here] / alone[here]).sum()
            (ranks,) = self.blocks.ranks([group])
            if len({self._cluster.devices[r].node for r in ranks}) == 1:
                excess[group] = min(excess[group], INSIDE)
        return excess

    def even_cuts(self, stages: int) -> tuple[str, ...]:
        """Return the cuts by which stages have about equal work; empty if there are too few places."""
        work = np.cumsum(self._costs(1).work_s[0].sum(axis=0)[:, 0])
        ends = work[-1] * np.arange(1, stages) / stages
        found = [int(np.abs(work[:-1] - end).argmin()) for end in ends] if self.places else []
        return tuple(self.places[k] for k in found) if len(set(found)) == stages - 1 else ()

    def _costs(self, count: int) -> SegmentCosts:
        part = self._over_time.part(count)
        return segment_costs(
            part, self.places, self._cluster, self._firsts, self._speed, count, self._states
        )

    @cached_property
    def places(self) -> tuple[str, ...]:
        """:func:`cut_places` of the step."""
        return cut_places(self._over_time.whole())

    def _sketch(
        self, count: int, each: _Count, chain: Chain, groups: tuple[Ranks, ...], least_s: float
    ) -> Sketch:  # fmt: skip
        starts = [0, *(p + 1 for p in chain.places)]
        ends = [*(p + 1 for p in chain.places), len(self.places) + 1]
        costs, stages, fills, ideal = each.costs, [], [], []
        for number, (first, last, group) in enumerate(zip(starts, ends, chain.groups, strict=True)):
            devices = self.blocks.counts(groups[number])
            work_s = costs.work_s[:, :, first:last].sum(axis=2)
            sides = together_s(work_s, devices[None])[:, 0].tolist()
            ideal.append(sides[FORWARD] + sides[BACKWARD])
            excess = each.excess[group]
            there = back = 0.0
            if number + 1 < len(groups):
                pair = groups[number], groups[number + 1]
                there = self._send_s(*pair, float(costs.forward_bytes[last - 1]))
                back = self._send_s(*pair[::-1], float(costs.backward_bytes[last - 1]))
            nbytes = float(costs.parameter_bytes[first:last].sum())
            before_s, after_s = self._reduction.of(groups[number], nbytes)
            flight = in_flight(len(groups), number, count)
            stages.append(
                StageSeconds(
                    forward_s=sides[FORWARD] * excess, backward_s=sides[BACKWARD] * excess,
                    send_s=there, return_s=back, before_s=before_s, after_s=sides[ONCE] + after_s,
                    awaits=tuple(self._awaits(costs, chain.places, groups, number)), in_flight=flight,
                )
            )  # fmt: skip
            held = costs.stored_bytes[first:last].sum() + costs.saved_bytes[first:last].sum()
            fills.append(float(held / self._memory[list(groups[number])].sum()))
        return Sketch(
            groups=groups, cuts=tuple(self.places[p] for p in chain.places), microbatches=count,
            estimate_s=simulate_pipeline(stages, count).step_s, least_s=least_s,
            fills=tuple(fills), indices=chain.groups, ideal_s=tuple(ideal),
        )  # fmt: skip

    def _awaits(
        self, costs: SegmentCosts, places: tuple[int, ...], groups: tuple[Ranks, ...], number: int
    ) -> Iterator[OnceTransfer]:
        """Yield what a stage gets once per step: a weight of the first stage that has one, or its gradients."""
        stages = range(len(groups))
        for side, every in enumerate(costs.once_bytes):
            # What crosses before a stage and not behind it ends there.
            crossing = [0.0, *every[list(places)].tolist(), 0.0]
            owner = next((k for k in stages if crossing[k + 1]), 0)
            for end in stages:
                src, dst = (end, owner) if side else (owner, end)
                nbytes = crossing[end] - crossing[end + 1]
                if dst == number and nbytes > 0:
                    seconds = self._send_s(groups[src], groups[dst], nbytes)
                    yield OnceTransfer(src, seconds, backward=bool(side))

    @cached_property
    def _sending(self) -> tuple[tuple[float, Floats], tuple[float, Floats]]:
        """The start, and seconds per byte from each group: those of a bound, and usual ones."""
        cluster = self._cluster
        start, fastest = least_send(cluster)
        least = fastest / np.maximum(self.blocks.devices.sum(axis=1), 1)
        usual = least.copy()
        for group in range(1, len(usual)):
            (ranks,) = self.blocks.ranks([group])
            nodes = {cluster.devices[r].node for r in ranks}
            if len(cluster.nodes) > 1 and len(ranks) >= len(cluster.ranks(min(nodes))):
                usual[group] = 1 / (len(nodes) * cluster.inter.bandwidth_bytes_per_s)
        return (start, least), (start, usual)

    def _send_s(self, src: Ranks, dst: Ranks, nbytes: float) -> float:
        """Return the seconds of sending a tensor from a group to another, in equal rows."""
        if (src, dst) not in self._sent:
            none_s, all_s = (even_send_s(self._cluster, src, dst, b) for b in (0.0, 1e9))
            self._sent[src, dst] = none_s, (all_s - none_s) / 1e9
        start, rate = self._sent[src, dst]
        return start + nbytes * rate
