"""Alternate between the program for given shares and the shares for a given program.

After HAP (EuroSys'24), with an exact search and integer shares, from several starts. If ranks run
out of memory, their bytes get the lowest price at which the program fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hap.background import Caller, background_task, each
from hap.cluster.topology import Cluster
from hap.errors import InputError, NoProgramError, SearchLimitError, TooEntangledError
from hap.ir.axes import Axes, Shares
from hap.ir.placement import Placement, R
from hap.ir.program import Program
from hap.synthesizer.bounds.branching import Branching, busiest_axis
from hap.synthesizer.bounds.lower_bound import (
    AnyShares,
    BoundResult,
    FixedShares,
    Relaxation,
    Relaxed,
)
from hap.synthesizer.candidate import Candidate, Objective, fastest
from hap.synthesizer.cost.cost_model import CostModel, Crossing
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.serial_cost import choose_implementations, simulate
from hap.synthesizer.memory_price import LOWEST_PRICE, MemoryPrice, lowest_fitting
from hap.synthesizer.search.bucket_elimination import TooWide
from hap.synthesizer.search.cost_tables import Allowed, Problem
from hap.synthesizer.search.engines import bound, eliminate_if_fits, eliminate_or_bound
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.search.search_result import Engine
from hap.synthesizer.search.search_result import SearchStatus as Found
from hap.synthesizer.shares.share_solver import proportional, solve_shares
from hap.synthesizer.shares.storage_sharding import filled, program_axes, with_storage_axes

ROUNDS = 4
"""Alternations per start; the second rarely changes anything."""

_SETTLED = 1e-3
"""Relative gain of new shares below which no search under them follows."""

SEARCHES = 3
"""Searches per lower bound; the second finds the weights, the third rarely helps.

Where a search takes seconds, two have to do, and parts of the cluster are not tried.
"""

MANY = 1 << 29
"""Entries of all tables of a search from which on it takes seconds."""

WIDE = 0.05
"""Gap above which shares of a part of the cluster are tried as well."""

FAR = 1.25
"""Ratio of the step on other devices above which more starts are not worth their time: the second one
saved up to 12 % in 11 models of the table of architectures, the bound's programs up to 19 % in one."""

LONG = 300
"""Nodes of a graph from which on another process is worth its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The result of :meth:`Synthesizer.best` in another process, and what that search knows."""

    program: Program
    shares: Shares
    gap: float
    exponent: int | None
    relaxed: Relaxed
    fixed: dict[object, Relaxed]


