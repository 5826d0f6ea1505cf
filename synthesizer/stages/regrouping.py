"""Local search of pipelines: stages take devices from each other, split, and change places.

The dynamic program has one pipeline per set of devices and number of stages, the best by a bound of its turns. A
simulation of the turns ranks pipelines otherwise: steps of five models on 16 to 64 devices were up to 15 % shorter with
this search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_estimates import MOST_STAGES, StageEstimates

SIMULATED = 30
"""Most neighbours of a pipeline that are simulated."""

NEAR = 1.05
"""Seconds by the dynamic program up to which a neighbour is simulated, relative to the estimate so far."""

WORTH = 0.999
"""Ratio of estimates from which on a neighbour is taken."""

Vector = tuple[int, ...]
"""Blocks of each kind in a group."""


def regrouped(estimates: StageEstimates, sketch: Sketch) -> Sketch:
    """Return the pipeline at the end of the steepest descent of the estimate, with as many microbatches."""
    blocks, count = estimates.blocks, sketch.microbatches
    vectors = [tuple(v) for v in blocks.vectors.tolist()]
    index = {vector: k for k, vector in enumerate(vectors)}
    best, known = sketch, set[tuple[int, ...]]()
    while True:
        around = neighbours([vectors[g] for g in best.indices], vectors[1:])
        new = {tuple(map(index.__getitem__, groups)) for groups in around} - known
        known |= new
        chains = [chain for groups in sorted(new) if (chain := estimates.chain(count, groups))]
        near = [chain for chain in chains if chain.least_s < NEAR * best.estimate_s]
        first = sorted(near, key=lambda chain: chain.least_s)[:SIMULATED]
        found = [estimates.of_chain(count, chain) for chain in first]
        fitting = (each for each in found if each.lacking <= sketch.lacking)
        least = min(fitting, key=lambda each: each.estimate_s, default=best)
        if least.estimate_s >= WORTH * best.estimate_s:
            return best
        best = least


def neighbours(
    groups: Sequence[Vector], vectors: Sequence[Vector]
) -> Iterator[tuple[Vector, ...]]:  # fmt: skip
    """Yield groups after one move, in order.

    Args:
        groups: of the stages.
        vectors: all nonempty groups; the last one has all blocks.
    """
    for moved in _moves([*groups], vectors):
        kept = tuple(group for group in moved if any(group))
        if 0 < len(kept) <= MOST_STAGES:
            used = (sum(blocks) for blocks in zip(*kept, strict=True))
            if all(n <= most for n, most in zip(used, vectors[-1], strict=True)):
                yield kept


def _moves(groups: list[Vector], vectors: Sequence[Vector]) -> Iterator[list[Vector]]:
    """Yield groups after one move; some may be empty, or use more blocks than there are."""
    for at, group in enumerate(groups):
        before, after = groups[:at], groups[at + 1 :]
        yield [*before, *after]
        for vector in vectors:
            yield [*before, vector, *after]
            yield [*before, vector, group, *after]
            rest = _moved(group, vector, -1)
            if min(rest) >= 0:
                yield [*before, vector, rest, *after]
                for other, taken in enumerate(groups):
                    if other != at:
                        given = [*groups]
                        given[at], given[other] = rest, _moved(taken, vector, 1)
                        yield given
        for other in range(at):
            swapped = [*groups]
            swapped[at], swapped[other] = groups[other], group
            yield swapped
    for vector in vectors:
        yield [*groups, vector]


def _moved(group: Vector, by: Vector, sign: int) -> Vector:
    return tuple(a + sign * b for a, b in zip(group, by, strict=True))
