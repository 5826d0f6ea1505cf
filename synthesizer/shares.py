"""Integer shares for a given program: a small integer program over types of devices.

Variables, for each group ``g`` of axes that the program uses alike (:func:`alike_axes`) and
each type ``k`` of alike devices (:meth:`hap.cluster.Cluster.types`), so that neither more
layers nor more devices of a type make the model larger::

    n[g,k]   units of the type in total; its devices get the floor or the ceiling of the mean
    m[g,k]   units of the type's most loaded device:      n[g,k] <= count[k] * m[g,k]
    z[g,k]   1 if the type takes part in the group:       m[g,k] <= units[g] * z[g,k]
    t[s]     seconds of stage s; stages with equal rows are one variable, times their number

    e        seconds of all exchanges: all-to-alls, and gathers in stages

Minimise   sum_s t[s] + sum_g padded[g] * max_k m[g,k] + e   under::

    sum_k n[g,k] = units[g]
    t[s]      >=  constant[s,k] + sum_g (start_up[s,k,g] * z[g,k] + slope[s,k,g] * m[g,k])
    e         >=  constant + sum_g,k exchange[g,k] * n[g,k]
    memory[k] >=  constant[k] + sum_g bytes[k,g] * m[g,k]

* Computing (:func:`_tangents`, :func:`_stage_rows`). An operator takes launch + max(linear,
  linear) of its part, and nothing at part 0. Where z = 1 that is convex in m, so a row is a
  *tangent* of the exact cost model, a lower bound; every split that is tried adds its rows.
* Memory (:func:`_tangents`, :func:`_memory_rows`). The peak is the largest of linear
  functions, one per instant of the step: tangents as well.
* Communication. Padded gathers grow with the largest part, which is exact (:func:`_padded`).
  An all-to-all is bilinear, and a gather in stages (hierarchical) may switch between padded
  and grouped in each stage: they are not convex. Each round solves with the tangents of all
  splits tried (:func:`_exchange`), less those that overrate the best one, and with the best
  one's alone. Grouped gathers and all-reduces are constants.

:func:`solve_shares` alternates: solve, simulate the integer split, add its tangents, until
nothing new or better comes. It returns the best split *under the simulator* among those
solutions, the rounded relaxation of the first round, and :meth:`_Task.first_splits`. Without
exchanges that is the optimum, to the gap of the solver, but for what is not modelled: which
devices of a type get a remainder (always the first), and the latency that each sender of a
grouped gather adds. With them it is a local one: 2 % off in the worst of the tests.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pulp

from hap.axes import Axes, Shares
from hap.cluster import Cluster
from hap.graph import Graph, Tensor
from hap.placement import Placement
from hap.program import Compute, Convert, Program
from hap.synthesizer.communication import Choice
from hap.synthesizer.cost import CostModel, Machine, PerRank
from hap.synthesizer.footprint import footprint
from hap.synthesizer.simulate import simulate, stages

Floats = npt.NDArray[np.float64]

_STEP = 1e-6
"""The difference of parts over which slopes are taken."""

_PATIENCE = 2
"""Rounds in a row without a better split that end the alternation if exchanges are in it.

Without them it is left to converge: every round adds tangents until its split was tried.
"""

_SCALE = 1e4
"""The start's step time, and a device's memory, in the solver's units: its tolerance is 1e-7."""


class Status(enum.Enum):
    """How the search for shares ended; the value is a sentence for people."""

    OPTIMAL = "These are the best shares under the linearised costs, and they fit the memory."
    INFEASIBLE = "No split of the work fits the memory of all devices."


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Shares of all axes, and the step time simulated with them.

    If nothing fits, the shares are those that lack the fewest bytes, and ``message`` says
    which devices lack how many.
    """

    status: Status
    shares: Shares
    objective_s: float
    message: str = ""


def proportional(units: int, weights: PerRank) -> tuple[int, ...]:
    """Whole units in proportion to the weights, by largest remainder; the first of equals wins.

    Raises:
        ValueError: a weight is negative, or none is positive.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not (weights.min() >= 0 and 0 < weights.sum() < np.inf):
        raise ValueError(f"weights {weights.tolist()}: give none below 0, and one above")
    exact = np.round(units * weights / weights.sum(), 9)  # equal remainders compare equal
    whole = np.floor(exact).astype(int)
    order = np.argsort(np.round(whole - exact, 9), kind="stable")
    whole[order[: units - int(whole.sum())]] += 1
    return tuple(whole.tolist())