class Synthesizer:
    """Searches one graph on one cluster.

    Args:
        space: the space of the graph; independent of the cluster.
        optimizer_states: number of tensors of a parameter's size in the optimizer's state.
        allowed: restricts the placements, to plan a baseline by the same search.
        engine: finds the cheapest program under fixed shares.
        exponent: first guess of the price of memory; updated to the last price found.
        hardware: the model of the cluster; default: that of the space.
        tables_fit: whether a first search whose tables are too large raises ``TooEntangledError``.

    ``found`` has the pairs of :meth:`best` while it runs, ``early`` those of searches before it.
    ``is_long``: whether a part of a search is worth another process. ``slow``: whether one takes seconds.
    ``gap`` is the largest excess of a search's cost over its bound: 0 unless an engine was cut short.
    """

    def __init__(
        self, space: Space, cluster: Cluster, optimizer_states: int, allowed: Allowed | None = None,
        engine: Engine = eliminate_or_bound, exponent: int | None = None,
        hardware: HardwareModel | None = None, tables_fit: bool = False,
    ) -> None:  # fmt: skip
        self.space, self.cluster, self._must_fit = space, cluster, tables_fit
        self.hardware = hardware or space.hardware(cluster)
        self._states = optimizer_states
        self.engine, self.gap, self.exponent = engine, 0.0, exponent
        self.is_long = is_long(space)
        self.slow = engine is bound
        self.found: list[Candidate] = []
        self.early: list[Candidate] = []
        self._allowed = allowed if cluster.world_size > 1 else _whole
        self._priced: tuple[tuple[Axes, Shares], CostModel] | None = None  # the last cost model
        self._problem: tuple[Shares, Problem] | None = None  # the last one, unpriced
        self._memory = np.array([d.memory_bytes for d in cluster.devices], dtype=np.float64)
        self._short: MemoryPrice | None = None
        self._entangled: TooEntangledError | None = None
        self._latest: tuple[Shares, Candidate] | None = None  # result of the last search
        self._crossing: Crossing | None = None
        self._fixed: dict[object, Relaxed] = {}

    def on(self, cluster: Cluster) -> Synthesizer:
        """Return the same search on another cluster."""
        return Synthesizer(
            self.space, cluster, self._states, self._allowed, self.engine, self.exponent
        )

    def starts(self) -> Iterator[Shares]:
        """Yield initial shares without repetitions: by speed, even, by memory."""
        seen = []
        for weights in (self.hardware.speed, np.ones_like(self.hardware.speed), self._memory):
            shares = proportional_shares(self.space.axes, weights)
            if shares not in seen:
                seen.append(shares)
                yield shares

    def best(
        self, progress: Callable[[str], None] = lambda text: None,
        rival: Callable[[], Objective | None] | None = None,
    ) -> Candidate:  # fmt: skip
        """Return the best pair over all starts, even if it exceeds the memory.

        The programs behind the lower bounds are starts as well. If the first start is :data:`FAR`
        behind the objective that ``rival`` returns, of other devices, it is the only one.

        Raises:
            HapError: the allowed placements admit no program, or the engine finds none.
        """
        self.found = found = []
        behind = False

        def alternate(shares: Shares, name: str) -> None:
            for round_ in range(ROUNDS):
                progress(f"search from {name}, round {round_ + 1}")
                pair = self.search(shares)
                found.append(pair)
                shares = self.balance(pair)
                found.append(self.judge(pair.program, shares))
                if self.slow or fastest(found) not in found[-2:] or not _moved(pair, found[-1]):
                    break

        starts = self.starts()
        if rival:  # a bound that may be useless would take the core of the rival's search
            alternate(next(starts), "start 1")
            if (beaten := rival()) and not beaten[0]:
                behind = fastest(found).estimated_objective[1] > beaten[1] * FAR
        if not behind:
            with background_task(lambda caller: self.relaxed, apart=self.is_long) as bounding:
                for number, shares in enumerate(starts, 2 if rival else 1):
                    if number == 3 and fastest(found).fits:
                        break  # the start by memory is needed only if memory is short
                    alternate(shares, f"start {number}")
                progress("computing a lower bound of the step")
                self.relaxed = bounding.result()
            self._search_from_bound(alternate)
        whole_fits = self.space.graph.least_bytes(self._states) <= self._memory.min()
        if self._allowed is None and whole_fits:
            found.append(self._undivided(found[0].shares))
        # Bounds have no price of memory: where nothing fits, their programs do not fit either.
        brief = self.slow or behind or self._lacking(fastest(found)).any()
        for _ in range(0 if brief else ROUNDS):
            best = fastest(found)
            under = [self._under(p, best.shares) for p in self.fixed(best.shares).programs]
            if fastest([best, *under]) is best:
                break
            found += under
            better = fastest(under)
            found.append(self.judge(better.program, self.balance(better)))
        self.found = []
        return fastest(found)

    def _search_from_bound(self, alternate: Callable[[Shares, str], None]) -> None:
        """Search from the programs of the lower bound, and from parts of the cluster if it is far."""
        found, best, programs = self.found, fastest(self.found), self.relaxed.programs
        if best.fits:
            programs = tuple(p for p in programs if self._links_s(p) < best.estimated_objective[1])
        under = [self._under(p, best.shares) for p in programs]
        balanced = each(self.balance, under, apart=self.is_long)
        for pair, shares in zip(under, balanced, strict=True):
            found.append(self.judge(pair.program, shares))
            if found[-1] is fastest(found):
                alternate(shares, "the program of the lower bound")
        far = self.relaxed.bound_s < fastest(found).estimated_objective[1] * (1 - WIDE)
        if self.slow or not far:
            return
        if probes := [self.probe(shares) for shares in self.subset_starts()]:
            pair = fastest(probes)
            found += [pair, self.judge(pair.program, self.balance(pair))]
            if fastest(found) in found[-2:]:
                alternate(found[-1].shares, "a part of the cluster")

    def searched(self, caller: Caller) -> Searched:
        """Return the best pair for another process; say the first one that fits before."""
        first = self.search(next(self.starts()))
        caller.tell((first.program, first.shares))
        best = self.best()
        return Searched(
            program=best.program, shares=best.shares, gap=self.gap, exponent=self.exponent,
            relaxed=self.relaxed, fixed=self._fixed,
        )  # fmt: skip

    def take(self, found: Searched) -> Candidate:
        """Return the best pair that the same search found in another process."""
        self.gap, self.exponent = found.gap, found.exponent
        self.relaxed, self._fixed = found.relaxed, found.fixed
        return self.judge(found.program, found.shares)

    def _undivided(self, shares: Shares) -> Candidate:
        """Run the whole step on every device; searches may miss this where starts dominate."""
        return Synthesizer(
            self.space, self.cluster, self._states, _whole, hardware=self.hardware
        ).cheapest(shares)

    def subset_starts(self) -> Iterator[Shares]:
        """Yield shares with everything on one type of devices, or one machine of each kind.

        Parts that cannot keep what the backward needs are left out.
        """
        cluster, least = self.cluster, self.space.graph.saved_bytes
        for ranks in dict.fromkeys([*self.hardware.types, *cluster.machine_types()]):
            if len(ranks) < cluster.world_size and self._memory[list(ranks)].sum() >= least:
                mine = np.isin(np.arange(cluster.world_size), ranks)
                yield proportional_shares(self.space.axes, self.hardware.speed * mine)

    @cached_property
    def _any_shares(self) -> AnyShares:
        return AnyShares(self.space, self.hardware, self._states)

    @cached_property
    def relaxed(self) -> Relaxed:
        """The bound and programs over all shares."""
        # A search in another process must not depend on those of this one.
        return self._bounded(self._any_shares, self.engine is bound)

    def _links_s(self, program: Program) -> float:
        """Return seconds of all collectives that are no more than those under any shares."""
        # Conversions that can be fused pay for parts of a start, alone as well.
        return sum(self._any_shares.convert_group([c])[0].seconds for c in program.collectives)

    def _bounded(
        self, prices: AnyShares | FixedShares, slow: bool, known: Sequence[BoundResult] = ()
    ) -> Relaxed:
        engine = bound if self.engine is bound else eliminate_or_bound
        relaxation = Relaxation(self.space, prices, self._allowed, engine)
        return relaxation.run(prices.proportional, 2 if slow else SEARCHES, known)

    def proved(self, step_s: float, searches: int) -> tuple[float, int]:
        """Return (bound over all programs and shares, total searches) by ``searches`` more ones."""
        relaxed = self.relaxed
        if not relaxed.programs or not searches:
            return relaxed.bound_s, relaxed.searches
        axis = busiest_axis(self.space, self.hardware, self._states, relaxed.programs[-1])
        if axis is None:
            return relaxed.bound_s, relaxed.searches
        branching = Branching(self.space, self.hardware, self._states, self._allowed, relaxed, axis)
        branching.run(searches, step_s)
        return min(branching.bound_s, step_s), relaxed.searches + branching.searches

    def fixed(self, shares: Shares) -> Relaxed:
        """Return bound and programs under given shares of computing; storage shares are free."""
        shares = {name: shares[name] for name in self.space.axes.axes}
        key = tuple(shares.items())
        if key not in self._fixed:
            prices = FixedShares(self.space, self.hardware, shares, self._states)
            latest = [self.relaxed, *self._fixed.values()][-1]
            self._fixed[key] = self._bounded(prices, self.slow, latest.found)
        return self._fixed[key]

    def search(self, shares: Shares, beat: Objective | None = None) -> Candidate:
        """Return the cheapest program under fixed shares that fits the memory, if there is one.

        A price per byte on the ranks that lack memory trades time for memory. After a search that
        lacked memory, the next one starts from its ranks and its price. There is no price if even the
        program without one is not below ``beat``.
        """
        if self._latest and self._latest[0] == shares:
            return self._latest[1]
        self._latest = dict(shares), self._search(shares, beat)
        return self._latest[1]

    def _search(self, shares: Shares, beat: Objective | None) -> Candidate:
        if self._short is None:
            best = self.first if shares == next(self.starts()) else self.cheapest(shares)
            if not (lacking := self._lacking(best)).any():
                return best
            if beat and (0.0, best.least_objective[1]) >= beat:
                return best
            self._short = MemoryPrice.of(best, lacking, self._memory)
        short, found = self._short, list[Candidate]()

        def fits(exponent: int) -> bool:
            found.append(self.cheapest(shares, short.at(exponent)))
            return not self._lacking(found[-1]).any()

        exponent = lowest_fitting(fits, LOWEST_PRICE, short.highest, self.exponent)
        if exponent is not None:
            self.exponent = exponent
        elif self.exponent is None:  # otherwise keep the last price that fitted
            self.exponent = short.highest
        return min(found, key=self._objective)

    def _objective(self, pair: Candidate) -> Objective:
        return float(self._lacking(pair).max()), pair.serial.step_s

    def _lacking(self, pair: Candidate) -> PerRank:
        return pair.serial_lacking_bytes

    @cached_property
    def first(self) -> Candidate:
        """The cheapest program under the first shares, whatever memory it needs."""
        return self.cheapest(next(self.starts()))

    def probe(self, shares: Shares) -> Candidate:
        """The cheapest program under fixed shares and the price of memory that was found last."""
        if self._short is None or self.exponent is None:
            return self.cheapest(shares)
        return self.cheapest(shares, self._short.at(self.exponent))

    def cheapest(self, shares: Shares, price: PerRank | None = None) -> Candidate:
        """Return the cheapest program under fixed shares and prices (seconds per byte, by rank)."""
        if self._entangled:
            raise self._entangled
        alone = self.cluster.world_size == 1
        if self._allowed is _whole and alone in self.space.undivided:
            return self._under(self.space.undivided[alone], shares)
        if self._problem is None or self._problem[0] != shares:
            problem = Problem(self.space, self._cost(None, shares), self._allowed)
            self._problem = dict(shares), problem
        problem = self._problem[1].priced(price)
        too_entangled = TooEntangledError(
            "the graph is too entangled for the exact search",
            hint="search with the engine astar, whose tables are bounded",
        )
        try:
            outcome = problem.outcome(eliminate_if_fits if self._must_fit else self.engine)
        except TooWide as error:
            self._entangled = too_entangled
            raise too_entangled from error
        if self._must_fit and outcome.status is Found.UNKNOWN:
            self._entangled = too_entangled
            raise too_entangled
        self._must_fit = False
        if outcome.status is Found.INFEASIBLE:
            if self._allowed is None:
                raise InputError(
                    "every program takes longer than ten hours a step",
                    hint="check the rates in the cluster file and the size of the batch",
                )
            raise NoProgramError("no program has the required placements")
        if outcome.labelling is None and self._allowed is None:
            self.gap = 1.0
            return self._undivided(shares)
        if outcome.labelling is None:
            raise SearchLimitError("the search found no program before its limit")
        self.slow |= outcome.in_place or outcome.labelling.entries >= MANY
        over = outcome.labelling.cost - outcome.bound
        self.gap = max(self.gap, over / max(outcome.labelling.cost, 1))
        program = problem.program(outcome.labelling)
        if self._allowed is _whole:
            self.space.undivided[alone] = program
        return self._under(program, shares)

    def _under(self, program: Program, shares: Shares) -> Candidate:
        """Return a candidate of a search's program, with storage axes, under computing shares."""
        program = self._apart(program)
        return self.judge(program, self.with_storage(program, shares))

    def _apart(self, program: Program) -> Program:
        """Return the program with storage axes for parameters that no operator reads in shards."""
        return with_storage_axes(self.space.graph, program)

    def with_storage(self, program: Program, shares: Shares) -> Shares:
        """Return the shares with initial shares of the program's storage axes."""

        def price(given: Shares) -> CostModel:
            return self._cost(program, given)

        return {**shares, **filled(self.space.graph, program, price, shares)}

    def balance(self, pair: Candidate) -> Shares:
        """Return the best integer shares for a program; its own shares if no others fit."""
        outcome = solve_shares(
            self.space.graph, program_axes(self.space.axes, pair.program), pair.program,
            self.hardware, self._states, pair.shares,
        )  # fmt: skip
        return outcome.shares if outcome.fits else pair.shares

    def judge(self, program: Program, shares: Shares) -> Candidate:
        """Price a pair: choose implementations again, then simulate."""
        cost = self._cost(program, shares)
        program = choose_implementations(self.space.graph, program, cost)
        return Candidate(
            shares=shares, serial=simulate(self.space.graph, program, cost), room=self._memory,
            price=lambda: self._cost(program, shares),
        )  # fmt: skip

    def _cost(self, program: Program | None, shares: Shares) -> CostModel:
        axes = program_axes(self.space.axes, program) if program else self.space.axes
        if self._priced is None or self._priced[0] != (axes, shares):
            self._priced = (axes, dict(shares)), self._model(axes, shares)
        return self._priced[1]

    def _model(self, axes: Axes, shares: Shares) -> CostModel:
        return CostModel(
            self.space.graph, axes, self.hardware, shares, self._states, crossing=self._crossing
        )

    def cost(self, candidate: Candidate) -> CostModel:
        """Return the cost model under a candidate's shares."""
        return self._cost(candidate.program, candidate.shares)


def is_long(space: Space) -> bool:
    """Return whether a part of a search is worth another process."""
    return len(space.graph.nodes) >= LONG


def proportional_shares(axes: Axes, weights: PerRank) -> Shares:
    """Return shares of every axis as nearly proportional to ``weights`` as its units allow."""
    return {name: proportional(axis.units, weights) for name, axis in axes.axes.items()}


def _moved(before: Candidate, after: Candidate) -> bool:
    """Return whether new shares of a program shorten its step, or change its excess of memory."""
    (lack, step_s), (new_lack, new_step_s) = before.serial_objective, after.serial_objective
    return lack != new_lack or new_step_s < step_s * (1 - _SETTLED)


def _whole(tensor: str, p: Placement, stored: bool) -> bool:
    """Allow the placements of one device, on which nothing is split or communicated."""
    return p == R
