"""The order in which a pipeline stage runs its microbatches, shared by runtime and simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """The forward or the backward of one microbatch."""

    microbatch: int
    backward: bool


def turns(microbatches: int, in_flight: int) -> Iterator[Turn]:
    """Yield a stage's turns: forwards until ``in_flight`` microbatches wait, then one by one.

    1F1B (PipeDream-Flush, Narayanan et al., ICML 2021) is the case in which ``in_flight`` is the number of
    stages from this one to the last; GPipe is the case in which it is the number of microbatches.
    """
    ahead = min(in_flight, microbatches)
    yield from (Turn(k, False) for k in range(ahead))
    for k in range(microbatches):
        yield Turn(k, True)
        if ahead + k < microbatches:
            yield Turn(ahead + k, False)


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work of a stage in a simulated step.

    ``part`` is ``forward``, ``backward``, or ``update`` for what runs once per step: the sums of
    gradients over the stage's ranks and the optimizer. ``microbatch`` is -1 for that. ``to`` is the
    stage that gets the result if the work is a transfer, else -1.
    """

    stage: int
    microbatch: int
    part: str
    to: int = -1

    def __str__(self) -> str:
        if self.to >= 0:
            what = "activations" if self.part == "forward" else "gradients"
            return f"{what} of microbatch {self.microbatch} to stage {self.to}"
        if self.microbatch < 0:
            return f"{self.part} of stage {self.stage}"
        return f"{self.part} of microbatch {self.microbatch}, stage {self.stage}"
