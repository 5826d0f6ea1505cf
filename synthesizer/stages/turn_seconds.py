"""Seconds of a stage's turns: instructions of a microbatch on the streams of the stage's ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hap.ir.graph import Graph
from hap.ir.last_turn import all_after
from hap.ir.pipeline_order import PENDING
from hap.ir.program import Program, Value, reads, writes
from hap.synthesizer.cost.contention import Streams
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.serial_cost import Floats
from hap.synthesizer.schedule.event_simulator import group_seconds

NONE: Floats = np.zeros((2, 1))
"""No seconds of computing, and none of issuing it."""


class TimedGroup(NamedTuple):
    """Instructions from ``first`` to ``end`` that run as one.

    ``messages``: consecutive ones of a collective, whose seconds are those of the slowest rank; 0 if the
    instructions compute.
    """

    first: int
    end: int
    seconds: PerRank
    messages: int


class TimedProgram:
    """A stage's program, and the seconds of its instructions for one microbatch."""

    def __init__(self, graph: Graph, program: Program, cost: CostModel) -> None:
        self.graph, self.program, self._cost = graph, program, cost

    @cached_property
    def groups(self) -> list[TimedGroup]:
        """All groups of the program, in its order."""
        return [
            TimedGroup(a, b, *self._seconds(range(a, b)))
            for a, b in self.program.bounds(self.graph)
        ]

    def _seconds(self, numbers: Collection[int]) -> tuple[PerRank, int]:
        steps = [self.program.instructions[k] for k in numbers]
        return group_seconds(self.graph, steps, self._cost)

    def turn_s(
        self, turn: Collection[int], *, overlap: bool = True, adding: Floats = NONE
    ) -> float:
        """Return the seconds of the instructions of a turn.

        Without collectives it takes as long as all computing, or as all issuing by the host.

        Args:
            overlap: computing waits for a collective where it reads the result, or where :data:`PENDING` later
                ones of the microbatch were issued; otherwise it waits for each at once.
            adding: seconds of computing, and of issuing it, per rank, that follow.
        """
        groups = [*self._of(turn)]
        if not any(messages for _, _, messages in groups):
            host_s = self._cost.hardware.host_s
            took = sum((np.array([s, host_s * (s > 0)]) for _, s, _ in groups), adding)
            return float(np.max(took))
        once = all_after(self.graph, self.program)
        issued: list[int] = []
        streams = Streams(self._cost.hardware, overlap=overlap)
        numbers: dict[Value, int] = {}  # value -> the collective that makes it
        for own, seconds, messages in groups:
            steps = [self.program.instructions[k] for k in own]
            if messages:
                number = streams.issue(float(seconds.max()), messages)
                if not once.issuperset(own):
                    issued.append(number)
                    streams.wait(issued[-1 - PENDING] if len(issued) > PENDING else -1)
                numbers.update(dict.fromkeys(writes(self.graph, steps), number))
            else:
                read = (numbers[v] for v in reads(self.graph, steps) if v in numbers)
                streams.wait(max(read, default=-1))
                streams.compute(seconds)
        streams.drain()
        least_s = float(streams.least_s.max())
        return max(streams.now_s, least_s) + float(np.max(adding[0]))

    def _of(self, turn: Collection[int]) -> Iterator[tuple[list[int], PerRank, int]]:
        """Yield the groups of a turn: numbers of instructions, seconds, messages."""
        for first, end, seconds, messages in self.groups:
            own = [k for k in range(first, end) if k in turn]
            if len(own) == end - first:
                yield own, seconds, messages
            elif own:
                yield own, *self._seconds(own)
