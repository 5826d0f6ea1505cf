"""Draw mutated plans, and judge each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutations.judge import judge
from benchmarks.mutations.mutators import MUTATORS, applies, mutate
from benchmarks.mutations.subjects import subjects


class Trial(NamedTuple):
    """One mutated plan; ``number`` and the run's seed reproduce it."""

    number: int
    subject: str
    kind: str
    outcome: str
    why: str


def trials(
    count: int, seed: int, path: Path, limit_s: float, only: int | None = None
) -> Iterator[Trial]:
    """Judge ``count`` mutated plans, subjects and kinds of mutation in turn.

    Args:
        path: the path of the mutated plan files.
        only: judge the mutant of this number alone.
    """
    mutated = list(subjects())
    pairs = [(s, kind) for kind in MUTATORS for s in mutated if applies(s.data, kind)]
    random.Random(seed).shuffle(pairs)
    for number in range(count):
        if only not in (None, number):
            continue
        subject, kind = pairs[number % len(pairs)]
        data = mutate(subject.data, kind, random.Random(f"{seed}/{number}"))
        outcome, why = judge(subject, data, path, limit_s)
        yield Trial(number, subject.name, kind, outcome, why)
