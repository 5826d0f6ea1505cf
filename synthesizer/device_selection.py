"""Select the devices that a plan uses: any number of each kind, one alone included.

Every rank does the work that a program does not split, and waits for the slowest rank. So a device
may cost more than it saves. Among plans of about equal time, the one with the fewest devices wins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hap.background import BackgroundTask, background_task, each
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.synthesizer.candidate import Candidate, Objective, fastest
from hap.synthesizer.synthesize import Searched, Synthesizer, proportional_shares

Ranks = tuple[int, ...]

CLOSE = 1.01
"""Ratio of steps up to which fewer devices count as no slower."""

FEW = 4
"""Number of devices of one kind up to which each number is a candidate."""

MOST = 4
"""Candidates whose shares are balanced; the others are judged with shares in proportion to speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The best pair on some of the devices, and the synthesizer of that part of the cluster."""

    synthesizer: Synthesizer
    pair: Candidate
    left: Ranks = ()
    """Ranks that are left out."""

    @property
    def devices(self) -> int:
        return self.synthesizer.cluster.world_size


@dataclass(slots=True)
class PartTask:
    """The search on a part of the cluster in another process; ``tell`` hears of its ``first`` pair."""

    synthesizer: Synthesizer
    left: Ranks
    process: BackgroundTask[Searched]
    tell: Callable[[Objective], None]
    first: Selection | None = None

    def rival(self) -> Objective | None:
        """Return the estimated objective of the search's first pair, without waiting for its end."""
        with contextlib.suppress(HapError):  # no program there is no rival
            said = self.process.first()
            here = self.synthesizer
            pair = here.judge(*said) if said else here.search(next(here.starts()))
            self.first = Selection(synthesizer=self.synthesizer, pair=pair, left=self.left)
            self.tell(pair.objective)
        return self.first.pair.estimated_objective if self.first else None

    @property
    def selection(self) -> Selection:
        """Wait for the best pair."""
        pair = self.synthesizer.take(self.process.result())
        return Selection(synthesizer=self.synthesizer, pair=pair, left=self.left)


def fastest_kind(whole: Synthesizer, keep: frozenset[int]) -> Ranks:
    """The devices of the fastest kind; none if these are one or all, or not all of ``keep``."""
    speed = np.round(whole.hardware.speed, 12)
    kept = tuple(np.flatnonzero(speed == speed.max()).tolist())
    return kept if 1 < len(kept) < len(speed) and keep <= {*kept} else ()


@contextlib.contextmanager
def fastest_kind_task(
    whole: Synthesizer, keep: frozenset[int], tell: Callable[[Objective], None]
) -> Iterator[PartTask | None]:
    """Search on the fastest kind of devices, often the best part."""
    if kept := fastest_kind(whole, keep):
        part = whole.on(whole.cluster.keep(kept))
        with background_task(part.searched) as process:
            yield PartTask(part, _others(whole, kept), process, tell)
    else:
        yield None


def select_devices(
    whole: Synthesizer, best: Candidate, known: Sequence[Selection],
    progress: Callable[[str], None] = lambda text: None, keep: frozenset[int] = frozenset(),
    part: PartTask | None = None, promise: Callable[[Cluster], None] = lambda part: None,
) -> Selection:  # fmt: skip
    """The fastest selection of devices.

    The candidates run the whole cluster's program, with shares of their own, and ``part`` the first one
    of its search; the most promising one is searched in full. A subset is skipped if it could not win without any loss.

    Args:
        best: the best pair on the whole cluster.
        known: selections that are judged already, the fastest device alone among them.
        keep: ranks that must not be left out.
        part: a search that has begun.
        promise: is called with the part of the cluster that will be searched in full.
    """
    found = [Selection(synthesizer=whole, pair=best), *known]
    alone = min(found, key=lambda s: s.devices)
    limit_s = min((s.pair.timeline.step_s for s in found if s.pair.fits), default=np.inf)
    rough = [
        on_subset(whole, best, kept)
        for kept in subsets(whole, best)
        if keep <= {*kept} and _least_s(whole, alone, kept) < limit_s
    ]
    few, judged = _fastest_of(rough), {s.left: s for s in known}
    estimated = [judged[s.left] for s in few if s.left in judged]
    estimated += all_balanced([s for s in few if s.left not in judged])
    estimated += [part.first] if part and part.first else []
    promising = _best(estimated, lambda pair: pair.estimated_objective) if estimated else None
    if promising and promising.pair.estimated_objective < best.estimated_objective:
        progress(f"searching without {len(promising.left)} devices that may slow the step down")
        promise(promising.synthesizer.cluster)
        if part and promising.left == part.left:
            searched = part.selection
        else:
            pair = promising.synthesizer.best(progress)
            searched = replace(promising, pair=pair)
        pair = fastest([searched.pair, promising.pair])
        found.append(replace(searched, pair=pair))
    if part:
        part.process.stop()
    return _best([s for s in found if not keep & {*s.left}], lambda pair: pair.objective)


