"""Where a plan turns in a sweep of ``hap what-if``: between which values, and for what.

A turn of the devices in use, or of what fits the memory, is narrowed down by plans between its two
values, until these are close.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hap.cli.terminal import alike
from hap.cli.what_if_changes import DEVICES, NOW

CLOSE = 1.05
"""Ratio of two values between which no further one is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan for one change. Without a plan, ``step_s`` is 0 and ``note`` says why.

    Attributes:
        value: of the swept quantity: rows, bytes per second, or bytes of memory.
        between: was the value asked to narrow a crossover down?
        cost: price of a million samples, in the currency of the cluster file; 0 if it is unknown.
    """

    sweep: str
    change: str
    value: float = 0.0
    between: bool = False
    rows: int = 0
    step_s: float = 0.0
    samples_per_s: float = 0.0
    used: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    program: str = ""
    note: str = ""
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Neighbours of a sweep whose plans differ; ``text`` says how."""

    sweep: str
    before: str
    after: str
    text: str


def narrowed(answers: Sequence[Answer], ask: Callable[[float], Answer], plans: int) -> list[Answer]:
    """The answers of a sweep with those in between that narrow its crossovers down.

    Args:
        plans: most questions for each crossover of ``answers``.
    """
    found = list(answers)
    for _ in range(most_questions(answers, plans)):
        wide = _wide(found)
        if not wide:
            break
        before, after = max(wide, key=lambda pair: pair[1].value / pair[0].value)
        value = roundest(before.value, after.value, whole=before.sweep == "rows")
        found.append(ask(value))
        found.sort(key=lambda a: a.value)
    return found


def most_questions(answers: Sequence[Answer], plans: int) -> int:
    """The most questions by which :func:`narrowed` narrows the crossovers of a sweep down."""
    return plans * len(_wide(answers))


def _wide(answers: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """The neighbours between which the devices or the memory turn, and which are not yet close."""
    return [
        (before, after) for before, after in itertools.pairwise(answers)
        if (before.used, not before.step_s) != (after.used, not after.step_s)
        and after.value > before.value * CLOSE
        and not (before.sweep == "rows" and after.value - before.value <= 1)
    ]  # fmt: skip


def roundest(low: float, high: float, *, whole: bool) -> float:
    """The value with the fewest digits about halfway between two others, by their ratio.

    Args:
        whole: the one with most factors of two, an integer.
    """
    third: float = (high / low) ** (1 / 3)
    if not whole:
        middle = math.sqrt(low * high)
        for digits in range(1, 16):
            value = float(f"{middle:.{digits - 1}e}")
            if low * third <= value <= high / third:
                return value
        return middle
    first, last = max(math.ceil(low * third), round(low) + 1), math.floor(high / third)
    last = max(first, min(last, round(high) - 1))
    for power in range(64, -1, -1):
        unit = 1 << power
        multiple = -(-first // unit) * unit
        if multiple <= last:
            return multiple
    raise AssertionError("an integer is a multiple of one")


def crossovers(answers: Sequence[Answer]) -> list[Crossover]:
    """The neighbours of each sweep whose plans differ."""
    return [
        Crossover(sweep=before.sweep, before=before.change, after=after.change, text=text)
        for before, after in itertools.pairwise(answers)
        if before.sweep == after.sweep and after.sweep not in (NOW, DEVICES)
        for text in _differences(before, after)
    ]


def _differences(before: Answer, after: Answer) -> Iterator[str]:
    if after.step_s and not before.step_s:
        yield f"a plan fits from {after.change} on, none with {before.change}"
    elif before.step_s and not after.step_s:
        yield f"no plan fits from {after.change} on, the last with {before.change}"
    elif before.used != after.used:
        yield _devices(before, after)
    elif before.program != after.program:
        yield (
            f"between {before.change} and {after.change} the collectives change, "
            f"{before.program} -> {after.program}"
        )


def _devices(before: Answer, after: Answer) -> str:
    old, new = _counts(before.used), _counts(after.used)
    more = _shown(new - old, old, before.left_out, after.left_out)
    fewer = _shown(old - new, new, after.left_out, before.left_out)
    if more and not fewer:
        return f"{more} pay off from {after.change} on, not with {before.change}"
    if fewer and not more:
        return f"{fewer} no longer pay off from {after.change} on, but with {before.change}"
    return f"{more} pay off instead of {fewer} from {after.change} on, not with {before.change}"


def _counts(used: Sequence[str]) -> Counter[str]:
    pairs = (text.split("x", 1) for text in used)
    return Counter({kind: int(count) for count, kind in pairs})


def _shown(
    counts: Counter[str], others: Counter[str], out: Sequence[str], still_out: Sequence[str]
) -> str:
    """Devices as text: ``8 P100``, or by name ``2 more cpu, slow-*:0 (2x),`` beside others alike."""
    text = " and ".join(
        f"{count} {'more ' if kind in others else ''}{kind}" for kind, count in counts.items()
    )
    names = alike([name for name in out if name not in still_out])
    return (
        f"{text}, {', '.join(names)}," if names and not counts.keys().isdisjoint(others) else text
    )