def solve_shares(
    graph: Graph,
    axes: Axes,
    program: Program,
    machine: Machine,
    optimizer_states: int,
    start: Shares,
) -> Outcome:
    """The fastest integer shares for ``program`` that fit every device's memory.

    Axes that the program does not use keep their shares of ``start``.
    """
    task = _Task(
        graph=graph, axes=axes, program=program, machine=machine,
        optimizer_states=optimizer_states, start=start,
        types=machine.cluster.types(), groups=alike_axes(graph, program),
    )  # fmt: skip
    best = first = task.simulated(start)
    new = task.first_splits() if task.groups else []
    tangents = None
    planes: dict[_Split, _Plane] = {}  # of all splits that were tried
    rounds = stalled = 0
    while new:
        more = _tangents(task, new)
        tangents = tangents.joined(more) if tangents else more
        planes.update((split, _exchange(task, split)) for split in new)
        found = min([best, *(task.simulated(task.shares(s)) for s in new)], key=_Simulated.rank)
        stalled = stalled + 1 if found is best else 0
        best = found
        here = planes[best.split]
        convex = not here.slopes.any()
        if stalled == _PATIENCE and not convex:
            break
        model = _Model(
            task=task,
            tangents=tangents,
            padded=_padded(task),
            exchange=[p for p in planes.values() if p.at(here.totals) <= here.value * (1 + 1e-9)],
            scale=_SCALE / first.step_s,
        )
        elastic = False
        if (whole := model.solve()) is None:
            elastic, whole = True, model.solve(elastic=True)
        solved = [whole]
        if not rounds:
            solved.append(model.solve(elastic=elastic, relaxed=True))
        if len(model.exchange) > 1 and not convex:
            solved.append(replace(model, exchange=[here]).solve(elastic=elastic))
        rounds += 1
        new = [s for s in dict.fromkeys(solved) if s is not None and s not in planes]
    fits = not best.lack_bytes.any()
    return Outcome(
        status=Status.OPTIMAL if fits else Status.INFEASIBLE,
        shares=best.shares,
        objective_s=best.step_s,
        message="" if fits else _lacking(machine.cluster, best.lack_bytes),
    )


def alike_axes(graph: Graph, program: Program) -> tuple[tuple[str, ...], ...]:
    """The program's axes, grouped by how the same operators use them.

    The axes of a group differ in the layer that they belong to, and get one vector of units.
    """
    uses: dict[str, Counter[object]] = {name: Counter() for name in program.used_axes()}
    for what, placed in _uses(graph, program):
        names = [program.axis(t.name, p.dim)[0] if p.sharded else "" for t, p in placed]
        for axis in set(names) - {""}:
            mine = [name == axis for name in names]
            shapes = [(t.shape, t.dtype, p) for t, p in placed]
            uses[axis][what, tuple(zip(shapes, mine, strict=True))] += 1
    groups: dict[object, list[str]] = {}
    for name, units in program.used_axes().items():
        groups.setdefault((units, frozenset(uses[name].items())), []).append(name)
    return tuple(map(tuple, groups.values()))


def _uses(graph: Graph, program: Program) -> Iterator[tuple[str, list[tuple[Tensor, Placement]]]]:
    """All that has a price: (what it is, the tensors that it touches and their placements)."""
    tensors, gradients = graph.tensors, graph.gradients
    nodes = {n.name: n for n in graph.nodes}
    for i in graph.inputs:
        trained = "trained " if i.target in gradients else ""
        yield f"{trained}{i.role}", [(tensors[i.tensor], program.inputs[i.tensor])]
    for step in program.instructions:
        if isinstance(step, Compute):
            node = nodes[step.node]
            placed = zip((*node.inputs, *node.outputs), (*step.ins, *step.outs), strict=True)
            yield node.op, [(tensors[n], p) for n, p in placed if n and p]
        else:
            t = tensors[step.tensor]
            yield f"{step.kind} {step.implementation}", [(t, step.src), (t, step.dst)]


