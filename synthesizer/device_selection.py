"""Select the devices to leave out: those without which the others are predicted to be faster.

A program is one for all ranks: what it does not split, every rank does, and all wait for the
slowest. So a device can cost more than it brings, whatever its shares. Tried are the clusters
that lack the slowest kinds of devices, or those whose memory does not suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hap.synthesizer.candidate import Candidate, Merit, fastest
from hap.synthesizer.synthesize import Synthesizer, spread

Ranks = tuple[int, ...]


def best_part(
    whole: Synthesizer, best: Candidate, progress: Callable[[str], None] = lambda text: None
) -> tuple[Synthesizer, Candidate, Ranks]:
    """(the synthesizer of the part of the cluster that is fastest, its best pair, who is left out).

    A part is searched only if the whole cluster's program would gain on it, with shares of its
    own; its own best pair must then beat the given one, or everyone stays.

    Args:
        best: the best pair on the whole cluster.
    """
    choice: tuple[Merit, Ranks] = (best.estimate, ())
    for kept in parts(whole, best):
        choice = min(choice, (transplanted(whole, best, kept).estimate, kept), key=lambda c: c[0])
    kept = choice[1]
    if kept:
        left = tuple(r for r in range(whole.cluster.world_size) if r not in kept)
        progress(f"searching without {len(left)} devices that cost more than they bring")
        part = whole.on(whole.cluster.keep(kept))
        found = fastest([part.best(progress), transplanted(whole, best, kept)])
        if found.rank < best.rank:
            return part, found, left
    return whole, best, ()


def parts(whole: Synthesizer, best: Candidate) -> Iterator[Ranks]:
    """Ranks of the parts worth a look: without the slowest kinds, without those short of memory."""
    speed = np.round(whole.machine.speed, 12)
    for least in sorted(set(speed.tolist()))[1:]:
        yield tuple(np.flatnonzero(speed >= least).tolist())
    enough = tuple(np.flatnonzero(best.lacking_bytes == 0).tolist())
    if 0 < len(enough) < len(speed):
        yield enough


def transplanted(whole: Synthesizer, best: Candidate, kept: Ranks) -> Candidate:
    """The whole cluster's program on a part of it, by the better of two sets of shares."""
    part = whole.on(whole.cluster.keep(kept))
    shares = spread(part.space.axes, part.machine.speed)
    pair = part.judge(best.program, part.with_storage(best.program, shares))
    return fastest([pair, part.judge(best.program, part.balance(pair))])
