"""Dynamic programming over (cut, devices left): the least seconds of pipelines of segments on groups.

A pipeline's step is at least, for each stage, the chain of the first microbatch through the stages before
it, and all microbatches in the stage, or over its links:

    least(first, devices) = min over (next, group) of
        max(all_s(first..next, group), links_s(first, next, group),
            each_s(first..next, group) + transfers + least(next, rest))

A stage sends one transfer at a time, to either side, and receives one. All microbatches may be in flight,
so this holds for any numbers in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hap.synthesizer.stages.device_blocks import DeviceBlocks
from hap.synthesizer.stages.segment_costs import Floats, GroupSeconds, Priced


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Seconds of a transfer of one microbatch at each place of a cut, dims [place, group].

    Attributes:
        forward_s, backward_s: over the links of a group that sends or receives it.
        round_s: between a stage and the next one, in the chain of the first microbatch.
    """

    microbatches: int
    forward_s: Floats
    backward_s: Floats
    round_s: Floats

    def links_s(self, first: int) -> Floats:
        """Return the seconds of the transfers over the links of a stage from segment ``first`` on.

        They count from the arrival of the first microbatch. Dims are [place after the stage, group]; the
        last entry is of the last stage.
        """
        none = np.zeros_like(self.forward_s[:1])
        there, back = (np.vstack([s, none]) for s in (self.forward_s, self.backward_s))
        count = self.microbatches
        sent, received = count * there[first:], count * back[first:]
        if first:
            sent = sent + count * back[first - 1]
            received = received + (count - 1) * there[first - 1]
        found: Floats = np.maximum(sent, received)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A pipeline by indices: the last place of each stage but the last, and each stage's group."""

    places: tuple[int, ...]
    groups: tuple[int, ...]
    least_s: float


class ChainSearch:
    """The least seconds of all pipelines of up to ``most`` stages."""

    def __init__(
        self, segments: int, blocks: DeviceBlocks, priced: Priced, boundaries: Boundaries, most: int
    ) -> None:
        self._segments, self._blocks, self._boundaries = segments, blocks, boundaries
        self._priced = [priced(first) for first in range(segments)]
        self._links = [boundaries.links_s(first) for first in range(segments)]
        groups = len(blocks.vectors)
        self._least = np.full((most + 1, segments + 1, groups), np.inf)
        """Dims [stages, first segment, devices]."""
        for first in range(segments - 1, -1, -1):
            for stages in range(1, most + 1):
                found = self._options(stages, first).min(axis=0)
                self._least[stages, first, 1:] = np.minimum.reduceat(found, blocks.starts)

    def _options(self, stages: int, first: int) -> Floats:
        """Return the seconds of each next place and pair: dims [last segment, pair]."""
        blocks, seconds = self._blocks, self._priced[first]
        taken, rest = blocks.taken, blocks.rest
        busy = np.maximum(seconds.all_s, self._links[first])
        if stages == 1:
            return busy[-1:, taken]
        last = self._segments - 1
        if first == last:
            return np.full((1, len(taken)), np.inf)
        later = self._least[stages - 1, first + 1 : last + 1][:, rest]
        around = self._boundaries.round_s[first:last][:, taken]
        chain = seconds.each_s[:-1][:, taken] + around + later
        found: Floats = np.maximum(busy[:-1][:, taken], chain)
        return found

    def least_s(self, stages: int) -> float:
        """Return the least seconds of a pipeline of so many stages on any devices."""
        return float(self._least[stages, 0].min())

    def chains(self, stages: int) -> Iterator[Chain]:
        """Yield the best pipeline of exactly all devices of each set, if there is one."""
        for devices in range(1, len(self._blocks.vectors)):
            least_s = float(self._least[stages, 0, devices])
            if np.isfinite(least_s):
                yield self._traced(stages, devices, least_s)

    def _traced(self, stages: int, devices: int, least_s: float) -> Chain:
        places, groups, first = [], [], 0
        for left in range(stages, 0, -1):
            options = self._options(left, first)
            pairs = np.flatnonzero(self._blocks.whole == devices)
            own = options[:, pairs]
            row, column = np.unravel_index(int(own.argmin()), own.shape)
            pair = pairs[column]
            groups.append(int(self._blocks.taken[pair]))
            devices = int(self._blocks.rest[pair])
            if left > 1:
                places.append(first + int(row))
                first += int(row) + 1
        return Chain(places=tuple(places), groups=tuple(groups), least_s=least_s)

    @cached_property
    def _stages(self) -> tuple[Floats, Floats]:
        """Seconds of a stage that is busy, and of the chain up to the next one: dims [group, first, last segment]."""
        shape = len(self._blocks.vectors), self._segments, self._segments
        busy, chain = np.full(shape, np.inf), np.full(shape, np.inf)
        for first, seconds in enumerate(self._priced):
            busy[:, first, first:] = np.maximum(seconds.all_s, self._links[first]).T
            around = seconds.each_s[:-1] + self._boundaries.round_s[first : self._segments - 1]
            chain[:, first, first:-1] = around.T
        return busy, chain

    def on_groups(self, groups: Sequence[int]) -> Chain | None:
        """Return the best pipeline on these groups in this order, if there are enough cuts."""
        busy, chain = self._stages
        least, choices = busy[groups[-1], :, -1], list[npt.NDArray[np.intp]]()
        for group in reversed(groups[:-1]):
            options = np.maximum(busy[group, :, :-1], chain[group, :, :-1] + least[1:])
            choices.append(options.argmin(axis=1))
            least = options.min(axis=1)
        if not np.isfinite(least[0]):
            return None
        places, first = [], 0
        for choice in reversed(choices):
            places.append(int(choice[first]))
            first = places[-1] + 1
        return Chain(places=tuple(places), groups=tuple(groups), least_s=float(least[0]))

    def of(self, places: Sequence[int], groups: Sequence[int]) -> float:
        """Return the least seconds of one pipeline."""
        starts = [0, *(p + 1 for p in places)]
        ends = [*places, self._segments - 1]
        later = -np.inf
        for k in range(len(groups) - 1, -1, -1):
            seconds: GroupSeconds = self._priced[starts[k]]
            at = ends[k] - starts[k], groups[k]
            own = float(max(seconds.all_s[at], self._links[starts[k]][at]))
            if k < len(groups) - 1:
                place = places[k], groups[k]
                chain = float(seconds.each_s[at] + self._boundaries.round_s[place]) + later
                own = max(own, chain)
            later = own
        return float(later)
