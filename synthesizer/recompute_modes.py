"""Choose how much the backward recomputes: where nothing fits the memory, and where the step gets shorter.

A program that fits without recomputation may have to gather its parameters again and again. A backward
that recomputes cheap operators can leave room for a faster program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hap.background import each
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, NoProgramError, PlanningStopped, TooEntangledError
from hap.ir.graph import Graph
from hap.ir.prediction import Alternative
from hap.ir.regather import backward_alias_of
from hap.synthesizer.accumulation import accumulated, bound
from hap.synthesizer.candidate import Candidate, fastest
from hap.synthesizer.device_selection import fastest_kind
from hap.synthesizer.pins import no_program
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.plan_prediction import alternatives, row_of
from hap.synthesizer.planner import (
    PlannedPair,
    Progress,
    choose_in_space,
    first_synthesizer,
    so_far,
)
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.stages.stage_prediction import predict_pipeline
from hap.synthesizer.synthesize import Synthesizer

WORTH = 0.9
"""Ratio of an optimistic step to the best one so far from which on a mode is not searched."""

NEVER = float("inf")


@dataclass(slots=True, kw_only=True)
class ShortSearch:
    """A short search on some devices: its first program, whatever memory it needs, and one that fits.

    ``fits_s``: :data:`NEVER` if none was found.
    """

    free_s: float
    fits_s: float


@dataclass(slots=True, kw_only=True)
class Trial:
    """A recompute mode, and what is known of it.

    ``alone``: the whole step on one device of each kind. ``synthesizers``: the search on all devices, and the one on
    the fastest kind; ``short`` has what they found at first. ``shown``: the program on all devices.
    """

    mode: str
    graph: Graph
    space: Space
    alone: Sequence[Candidate]
    synthesizers: Sequence[Synthesizer] = ()
    short: list[ShortSearch] = field(default_factory=list)
    shown: Candidate | None = None

    @property
    def free_s(self) -> float:
        return min(r.free_s for r in self.short)

    @property
    def fits_s(self) -> float:
        return min((r.fits_s for r in self.short), default=NEVER)


Found = tuple[Trial, PlannedPair]


def choose_for_model(
    captured: Callable[[str], Graph], modes: Iterable[str], cluster: Cluster,
    optimizer_states: int, options: PlanOptions, progress: Progress = lambda text: None,
) -> tuple[Graph, str, PlannedPair]:  # fmt: skip
    """(graph, recompute mode, best pair) over the recompute modes.

    Short searches choose the mode that is searched in full. Others follow if nothing fits, or if the best
    program would be clearly faster on devices with unlimited memory.

    Args:
        captured: captures the graph of a training step in a recompute mode.
        modes: modes to try one after the other if ``options`` names none; each recomputes more.

    Raises:
        InputError: no program has all placements of ``options.pins``.
        InfeasibleError: nothing fits in any mode.
        PlanningStopped: as of :func:`hap.synthesizer.planner.choose`.
    """
    names = ("", *modes) if options.recompute is None else (options.recompute,)
    every, found, error = list[Trial](), list[Found](), None
    room = sum(d.memory_bytes for d in cluster.devices)

    def possible() -> Iterator[Trial]:
        for trial in _trials(captured, names, cluster, optimizer_states, progress):
            every.append(trial)
            # Stages hold the activations of few microbatches, and recompute by themselves.
            if options.stages or least_bytes(trial.alone) <= room:
                yield trial

    def search(trial: Trial) -> None:
        whole = trial.synthesizers[0] if trial.synthesizers else None
        pair = choose_in_space(trial.space, cluster, optimizer_states, options, progress, whole)
        found.append((trial, pair))

    trials, before = possible(), None
    try:
        known = _by_short_searches(trials, cluster, optimizer_states, options)
        if not options.stages:
            known.sort(key=lambda t: t.fits_s)
        for trial in itertools.chain(known, trials):
            if not found or _may_be_faster(trial, *_best(found), cluster):
                try:
                    search(trial)
                except InfeasibleError as failed:
                    error = error or failed
            if found and (found[-1][1].stopped or not short_of_memory(_best(found)[1])):
                break
        before = _best(found)[0] if found else None
        if in_parts := _accumulated(every, found, cluster, optimizer_states, options, progress):
            found.append(in_parts)
    except NoProgramError as failed:
        if not options.pins:
            raise
        raise no_program(options.pins) from failed
    except PlanningStopped as stop:
        found = found or [*_of_short_searches(every, stop)]
        if not found:
            raise
        best, pair = _best(found)
        found.append((best, replace(pair, stopped=str(stop))))
    if not found and not error:
        search(every[-1])  # says which device lacks how much
    if not found and error:
        raise error
    best, pair = _best(found)
    pair = replace(pair, stopped=found[-1][1].stopped)
    others = [trial for trial in every if trial not in (best, before)]
    rows = [row for trial in others for row in _rows(trial, found, options)]
    shown = replace(pair.prediction, alternatives=(*rows, *pair.prediction.alternatives))
    return best.graph, best.mode, replace(pair, prediction=shown)


def _accumulated(
    every: Sequence[Trial], found: Sequence[Found], cluster: Cluster, states: int,
    options: PlanOptions, progress: Progress,
) -> Found | None:  # fmt: skip
    """Return the step in microbatches, if nothing fits without, or if it is clearly faster where memory is short."""
    if options.pins or options.allow or options.mesh or not options.accumulate:
        return None
    used, limit_s, rows = tuple(range(cluster.world_size)), NEVER, tuple[Alternative, ...]()
    if found:
        trial, pair = _best(found)
        slow = any(s.slow for s in trial.synthesizers)  # each number of microbatches takes minutes
        if slow or pair.pipeline or found[-1][1].stopped or not short_of_memory(pair):
            return None
        used = tuple(r for r in used if r not in pair.left)
        limit_s = WORTH * pair.prediction.step_s
        note = f"recomputing ({trial.mode})" if trial.mode else ""
        row = replace(row_of("without microbatches", pair.prediction), note=note)
        rows = row, *pair.prediction.alternatives
    progress("memory is short: searching microbatches")
    # Under autocast a backward gathers weights again only if it casts them again.
    trials = sorted(every, key=lambda t: -len(backward_alias_of(t.graph)))
    # One mode is enough if something fits: a search in microbatches takes tens of seconds.
    spaces = [t.space for t in (trials[:1] if found else trials)]
    made = accumulated(spaces, cluster, states, options, used, limit_s, progress)
    if made is None:
        return None
    number, pipeline = made
    trial = trials[number]
    whole = first_synthesizer(trial.space, cluster, states, options)
    proof = bound(pipeline, trial.space, states)
    return trial, PlannedPair(
        cluster=pipeline.cluster, left=pipeline.left, pair=whole.first, between=None,
        pipeline=pipeline, cost=whole.cost(whole.first),
        prediction=predict_pipeline(pipeline, rows, (proof,)),
    )  # fmt: skip


def _rows(trial: Trial, found: Sequence[Found], options: PlanOptions) -> Sequence[Alternative]:
    """Return the row of another mode: of its plan, or of its short search."""
    name = f"recomputing ({trial.mode})" if trial.mode else "without recomputation"
    if pairs := [pair for each, pair in found if each is trial]:
        return [row_of(name, pairs[0].prediction)]
    name = f"{name}, without stages" if options.stages else name
    known = {name: trial.shown} if trial.shown else {}
    return alternatives(trial.graph, known, {}, {name: "by a short search"})


def _trials(
    captured: Callable[[str], Graph], names: Sequence[str], cluster: Cluster, states: int,
    progress: Progress,
) -> Iterator[Trial]:  # fmt: skip
    """Yield the modes whose graphs differ."""
    known = set[str]()
    for mode in names:
        if known:
            progress(f"memory is short: recomputing in the backward ({mode})")
        graph = captured(mode)
        if graph.digest not in known:
            known.add(graph.digest)
            progress("applying the sharding rules")
            space = build_space(graph)
            alone = on_each_kind(space, cluster, states)
            yield Trial(mode=mode, graph=graph, space=space, alone=alone)


def _by_short_searches(
    trials: Iterator[Trial], cluster: Cluster, states: int, options: PlanOptions
) -> list[Trial]:
    """Return the modes that may be fastest without stages, in their order.

    Modes after one that takes hardly longer than on devices with unlimited memory are not made.
    """
    tried, best_s = list[Trial](), NEVER
    for trial in trials:
        tried.append(trial)
        if options.recompute is not None:
            break
        whole = first_synthesizer(trial.space, cluster, states, options)
        alone = options.all_devices or options.mesh
        kind = () if alone else fastest_kind(whole, options.kept_ranks(cluster))
        trial.synthesizers = [whole, *([whole.on(cluster.keep(kind))] if kind else [])]
        try:
            if len(tried) == 1 and not whole.first.serial_lacking_bytes.any():
                whole.early.append(whole.first)
                break
            trial.short = each(_short_search, trial.synthesizers, apart=whole.is_long)
        except TooEntangledError:  # it is searched in full if no other mode fits
            break
        trial.shown = whole.first
        if trial.mode:  # without recomputation it may not be worth it
            _price(trial, min(best_s, trial.fits_s))
        best_s = min(best_s, trial.fits_s)
        if trial.free_s >= WORTH * best_s:
            break
    if len(tried) > 1 and not tried[0].mode:
        _price(tried[0], best_s)
    return tried


def _of_short_searches(every: Sequence[Trial], stop: PlanningStopped) -> Iterator[Found]:
    """Yield the modes with programs on all devices that short searches found and that fit."""
    for trial in every:
        for whole in trial.synthesizers[:1]:
            if any(pair.fits for pair in whole.early):
                yield trial, so_far(whole, (), stop)


def _short_search(synthesizer: Synthesizer) -> ShortSearch:
    """Search once, without a price of memory."""
    first = synthesizer.first
    fitting = first
    if first.serial_lacking_bytes.any():
        fitting = synthesizer.judge(first.program, synthesizer.balance(first))
    synthesizer.early += [first, fitting]
    lacking, seconds = fitting.estimated_objective
    return ShortSearch(free_s=first.estimated_objective[1], fits_s=NEVER if lacking else seconds)


def _price(trial: Trial, best_s: float) -> None:
    """Search with prices of memory where no program fits, unless the free one is no faster than ``best_s``."""
    numbers = [
        k for k, found in enumerate(trial.short)
        if found.fits_s == NEVER and found.free_s < WORTH * best_s
    ]  # fmt: skip
    searches = [trial.synthesizers[k] for k in numbers]
    steps = each(_priced_s, searches, apart=trial.synthesizers[0].is_long)
    for k, seconds in zip(numbers, steps, strict=True):
        trial.short[k].fits_s = seconds
    if 0 in numbers:  # in this process
        trial.shown = searches[0].search(next(searches[0].starts()))


def _priced_s(synthesizer: Synthesizer) -> float:
    """Return the seconds of a program that fits, under the first shares or balanced ones."""
    pair = synthesizer.search(next(synthesizer.starts()))
    balanced = synthesizer.judge(pair.program, synthesizer.balance(pair))
    synthesizer.early += [pair, balanced]
    lacking, seconds = fastest([pair, balanced]).estimated_objective
    return NEVER if lacking else seconds


def _best(found: Sequence[Found]) -> Found:
    return min(found, key=lambda f: f[1].prediction.step_s)


def short_of_memory(pair: PlannedPair) -> bool:
    """Return whether the step would be clearly shorter on devices with unlimited memory."""
    return pair.free_s < WORTH * pair.prediction.step_s


def _may_be_faster(trial: Trial, best: Trial, pair: PlannedPair, cluster: Cluster) -> bool:
    """Whether a mode deserves a search in full, beside the best plan so far."""
    step_s = pair.prediction.step_s
    if trial.synthesizers:  # also false for a graph that is too entangled for a short search
        return trial.fits_s < step_s
    return pair.free_s + more_seconds(best, trial, cluster) < WORTH * step_s


def on_each_kind(space: Space, cluster: Cluster, states: int) -> list[Candidate]:
    """The whole step on one device of each kind."""
    first_ranks = [ranks[0] for ranks in cluster.types()]
    return [Synthesizer(space, cluster.only(rank), states).first for rank in first_ranks]


def least_bytes(alone: Sequence[Candidate]) -> float:
    """Bytes that all devices together hold at once under any program: those of one device alone.

    A program on several devices runs the same operators in the same order, and splits tensors or copies
    them.

    Args:
        alone: the result of :func:`on_each_kind`.
    """
    return min(float(pair.serial.peak_bytes.sum()) for pair in alone)


def more_seconds(before: Trial, after: Trial, cluster: Cluster) -> float:
    """Seconds that more recomputation takes at least, if all devices share it ideally."""
    speed = before.space.hardware(cluster).speed
    parts = [speed[ranks[0]] / speed.sum() for ranks in cluster.types()]
    steps = zip(before.alone, after.alone, strict=True)
    more = [b.serial.step_s - a.serial.step_s for a, b in steps]
    return min(float(part) * seconds for part, seconds in zip(parts, more, strict=True))