def _fastest_of(rough: Sequence[Selection]) -> list[Selection]:
    """The :data:`MOST` fastest, with an estimate for those alone that may be among them."""
    found: list[tuple[tuple[bool, float], int, Selection]] = []
    full = [_overfull(s) for s in rough]
    least = [(full[k], s.pair.least_objective[1]) for k, s in enumerate(rough)]
    for k in sorted(range(len(rough)), key=least.__getitem__):
        if len(found) == MOST and least[k] > found[-1][0]:
            break
        estimated_s = rough[k].pair.estimated_objective[1]
        found = sorted([*found, ((full[k], estimated_s), k, rough[k])])[:MOST]
    return [selection for *_, selection in found]


def _best(
    found: Sequence[Selection], objective: Callable[[Candidate], tuple[float, float]]
) -> Selection:
    """The one with the fewest devices among those about as fast as the fastest."""
    lacking, step_s = min(objective(s.pair) for s in found)
    close = [
        s for s in found
        if objective(s.pair)[0] == lacking and objective(s.pair)[1] <= step_s * CLOSE
    ]  # fmt: skip
    return min(close, key=lambda s: (s.devices, objective(s.pair)))


def subsets(whole: Synthesizer, best: Candidate) -> Iterator[Ranks]:
    """Ranks of candidate subsets, each once.

    The fastest kinds together, and each kind alone, with each of :func:`_numbers` of the slowest of
    them, machine by machine; one machine of each type; the devices that are not short of memory.
    """
    speed = np.round(whole.hardware.speed, 12)
    cluster, everyone = whole.cluster, tuple(range(whole.cluster.world_size))
    found: dict[Ranks, None] = {}
    faster: Ranks = ()
    for value in sorted(set(speed.tolist()), reverse=True):
        kind = tuple(np.flatnonzero(speed == value).tolist())
        for others in (faster, ()):
            near = {cluster.devices[r].node for r in others}
            order = sorted(kind, key=lambda r: cluster.devices[r].node not in near)
            for number in _numbers(len(order)):
                found[tuple(sorted((*others, *order[:number])))] = None
        faster = (*faster, *kind)
    for ranks in cluster.machine_types():
        found[ranks] = None
    found[tuple(np.flatnonzero(best.lacking_bytes == 0).tolist())] = None
    yield from (kept for kept in found if 1 < len(kept) < len(everyone))


def _numbers(count: int) -> list[int]:
    """Numbers of devices of a kind of ``count``: the small ones, and halves of halves of it."""
    halves = [count >> k for k in range(count.bit_length())]
    return sorted({*halves, *range(1, min(count, FEW) + 1)}, reverse=True)


def on_subset(whole: Synthesizer, best: Candidate, kept: Ranks) -> Selection:
    """The whole cluster's program on a subset, with shares in proportion to speed."""
    part = whole.on(whole.cluster.keep(kept))
    shares = proportional_shares(part.space.axes, part.hardware.speed)
    pair = part.judge(best.program, part.with_storage(best.program, shares))
    return Selection(synthesizer=part, pair=pair, left=_others(whole, kept))


def all_balanced(selections: Sequence[Selection]) -> list[Selection]:
    """The same programs and devices with the better of their shares and balanced ones."""
    long = any(s.synthesizer.is_long for s in selections)
    shares = each(lambda s: s.synthesizer.balance(s.pair), selections, apart=long)
    return [
        replace(s, pair=fastest([s.pair, s.synthesizer.judge(s.pair.program, balanced)]))
        for s, balanced in zip(selections, shares, strict=True)
    ]


def _overfull(selection: Selection) -> bool:
    """Does the program exceed the memory of all devices together, whatever the shares?"""
    room = sum(d.memory_bytes for d in selection.synthesizer.cluster.devices)
    return float(selection.pair.serial.peak_bytes.sum()) > room


def on_one_device(whole: Synthesizer) -> Selection:
    """The fastest device alone."""
    rank = int(np.argmax(whole.hardware.speed))
    part = whole.on(whole.cluster.only(rank))
    return Selection(synthesizer=part, pair=part.first, left=_others(whole, (rank,)))


def without_slowest(whole: Synthesizer, best: Candidate) -> Selection:
    """The whole cluster's program without its slowest device, the last of equal ones."""
    slowest = int(np.flatnonzero(whole.hardware.speed == whole.hardware.speed.min())[-1])
    return all_balanced([on_subset(whole, best, _others(whole, (slowest,)))])[0]


def _others(whole: Synthesizer, ranks: Ranks) -> Ranks:
    return tuple(r for r in range(whole.cluster.world_size) if r not in ranks)


def _least_s(whole: Synthesizer, alone: Selection, kept: Ranks) -> float:
    """Seconds of the fastest device's step, divided among a subset without any loss."""
    speed = whole.hardware.speed
    return float(alone.pair.serial.compute_s.max() * speed.max() / speed[list(kept)].sum())