_Split = tuple[tuple[int, ...], ...]
"""Per group of axes, the units of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Simulated:
    """What the simulator says of a split."""

    split: _Split
    shares: Shares
    step_s: float
    lack_bytes: PerRank

    def rank(self) -> tuple[float, float]:
        return float(self.lack_bytes.sum()), self.step_s


@dataclass(frozen=True, kw_only=True)
class _Task:
    """The arguments of :func:`solve_shares`, its groups of axes and types of devices."""

    graph: Graph
    axes: Axes
    program: Program
    machine: Machine
    optimizer_states: int
    start: Shares
    types: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[str, ...], ...]

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Per group."""
        used = self.program.used_axes()
        return tuple(used[group[0]] for group in self.groups)

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Axis -> index of its group."""
        return {axis: g for g, group in enumerate(self.groups) for axis in group}

    def group(self, tensor: str, placement: Placement) -> int:
        """Index of the group that a sharded value lies on."""
        return self.group_of[self.program.axis(tensor, placement.dim)[0]]

    def first_splits(self) -> list[_Split]:
        """The start; even; as all-to-alls have several optima, with each type alone or left out."""
        even = np.ones(self.machine.cluster.world_size)
        weights = [even]
        if len(self.types) > 1 and any(c.kind == "all_to_all" for c in self.program.collectives):
            for ranks in self.types:
                alone = self.machine.speed * np.isin(np.arange(len(even)), ranks)
                weights += [alone, self.machine.speed - alone]
        start = tuple(self.start[group[0]] for group in self.groups)
        splits = [tuple(proportional(u, w) for u in self.units) for w in weights]
        return list(dict.fromkeys([start, *splits]))

    def shares(self, split: _Split) -> Shares:
        """Shares of all axes; those of a group have one vector."""
        return {**self.start, **{axis: split[g] for axis, g in self.group_of.items()}}

    def cost(self, shares: Shares) -> CostModel:
        return CostModel(self.graph, self.axes, self.machine, shares, self.optimizer_states)

    def simulated(self, shares: Shares) -> _Simulated:
        cost = self.cost(shares)
        line = simulate(self.graph, self.program, cost)
        room = np.array([d.memory_bytes for d in self.machine.cluster.devices])
        return _Simulated(
            split=tuple(shares[group[0]] for group in self.groups),
            shares=shares,
            step_s=line.step_s,
            lack_bytes=np.maximum(line.peak_bytes - room, 0.0),
        )


class _Probe(CostModel):
    """A cost model whose ranks hold any parts that one likes to ask about.

    Its ranks are questions, not devices at work together, so its communication means nothing.
    """

    def __init__(self, task: _Task, machine: Machine, parts: Floats) -> None:
        super().__init__(task.graph, task.axes, machine, {}, task.optimizer_states)
        vectors = list(parts)  # the cost model tells parts apart by identity
        self._of: dict[str, PerRank] = {axis: vectors[g] for axis, g in task.group_of.items()}

    def parts(self, tensor: Tensor, placement: Placement) -> PerRank:
        if not placement.sharded:
            return self._one
        return self._of[self._axes.of[tensor.name, placement.dim]]

    def convert_group(self, group: Sequence[Convert]) -> list[Choice]:
        if group[0].local:
            return super().convert_group(group)
        return [Choice(group[0].implementation, 0.0)]


@dataclass(frozen=True, slots=True)
class _Tangents:
    """Coefficients of the rows, per unit part; dims (stage,) split, type, coefficient.

    A stage's coefficients are the constant, a start-up per group and a slope per group;
    those of memory lack the start-ups.
    """

    seconds: Floats
    bytes: Floats

    def joined(self, other: _Tangents) -> _Tangents:
        return _Tangents(
            np.concatenate([self.seconds, other.seconds], axis=1),
            np.concatenate([self.bytes, other.bytes], axis=0),
        )


def _tangents(task: _Task, splits: Sequence[_Split]) -> _Tangents:
    """Tangents of stage times and peak memory at the most loaded device of each type.

    One run of the cost model answers all: for each split and type, the device with its parts,
    then with a little more of each group, then with nothing of each group.
    """
    groups, types = len(task.groups), len(task.types)
    loads = [
        [[max(u[r] for r in ranks) for u in split] for ranks in task.types] for split in splits
    ]
    at = np.maximum(np.array(loads, dtype=np.float64), 1.0) / np.array(task.units)
    asked = np.repeat(at[..., None], 1 + 2 * groups, axis=-1)  # split, type, group, question
    for g in range(groups):
        asked[:, :, g, 1 + g] += _STEP
        asked[:, :, g, 1 + groups + g] = 0.0
    parts = asked.transpose(2, 0, 1, 3)
    cluster = task.machine.cluster
    clones = tuple(
        replace(cluster.devices[task.types[k][0]], name=f"{split} {k} {question}")
        for split, k, question in np.ndindex(*parts.shape[1:])
    )
    probe = _Probe(task, Machine(replace(cluster, devices=clones)), parts.reshape(groups, -1))
    shape = (len(splits), types, 1 + 2 * groups)
    peak = footprint(task.graph, task.program, probe, buffers=task.cost(task.start)).peak_bytes
    peak = peak.reshape(shape)
    times = [stage.compute_s for stage in stages(task.graph, task.program, probe)]
    seconds = np.array(times).reshape(-1, *shape)
    return _Tangents(_rows(seconds, at, start_up=True), _rows(peak, at, start_up=False))


def _rows(answers: Floats, at: Floats, *, start_up: bool) -> Floats:
    """Coefficients from what :func:`_tangents` asked; ``answers`` ends with the questions."""
    groups = at.shape[-1]
    here = answers[..., :1]
    slope = (answers[..., 1 : 1 + groups] - here) / _STEP
    if not start_up:
        return np.concatenate([here - (slope * at).sum(-1, keepdims=True), slope], axis=-1)
    own = here - answers[..., 1 + groups :]  # what each group adds to the device's time
    constant = here - own.sum(-1, keepdims=True)
    return np.concatenate([constant, own - slope * at, slope], axis=-1)


def _padded(task: _Task) -> Floats:
    """Per group, the seconds of its padded collectives per unit part of the largest share."""
    slopes = np.zeros(len(task.groups))
    whole = np.ones(task.machine.cluster.world_size)
    for c in task.program.collectives:
        if c.implementation == "padded":
            nbytes = task.graph.tensors[c.tensor].nbytes
            side = c.dst if c.kind == "reduce_scatter" else c.src
            most, least = (
                _seconds(task, c.kind, "padded", nbytes, p, p) for p in (whole, 0 * whole)
            )
            slopes[task.group(c.tensor, side)] += most - least
    return slopes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """Seconds of :func:`_exchanges` near a split; totals are units, by group and type."""

    value: float
    slopes: Floats
    totals: Floats

    def at(self, totals: Floats) -> float:
        return self.value + float((self.slopes * (totals - self.totals)).sum())


def _exchanges(program: Program) -> list[Convert]:
    """All-to-alls and hierarchical gathers: they depend on all the shares, not the largest."""
    return [
        c for c in program.collectives
        if c.kind == "all_to_all" or (c.implementation == "hierarchical" and c.kind != "all_reduce")
    ]  # fmt: skip


def _exchange(task: _Task, split: _Split) -> _Plane:
    """The plane of the exchanges through a split, its slopes those of one unit more per type."""

    def side(c: Convert, p: Placement) -> int:
        return task.group(c.tensor, p) if p.sharded else -1

    steps = Counter(
        (c.kind, c.implementation, task.graph.tensors[c.tensor].nbytes, side(c, c.src),
         side(c, c.dst))
        for c in _exchanges(task.program)
    )  # fmt: skip
    parts = [np.array(vector) / sum(vector) for vector in split]

    def seconds(parts: Sequence[PerRank]) -> float:
        sides = [*parts, np.ones(task.machine.cluster.world_size)]  # of -1: not sharded
        return sum(
            times * _seconds(task, kind, how, nbytes, sides[src], sides[dst])
            for (kind, how, nbytes, src, dst), times in steps.items()
        )

    value = seconds(parts)
    slopes = np.zeros((len(parts), len(task.types)))
    for g, k in np.ndindex(*slopes.shape if steps else (0, 0)):
        more, ranks = parts[g].copy(), list(task.types[k])
        more[ranks] += 1 / (task.units[g] * len(ranks))
        slopes[g, k] = seconds([*parts[:g], more, *parts[g + 1 :]]) - value
    totals = [[sum(vector[r] for r in ranks) for ranks in task.types] for vector in split]
    return _Plane(value=value, slopes=slopes, totals=np.array(totals, dtype=np.float64))


def _seconds(
    task: _Task, kind: str, implementation: str, nbytes: int, src: PerRank, dst: PerRank
) -> float:
    choices = task.machine.network.choices(kind, nbytes, src, dst)
    return next(c.seconds for c in choices if c.implementation == implementation)


_Variables = list[list[Any]]
"""PuLP variables per group and type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The integer program of the module's docstring."""

    task: _Task
    tangents: _Tangents
    padded: Floats
    exchange: Sequence[_Plane]
    scale: float

    def solve(self, *, elastic: bool = False, relaxed: bool = False) -> _Split | None:
        """The best split; ``None`` if none fits.

        Args:
            elastic: let memory overflow, and minimise the bytes that lack instead of time.
            relaxed: solve in fractions, and round them by :func:`proportional`.
        """
        task = self.task
        count = [len(ranks) for ranks in task.types]
        problem = pulp.LpProblem("shares", pulp.LpMinimize)

        def variables(name: str, top: Sequence[int]) -> _Variables:
            kind = "Continuous" if relaxed else "Integer"
            return [
                [pulp.LpVariable(f"{name}_{g}_{k}", 0, top[g], kind) for k in range(len(count))]
                for g in range(len(task.groups))
            ]

        n, m = variables("n", task.units), variables("m", task.units)
        z = variables("z", [1] * len(task.groups))
        objective = []
        for g, units in enumerate(task.units):
            problem += pulp.lpSum(n[g]) == units
            largest = pulp.LpVariable(f"largest_{g}", 0)
            objective.append((largest, self.scale * self.padded[g] / units))
            for k, devices in enumerate(count):
                problem += n[g][k] <= devices * m[g][k]
                problem += m[g][k] <= units * z[g][k]
                problem += m[g][k] <= largest
        objective += _stage_rows(problem, self, m, z) + _exchange_rows(problem, self, n)
        lack = _memory_rows(problem, self, m, elastic=elastic)
        problem += pulp.LpAffineExpression(lack if elastic else objective)
        # Serial by default. With threads=1 CBC starts a worker that at times misses its wake-up,
        # and then sleeps for 10 s.
        problem.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=1e-5, maxNodes=20_000))
        if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        return tuple(
            _spread(units, [v.value() for v in n[g]], task.types, relaxed)
            for g, units in enumerate(task.units)
        )


