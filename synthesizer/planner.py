"""The planner: runs the searches in order and returns the best candidate.

The order: one mesh axis, baselines, fewer devices, two mesh axes, lower bounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hap.background import BackgroundTask, Caller, Result, background_task
from hap.cluster.topology import Cluster
from hap.errors import HapError, InputError, PlanningStopped, TooEntangledError
from hap.ir.mesh import is_mesh
from hap.ir.prediction import Alternative, Prediction
from hap.synthesizer.baselines import METHODS, baselines
from hap.synthesizer.candidate import Candidate, Objective, fastest
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.mesh_cost import Between
from hap.synthesizer.device_selection import (
    PartTask,
    Ranks,
    Selection,
    fastest_kind_task,
    on_one_device,
    select_devices,
    without_slowest,
)
from hap.synthesizer.memory_refusal import check_memory
from hap.synthesizer.pins import pinned, read_pins
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.plan_prediction import alternatives, bounds, predict
from hap.synthesizer.search.engines import bound, eliminate, engine_named
from hap.synthesizer.search.program_space import NARROW, Space, build_space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.share_alignment import aligned
from hap.synthesizer.stages.even_pipeline import even_pipeline, no_pipeline
from hap.synthesizer.stages.stage_prediction import predict_pipeline, stage_bound
from hap.synthesizer.stages.stage_search import Pipeline, StageSearch
from hap.synthesizer.synthesize import Synthesizer
from hap.synthesizer.two_axes import MeshCandidate, best_on_mesh
from hap.synthesizer.two_axes_task import TwoAxesTask, two_axes_task
from hap.units import format_seconds

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPair:
    """The best pair.

    ``pair`` is over ``cluster``, the given one without the ranks ``left`` out. With a program
    ``between`` machines ``pair`` is the one inside, and ``cost`` prices it. A ``pipeline`` replaces
    ``pair``. ``stopped`` says what ended the search early; such a pair has no lower bounds.
    ``free_s``: seconds of the first program on all devices, whatever memory it needs, or of the first one that
    fits the fastest kind, if that is faster.
    """

    cluster: Cluster
    left: Ranks
    pair: Candidate
    between: Between | None
    pipeline: Pipeline | None = None
    cost: CostModel
    prediction: Prediction
    stopped: str = ""
    free_s: float = float("inf")


def choose_in_space(
    whole: Space, cluster: Cluster, states: int, options: PlanOptions, progress: Progress,
    synthesizer: Synthesizer | None = None,
) -> PlannedPair:  # fmt: skip
    """The best pair of the whole space, or of a narrower one if that is too wide to search.

    A narrower space counts if its first program beats that of A* over the whole one, which may be cut short.
    """
    try:
        return choose(whole, cluster, states, options, progress, synthesizer)
    except TooEntangledError:
        by_a_star = first_synthesizer(whole, cluster, states, options, bound)
        beaten = by_a_star.first.estimated_objective
    space, left = whole, NARROW[0]
    for narrow, now in enumerate(NARROW[1:], 1):
        if not by_a_star.gap:
            break
        wider, space = space, build_space(whole.graph, narrow=narrow)
        if space == wider:
            continue
        progress(f"the graph is too entangled to search with {left}; now with {now}")
        left = now
        with contextlib.suppress(TooEntangledError):
            narrower = first_synthesizer(space, cluster, states, options)
            if narrower.first.estimated_objective > beaten:
                break  # even narrower ones are no better
            return choose(space, cluster, states, options, progress, narrower)
    progress("the graph is too entangled for the exact search; now with everything free, by A*")
    return choose(whole, cluster, states, options, progress, by_a_star)


def first_synthesizer(
    space: Space, cluster: Cluster, states: int, options: PlanOptions, engine: Engine | None = None
) -> Synthesizer:
    """The search with an engine, or with the one that ``options`` names.

    If that is the exact one, the tables of the first search must fit; later ones may be cut short.
    """
    allowed = pinned(space, read_pins(space.graph, options.pins)) if options.pins else None
    engine = engine or engine_named(options.engine)
    if engine is not eliminate:
        return Synthesizer(space, cluster, states, allowed, engine)
    return Synthesizer(space, cluster, states, allowed, tables_fit=True)


def choose(
    space: Space, cluster: Cluster, optimizer_states: int, options: PlanOptions,
    progress: Progress = lambda text: None, synthesizer: Synthesizer | None = None,
) -> PlannedPair:  # fmt: skip
    """The fastest pair found that fits, as predicted.

    Args:
        synthesizer: the search to go on with; default: a new one with the engine of ``options``.

    Raises:
        InputError: two mesh axes are asked for where there can't be.
        InfeasibleError: nothing fits; the message says which device lacks how much.
        PlanningStopped: the search was stopped before it had a pair that fits.
    """
    if options.mesh and not is_mesh(cluster):
        raise InputError(
            "the cluster is no mesh: it needs 2 or more nodes with the same number of devices, 2 or more",
            hint="leave out --mesh, to plan over one mesh axis",
        )
    if options.pins and (options.stages or options.mesh):
        other = "--stages" if options.stages else "--mesh"
        raise InputError(f"{other} excludes --pin", hint=f"leave out {other} or --pin")
    synthesizer = synthesizer or first_synthesizer(space, cluster, optimizer_states, options)
    known: list[Selection] = []
    try:
        with contextlib.ExitStack() as stack:
            tasks = _Tasks(stack, synthesizer, optimizer_states, options)
            return _searched(synthesizer, optimizer_states, options, progress, known, tasks)
    except PlanningStopped as stop:
        if options.mesh or not (known or synthesizer.found or synthesizer.early):
            raise
        return so_far(synthesizer, known, stop)


class _Tasks:
    """Work in other processes: the search on the fastest kind, the one over two axes, and bounds.

    ``stack`` ends it.
    """

    def __init__(
        self, stack: contextlib.ExitStack, synthesizer: Synthesizer, optimizer_states: int,
        options: PlanOptions,
    ) -> None:  # fmt: skip
        self._stack, self._synthesizer = stack, synthesizer
        self._states, self._options = optimizer_states, options
        self.part: PartTask | None = None
        if not options.all_devices and not options.mesh:
            keep = options.kept_ranks(synthesizer.cluster)
            self.part = stack.enter_context(fastest_kind_task(synthesizer, keep, self.tell))
        self.two_axes: dict[Cluster, TwoAxesTask] = {}
        self._objective: Objective | None = None
        self.begin_two_axes(synthesizer.cluster)

    def begin_two_axes(self, on: Cluster) -> None:
        """Begin the search over two mesh axes on a cluster, if that will be long."""
        whole, options = self._synthesizer, self._options
        if whole.is_long and options.mesh is None and _mesh_is_searched(whole, on, options):
            search = two_axes_task(whole.space, on, self._states, whole.engine)
            self.two_axes[on] = self._stack.enter_context(search)
            if self._objective:
                self.two_axes[on].tell(self._objective)

    def begin(
        self, work: Callable[[Caller], Result], *, apart: bool, nice: int
    ) -> BackgroundTask[Result]:
        """:func:`hap.background.background_task` until the end of planning."""
        return self._stack.enter_context(background_task(work, apart=apart, nice=nice))

    def tell(self, objective: Objective) -> None:
        """Tell all searches over two axes of a plan."""
        self._objective = min(self._objective or objective, objective)
        for search in self.two_axes.values():
            search.tell(self._objective)


def so_far(
    synthesizer: Synthesizer, known: Sequence[Selection], stop: PlanningStopped
) -> PlannedPair:
    """The best pair of a search that was stopped, without baselines and bounds.

    Raises:
        PlanningStopped: ``stop``, if no pair fits.
    """
    if not known:
        known = [
            Selection(
                synthesizer=synthesizer, pair=fastest([*synthesizer.early, *synthesizer.found])
            )
        ]
    chosen = min(known, key=lambda s: s.pair.objective)
    if not chosen.pair.fits:
        raise stop
    cost = chosen.synthesizer.cost(chosen.pair)
    return PlannedPair(
        cluster=chosen.synthesizer.cluster, left=chosen.left, pair=chosen.pair, between=None,
        cost=cost, prediction=predict(cost.graph, chosen.pair, cost, ()), stopped=str(stop),
    )  # fmt: skip


def _searched(
    synthesizer: Synthesizer, optimizer_states: int, options: PlanOptions, progress: Progress,
    known: list[Selection], tasks: _Tasks,
) -> PlannedPair:  # fmt: skip
    """The best pair of the whole search.

    Args:
        known: gets the pairs that a search which is stopped may return.
        tasks: searches in other processes.
    """
    space, cluster, graph = synthesizer.space, synthesizer.cluster, synthesizer.space.graph
    best = synthesizer.best(progress, tasks.part.rival if tasks.part else None)
    first = [synthesizer.first]
    if tasks.part and tasks.part.first:
        first.append(tasks.part.first.pair)
    free_s = min(pair.estimated_objective[1] for pair in first)
    known.append(Selection(synthesizer=synthesizer, pair=best))
    progress("judging the alternatives")
    beside = baselines(space, cluster, optimizer_states, every=options.compare)
    others = [c for c in beside.values() if isinstance(c, Candidate) and not options.pins]
    best = min([best, *others], key=lambda c: c.objective)
    tasks.tell(best.objective)
    known.append(Selection(synthesizer=synthesizer, pair=best))
    selections = _fewer_devices(synthesizer, best)
    left: Ranks = ()
    if not options.all_devices and not options.mesh:
        on_all = best
        keep = options.kept_ranks(cluster)
        judged = [] if options.pins else list(selections.values())  # on one device all is whole
        chosen = select_devices(
            synthesizer, best, judged, progress, keep, tasks.part, tasks.begin_two_axes
        )
        synthesizer, best, left = chosen.synthesizer, chosen.pair, chosen.left
        known[:] = [chosen]
        if left:
            limits = [", one mesh axis"] if _mesh_is_searched(synthesizer, cluster, options) else []
            limits += [", without stages"] if options.stages else []
            beside = {f"all devices{''.join(limits)}": on_all, **beside}
    if synthesizer.gap:
        progress(f"a search was cut short, at most {synthesizer.gap:.2%} above the optimum")
    fewer = {name: (_named(cluster, s), s.pair) for name, s in selections.items()}
    notes = {method.name: method.note for method in METHODS} if options.compare else {}
    # The bounds of the plan over one axis are computed while the search over two axes goes on.
    one_axis = aligned(synthesizer, best)
    needed = bool(tasks.two_axes) and one_axis.fits
    bounding = tasks.begin(
        lambda caller: bounds(synthesizer, one_axis, options.prove, bool(left)),
        apart=needed,
        nice=15,
    )
    two = _on_two_axes(synthesizer, cluster, optimizer_states, options, best, progress, tasks)
    fastest_pair = two.pair if two else best
    search, why_not = _stage_search(synthesizer, cluster, optimizer_states, options, progress)
    staged = _in_stages(search, fastest_pair, progress) if search else None
    even: tuple[Alternative, ...] = ()
    if options.compare:
        row, pipeline = even_pipeline(search) if search else (no_pipeline(why_not), None)
        even = (row,)
        ours_s = staged.times.step_s if staged else _limit_s(fastest_pair)
        if pipeline and pipeline.fits and pipeline.times.step_s < ours_s:
            staged = pipeline
    if search and staged:
        shown = {"without stages": best, **beside}
        rows = (*alternatives(graph, shown, fewer, notes), *even)
        proof = stage_bound(staged.times.step_s, search)
        return PlannedPair(
            cluster=staged.cluster, left=staged.left, pair=best, between=None, pipeline=staged,
            cost=synthesizer.cost(best), prediction=predict_pipeline(staged, rows, (proof,)),
            free_s=free_s,
        )  # fmt: skip
    if two:
        check_memory(two.pair, two.cost)
        on = two.between.mesh.cluster
        shown = {"one mesh axis": best, **beside}
        rows = (*alternatives(graph, shown, fewer, notes), *even)
        return PlannedPair(
            cluster=on, left=left if on is synthesizer.cluster else (), pair=two.pair,
            between=two.between, cost=two.cost,
            prediction=predict(two.cost.graph, two.pair, two.cost, rows), free_s=free_s,
        )  # fmt: skip
    best, cost = one_axis, synthesizer.cost(one_axis)
    check_memory(best, cost, space)
    rows = (*alternatives(graph, beside, fewer, notes), *even)
    proofs = bounding.result()
    if search:
        proofs = (*proofs, stage_bound(best.timeline.step_s, search))
    return PlannedPair(
        cluster=synthesizer.cluster, left=left, pair=best, between=None, cost=cost,
        prediction=predict(graph, best, cost, rows, proofs), free_s=free_s,
    )  # fmt: skip


def _stage_search(
    synthesizer: Synthesizer, cluster: Cluster, optimizer_states: int, options: PlanOptions,
    progress: Progress,
) -> tuple[StageSearch | None, str]:  # fmt: skip
    """The search for pipelines, or why there is none."""
    if not options.stages:
        return None, "pipelines are planned with --stages"
    progress("searching pipeline stages")
    everyone = range(cluster.world_size)
    keep = frozenset(everyone) if options.all_devices else options.kept_ranks(cluster)
    try:
        search = StageSearch(synthesizer.space, cluster, optimizer_states, keep)
        least_s = search.estimates.pipelines_s
    except HapError as error:
        progress(f"no pipeline: {error.what}")
        return None, error.what
    if np.isfinite(least_s):
        progress(f"no pipeline takes less than {format_seconds(least_s)}")
    return search, ""


def _limit_s(best: Candidate) -> float:
    """The step that a pipeline must beat."""
    return best.timeline.step_s if best.fits else float("inf")


def _in_stages(search: StageSearch, best: Candidate, progress: Progress) -> Pipeline | None:
    """The best pipeline if it is faster than ``best``, or ``best`` does not fit."""
    try:
        return search.best(_limit_s(best), progress)
    except HapError as error:
        progress(f"no pipeline: {error.what}")
        return None


def _fewer_devices(whole: Synthesizer, best: Candidate) -> dict[str, Selection]:
    """The rows with fewer devices that every screen shows."""
    found = {}
    if whole.cluster.world_size > 2:
        found["without the slowest device"] = without_slowest(whole, best)
    if whole.cluster.world_size > 1:
        found["the fastest device alone"] = on_one_device(whole)
    return found


def _named(cluster: Cluster, selection: Selection) -> str:
    """``without old:1``, or ``only new:0``."""
    if selection.devices == 1:
        return f"only {selection.synthesizer.cluster.devices[0].name}"
    return f"without {', '.join(cluster.devices[r].name for r in selection.left)}"


def _mesh_is_searched(synthesizer: Synthesizer, cluster: Cluster, options: PlanOptions) -> bool:
    """Whether two mesh axes are searched on a cluster."""
    if options.mesh is False or options.pins or not is_mesh(cluster):
        return False
    # Inside the machines every search would be cut short again.
    return options.mesh is True or synthesizer.engine is not bound


def _on_two_axes(
    synthesizer: Synthesizer, cluster: Cluster, optimizer_states: int, options: PlanOptions,
    best: Candidate, progress: Progress, tasks: _Tasks,
) -> MeshCandidate | None:  # fmt: skip
    """The best pair over two mesh axes if it is asked for, or faster than ``best``.

    Searched on the whole cluster and on the subset of it that ``synthesizer`` plans for.
    """
    cut_short = options.mesh is None and not options.pins and synthesizer.engine is bound
    if cut_short and is_mesh(cluster):
        progress("two mesh axes are searched only with --mesh: searches would be cut short")
    limit = None if options.mesh else best.objective

    def found_on(part: Cluster) -> MeshCandidate | None:
        if part in tasks.two_axes and limit:
            return tasks.two_axes[part].best(limit, progress)
        return best_on_mesh(
            synthesizer.space, part, optimizer_states, synthesizer.engine, progress,
            lambda: limit, synthesizer.exponent,
        )  # fmt: skip

    parts = [
        part for part in dict.fromkeys([cluster, synthesizer.cluster])
        if _mesh_is_searched(synthesizer, part, options)
    ]  # fmt: skip
    found = [found_on(part) for part in parts]
    two = min((c for c in found if c), key=lambda c: c.pair.objective, default=None)
    if two is None and options.mesh:
        raise InputError(
            "no program over two mesh axes gives every machine a share",
            hint="leave out --mesh, to plan over one mesh axis",
        )
    return two if two and (options.mesh or two.pair.objective < best.objective) else None
