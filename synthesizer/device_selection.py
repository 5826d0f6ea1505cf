"""Select the devices to leave out: those without which the others are predicted to be faster.

Every rank does the work that a program does not split, and waits for the slowest rank. So a device
may cost more than it saves. Candidates omit the slowest kinds of devices, or those short of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hap.synthesizer.candidate import Candidate, Merit, fastest
from hap.synthesizer.synthesize import Synthesizer, proportional_shares

Ranks = tuple[int, ...]


def best_subset(
    whole: Synthesizer, best: Candidate, progress: Callable[[str], None] = lambda text: None
) -> tuple[Synthesizer, Candidate, Ranks]:
    """(synthesizer of the fastest subset of the cluster, its best pair, the ranks left out).

    A subset is searched only if the whole cluster's program would gain on it, with shares of its own;
    its own best pair must then beat ``best``, the best pair on the whole cluster.
    """
    choice: tuple[Merit, Ranks] = (best.estimated_merit, ())
    for kept in subsets(whole, best):
        choice = min(
            choice, (on_subset(whole, best, kept).estimated_merit, kept), key=lambda c: c[0]
        )
    kept = choice[1]
    if kept:
        left = tuple(r for r in range(whole.cluster.world_size) if r not in kept)
        progress(f"searching without {len(left)} devices that cost more than they bring")
        part = whole.on(whole.cluster.keep(kept))
        found = fastest([part.best(progress), on_subset(whole, best, kept)])
        if found.merit < best.merit:
            return part, found, left
    return whole, best, ()


def subsets(whole: Synthesizer, best: Candidate) -> Iterator[Ranks]:
    """Ranks of candidate subsets: without the slowest kinds, without those short of memory."""
    speed = np.round(whole.machine.speed, 12)
    for least in sorted(set(speed.tolist()))[1:]:
        yield tuple(np.flatnonzero(speed >= least).tolist())
    enough = tuple(np.flatnonzero(best.lacking_bytes == 0).tolist())
    if 0 < len(enough) < len(speed):
        yield enough


def on_subset(whole: Synthesizer, best: Candidate, kept: Ranks) -> Candidate:
    """The whole cluster's program on a subset, by the better of two sets of shares."""
    part = whole.on(whole.cluster.keep(kept))
    shares = proportional_shares(part.space.axes, part.machine.speed)
    pair = part.judge(best.program, part.with_storage(best.program, shares))
    return fastest([pair, part.judge(best.program, part.balance(pair))])