def _stage_rows(
    problem: pulp.LpProblem, model: _Model, m: _Variables, z: _Variables
) -> list[tuple[pulp.LpVariable, float]]:
    """Add the rows of ``t[s]``; returns the terms of their sum."""
    rows = model.tangents.seconds
    groups = len(m)
    # Slopes are differences: the last digits of equal stages differ.
    found, times = np.unique(np.round(rows, 10), axis=0, return_counts=True)
    terms = []
    for s, stage in enumerate(found):
        if not stage[..., 1:].any():
            continue  # the same whatever the shares
        t = pulp.LpVariable(f"t_{s}", 0)
        terms.append((t, float(times[s])))
        for k in range(stage.shape[1]):
            for constant, *rest in np.unique(stage[:, k] * model.scale, axis=0).tolist():
                starts = [(z[g][k], -rest[g]) for g in range(groups)]
                slopes = [(m[g][k], -rest[groups + g] / u) for g, u in enumerate(model.task.units)]
                problem += pulp.LpAffineExpression([(t, 1.0), *starts, *slopes]) >= constant
    return terms


def _exchange_rows(
    problem: pulp.LpProblem, model: _Model, n: _Variables
) -> list[tuple[pulp.LpVariable, float]]:
    """Add the rows of ``e``; returns it."""
    e = pulp.LpVariable("e", 0)
    for plane in model.exchange:
        slopes = [(n[g][k], -model.scale * s) for (g, k), s in np.ndenumerate(plane.slopes)]
        constant = model.scale * plane.at(np.zeros_like(plane.totals))
        problem += pulp.LpAffineExpression([(e, 1.0), *slopes]) >= constant
    return [(e, 1.0)]


