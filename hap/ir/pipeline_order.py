"""The order in which a pipeline stage runs its microbatches, shared by runtime and simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

AHEAD = 4
"""Microbatches whose messages a stage awaits at once in each direction, besides the one that runs."""

PENDING = 8
"""Most collectives of a microbatch that are under way while a stage computes, which bounds the memory they hold."""


class Turn(NamedTuple):
    """The forward or the backward of one microbatch, or a later part of the backward.

    ``weights``: the operators of the backward that no other stage waits for, such as the products that
    make gradients of weights.
    """

    microbatch: int
    backward: bool
    weights: bool = False


def turns(microbatches: int, in_flight: int, delay: int = 0) -> Iterator[Turn]:
    """Yield a stage's turns: forwards until ``in_flight`` microbatches wait, then one by one.

    1F1B (PipeDream-Flush, Narayanan et al., ICML 2021) is the case in which ``in_flight`` is the number of
    stages from this one to the last; GPipe is the case in which it is the number of microbatches.

    Args:
        delay: 0, or the gradients of weights of a microbatch have a turn of their own, after the
            backward of ``delay - 1`` more microbatches (Zero Bubble, Qi et al., ICLR 2024).
    """
    ahead = min(in_flight, microbatches)
    yield from (Turn(k, False) for k in range(ahead))
    for k in range(microbatches):
        yield Turn(k, True)
        if delay and k >= delay - 1:
            yield Turn(k - delay + 1, True, weights=True)
        if ahead + k < microbatches:
            yield Turn(ahead + k, False)
    if delay:
        yield from (
            Turn(k, True, weights=True)
            for k in range(max(0, microbatches - delay + 1), microbatches)
        )


def first_turns(
    microbatches: int, in_flight: int, delay: int, stage: int, stages: int
) -> Iterator[Turn]:
    """Yield a stage's turns in the first step on GPUs: those of 1F1B, with the delay of at most one.

    In the first step a host waits for its whole GPU, to load kernels and to measure them. Messages are kernels
    that wait for their other end. If the host waits between any two turns, this order still ends, if
    each receive is posted at its turn; with more microbatches in flight two stages wait for each other.
    """
    return turns(microbatches, min(in_flight, stages - stage), min(delay, 1))


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work of a stage in a simulated step.

    ``part`` is ``forward``, ``backward``, or ``update`` for what runs once per step: the sums of
    gradients over the stage's ranks and the optimizer. ``microbatch`` is -1 for that. ``to`` is the
    stage that gets the result if the work is a transfer, else -1. ``weights``: as in :class:`Turn`.
    """

    stage: int
    microbatch: int
    part: str
    to: int = -1
    weights: bool = False

    def __str__(self) -> str:
        if self.to >= 0:
            what = "activations" if self.part == "forward" else "gradients"
            return f"{what} of microbatch {self.microbatch} to stage {self.to}"
        if self.microbatch < 0:
            return f"{self.part} of stage {self.stage}"
        if self.weights:
            return f"gradients of weights of microbatch {self.microbatch}, stage {self.stage}"
        return f"{self.part} of microbatch {self.microbatch}, stage {self.stage}"
