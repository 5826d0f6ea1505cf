"""Microbatches in flight of each stage, delays of gradients of weights, forwards that run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hap.synthesizer.schedule.pipeline_simulator import StageSeconds, simulate_pipeline
from hap.synthesizer.stages.stage_times import StageFigures

DELAYS = (1, 2, 3, 4, 6, 8)
"""Delays of gradients of weights that are tried, besides none."""

WORTH = 0.999
"""Ratio of steps from which on a delay is taken."""

SLOPES = (1, 2, 3, 4)
"""Multiples of 1F1B's microbatches in flight that are tried."""


def in_flight(stages: int, number: int, count: int) -> int:
    """Return microbatches in flight for an estimate: those that slow links want, one in the last."""
    return min(count, 3 * (stages - number) - 2)


def chosen_flights(
    stages: Sequence[StageSeconds], count: int, most: Sequence[int]
) -> tuple[int, ...]:
    """Return microbatches in flight per stage: the fewest of the fastest found; empty if none fit.

    Args:
        count: microbatches of a step.
        most: that fit each stage's memory. A stage never holds fewer than the next one.
    """
    if min(most) < 1:
        return ()
    limits = [min(count, *most[: number + 1]) for number in range(len(stages))]

    def step_s(flights: Sequence[int]) -> float:
        tried = [replace(s, in_flight=f) for s, f in zip(stages, flights, strict=True)]
        return simulate_pipeline(tried, count).step_s

    # More in flight may be slower: forwards delay the backwards that others wait for.
    candidates = set[tuple[int, ...]]()
    for slope in SLOPES:
        for less in range(slope):
            ahead = [slope * (len(stages) - number) - less for number in range(len(stages))]
            candidates.add(tuple(min(pair) for pair in zip(limits, ahead, strict=True)))
    found = {flights: step_s(flights) for flights in candidates}
    enough_s = min(found.values()) * (1 + 1e-6)
    best = list(min((f for f, s in found.items() if s <= enough_s), key=lambda f: (sum(f), f)))
    for number in range(len(best)):  # the first stages hold the most
        floor = best[number + 1] if number + 1 < len(best) else 1
        while best[number] > floor:
            fewer = [*best[:number], best[number] - 1, *best[number + 1 :]]
            if step_s(fewer) > enough_s:
                break
            best = fewer
    return tuple(best)


def chosen_delays(
    stages: Sequence[StageSeconds], count: int, most: Sequence[int]
) -> tuple[int, ...]:
    """Return the delay of each stage's gradients of weights; 0 for none.

    Args:
        stages: with their microbatches in flight.
        most: the largest delay that fits each stage's memory.
    """

    def step_s(delays: Sequence[int]) -> float:
        tried = [replace(s, delay=d) for s, d in zip(stages, delays, strict=True)]
        return simulate_pipeline(tried, count).step_s

    best = tuple(0 for _ in stages)
    least_s = step_s(best)
    for delay in (d for d in DELAYS if d <= count):
        delays = tuple(
            min(delay, m) if s.weights_s else 0 for s, m in zip(stages, most, strict=True)
        )
        if (found_s := step_s(delays)) < WORTH * least_s:
            best, least_s = delays, found_s
    return best


Arranged = tuple[list[StageFigures], list[StageSeconds]]


def arrange(
    of_stage: Callable[[int, bool], StageFigures],
    seconds: Callable[[Sequence[StageFigures]], list[StageSeconds]],
    memory: Sequence[Sequence[float]], count: int, flights: tuple[int, ...] = (),
) -> Arranged | None:  # fmt: skip
    """Return the fastest arrangement of a pipeline's turns that fits the memory, if one does.

    Stages that lack memory for as many microbatches in flight as would be fastest may run their forwards
    again.

    Args:
        of_stage: (number, whether its forwards run again) -> a stage's figures.
        seconds: the stages' figures -> their seconds.
        memory: bytes of each stage's ranks.
        count: microbatches of a step.
        flights: microbatches in flight to use, whether they fit or not.
    """
    plain = [of_stage(number, False) for number in range(len(memory))]
    if flights:
        return _with(plain, seconds(plain), flights, (0,) * len(memory))
    wanted = chosen_flights(seconds(plain), count, (count,) * len(memory))
    most = [f.most_in_flight(m, count) for f, m in zip(plain, memory, strict=True)]
    short = [k for k, (n, m) in enumerate(zip(wanted, most, strict=True)) if m < n]
    again = [of_stage(k, True) if k in short else f for k, f in enumerate(plain)]
    found = [_arranged(f, seconds(f), memory, count) for f in (plain, *([again] if short else []))]
    fitting = [each for each in found if each is not None]
    return min(fitting, key=lambda a: simulate_pipeline(a[1], count).step_s, default=None)


def _arranged(
    figures: Sequence[StageFigures], times: Sequence[StageSeconds],
    memory: Sequence[Sequence[float]], count: int,
) -> Arranged | None:  # fmt: skip
    most = [f.most_in_flight(m, count) for f, m in zip(figures, memory, strict=True)]
    flights = chosen_flights(times, count, most)
    if not flights:
        return None
    none = (0,) * len(flights)
    found, times = _with(figures, times, flights, none)
    longest = [f.most_delay(m, count) for f, m in zip(found, memory, strict=True)]
    return _with(found, times, flights, chosen_delays(times, count, longest))


def _with(
    figures: Sequence[StageFigures], times: Sequence[StageSeconds], flights: Sequence[int],
    delays: Sequence[int],
) -> Arranged:  # fmt: skip
    return (
        [f.with_in_flight(n, d) for f, n, d in zip(figures, flights, delays, strict=True)],
        [replace(t, in_flight=n, delay=d) for t, n, d in zip(times, flights, delays, strict=True)],
    )