def _memory_rows(
    problem: pulp.LpProblem, model: _Model, m: _Variables, *, elastic: bool
) -> list[tuple[pulp.LpVariable, float]]:
    """Add the rows of memory; returns the terms of all that lacks."""
    terms = []
    for k, ranks in enumerate(model.task.types):
        room = model.task.machine.cluster.devices[ranks[0]].memory_bytes
        lack = pulp.LpVariable(f"lack_{k}", 0, None if elastic else 0)
        terms.append((lack, len(ranks) * room / 2**30))
        for constant, *slopes in np.unique(model.tangents.bytes[:, k] * (_SCALE / room), axis=0):
            used = [(m[g][k], slopes[g] / u) for g, u in enumerate(model.task.units)]
            problem += pulp.LpAffineExpression([*used, (lack, -1.0)]) <= _SCALE - constant
    return terms


def _spread(
    units: int, totals: Sequence[float], types: Sequence[Sequence[int]], relaxed: bool
) -> tuple[int, ...]:
    """Units per rank from units per type."""
    each = np.zeros(sum(map(len, types)))
    for total, ranks in zip(totals, types, strict=True):
        each[list(ranks)] = (
            max(total, 0.0) / len(ranks)
            if relaxed
            else proportional(round(total), np.ones(len(ranks)))
        )
    return proportional(units, each)


def _lacking(cluster: Cluster, lack_bytes: PerRank) -> str:
    """Which devices lack how many bytes, alike ones together."""
    found: dict[tuple[int, int], list[str]] = {}
    for device, lack in zip(cluster.devices, lack_bytes.tolist(), strict=True):
        if lack > 0:
            found.setdefault((math.ceil(lack), device.memory_bytes), []).append(device.name)
    return "; ".join(
        f"{', '.join(names)} lack{'s' * (len(names) == 1)} {lack:,} bytes beyond {room:,}"
        for (lack, room), names in found.items()
    )
