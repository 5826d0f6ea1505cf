"""The planner of the HAP paper (Zhang et al., EuroSys'24), whose plans our simulator prices.

Its space has one placement per tensor, its costs are flops / speed and latency + bytes / bandwidth,
its search alternates between the cheapest program and one linear program for one vector of ratios.
docs/formulas.md lists the reproduced parts and the deviations.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pulp

from hap.cluster.topology import Cluster
from hap.errors import HapError, NoProgramError
from hap.ir.axes import Axes
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.placement import LOCAL, L, P, Placement, conversion
from hap.ir.program import Convert, Program
from hap.synthesizer.axis_roles import batch_axis
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.cost.parts import AxisParts, Parts
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.cost.serial_cost import supersteps
from hap.synthesizer.rules import Row
from hap.synthesizer.search.cost_tables import Problem
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.synthesize import Synthesizer, proportional_shares

TERMS = (P, L)
"""Placements in which every rank has a term of the tensor."""

ROUNDS = 8
"""Limit of alternations; the original stops when the cost no longer falls."""


class UnfusedPrices(Prices, ABC):
    """Prices of a planner that ignores the optimizer's time and fused collectives.

    ``rate``: floating-point operations per second in float32 products, per rank.
    """

    def __init__(self, graph: Graph, hardware: HardwareModel, parts: Parts) -> None:
        super().__init__(graph, hardware, parts, 0)
        self.rate = np.array([d.rate("matmul", "float32") for d in hardware.cluster.devices])

    def update(self, parameter: Tensor, stored: Placement) -> PerRank:
        return np.zeros_like(self.parts.one)

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        how = group[0].implementation
        return [Quote(how, sum(self.seconds(step) for step in group))]

    def seconds(self, step: Convert) -> float:
        """Return the seconds of one conversion by its implementation."""
        choices = self.convert(self.graph.tensors[step.tensor], step.src, step.dst)
        return next(c.seconds for c in choices if c.implementation == step.implementation)

    def step_s(self, program: Program) -> float:
        """Return the seconds of a step: the sum over its supersteps."""
        found = supersteps(self.graph, program, self)
        return sum(float(s.compute_s.max()) + s.communicate_s for s in found)


class PaperCost(UnfusedPrices):
    """The original's prices under one vector of ratios for all axes."""

    def __init__(self, graph: Graph, axes: Axes, hardware: HardwareModel, ratios: PerRank) -> None:
        parts = one_ratio(axes, ratios)
        super().__init__(graph, hardware, parts)
        self._network = CostModel(graph, axes, hardware, parts, 0)
        self._computed: dict[tuple[int, bool], PerRank] = {}

    def compute(self, node: Node, row: Row) -> PerRank:
        part = self.parts.of_work(node, row)
        key = self.graph.alike[node.name], part is self.parts.one
        if key not in self._computed:
            self._computed[key] = node_work(node, self.graph).flops * part / self.rate
        return self._computed[key]

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        if conversion(src, dst) in (None, *LOCAL):
            return [Quote("", 0.0)]
        choices = self._network.convert(tensor, src, dst)
        return [c for c in choices if c.implementation != "hierarchical"]


def one_ratio(axes: Axes, ratios: PerRank) -> Parts:
    """Return the same parts for every axis."""
    return AxisParts(axes, len(ratios), dict.fromkeys(axes.axes, ratios))


PricesOf = Callable[[Graph, Axes, HardwareModel, PerRank], UnfusedPrices]
"""Prices of a graph on a cluster under one vector of ratios."""


def plan_as_paper(space: Space, cluster: Cluster, optimizer_states: int) -> Candidate:
    """Return the original's program and shares, under our predictions; see :func:`alternate`."""
    judge = Synthesizer(space, cluster, optimizer_states)
    _, program, ratios = alternate(space, judge.hardware)
    found = judge.judge(program, proportional_shares(space.axes, ratios))
    return replace(found, overlap=False)  # it waits for each collective at once


def alternate(
    space: Space, hardware: HardwareModel, prices: PricesOf = PaperCost
) -> tuple[float, Program, PerRank]:
    """Return (step in the original's own prices, its program, its ratios).

    Raises:
        HapError: the inputs have no common batch dim, or the space holds no program.
    """
    part, ratios = paper_space(space), hardware.speed
    best: tuple[float, Program, PerRank] | None = None
    for _ in range(ROUNDS):
        program = _search(part, prices(space.graph, space.axes, hardware, ratios))
        ratios = best_ratios(space, program, hardware, ratios, prices)
        seconds = prices(space.graph, space.axes, hardware, ratios).step_s(program)
        if best and seconds >= best[0]:
            break
        best = (seconds, program, ratios)
    assert best is not None
    return best


def paper_space(space: Space) -> Space:
    """Return the original's part of a space: one placement per tensor, no partial activation.

    A tensor of the forward is partial only if it has no batch dim (a loss, a statistic).
    """
    axis = batch_axis(space)
    if axis is None:
        raise HapError("the inputs have no common batch dim")
    graph = space.graph
    made = {o for n in graph.nodes if n.name not in graph.backward for o in n.outputs if o}
    made |= {i.tensor for i in graph.inputs}
    whole = {i.tensor for i in graph.role("parameter")}
    whole |= {tensor for (tensor, _), name in space.axes.of.items() if name == axis} & made

    def kept(node: Node, row: Row) -> bool:
        placed = zip((*node.inputs, *node.outputs), (*row.ins, *row.outs), strict=True)
        return not any(p in TERMS and name in whole for name, p in placed)

    rows = {n.name: tuple(r for r in space.rows[n.name] if kept(n, r)) for n in graph.nodes}
    held = {
        name: tuple(h for h in found if len(h) == 1 and (h[0] not in TERMS or name not in whole))
        for name, found in space.holdings.items()
    }
    return replace(space, rows=rows, holdings=held)


def _search(space: Space, cost: UnfusedPrices) -> Program:
    labelling = (problem := Problem(space, cost)).solve()
    if labelling is None:
        raise NoProgramError("no program has the required placements")
    return problem.program(labelling)


def best_ratios(
    space: Space,
    program: Program,
    hardware: HardwareModel,
    now: PerRank,
    prices: PricesOf = PaperCost,
) -> PerRank:
    """Solve the original's linear program: minimise the sum of stage maxima plus padded traffic.

    Equal devices have one variable ``b[k]``. Every price is linear in it, so two runs of
    the cost model, with no part and with all of it, give all coefficients.
    """
    types = hardware.cluster.types()
    first = [ranks[0] for ranks in types]
    none, whole = (
        prices(space.graph, space.axes, hardware, np.full_like(now, part)) for part in (0.0, 1.0)
    )
    ends = [
        np.array([s.compute_s[first] for s in supersteps(space.graph, program, cost)])
        for cost in (none, whole)
    ]
    found, times = np.unique(np.stack(ends, axis=1), axis=0, return_counts=True)
    padded = sum(
        whole.seconds(c) - none.seconds(c)
        for c in program.collectives if c.implementation == "padded"
    )  # fmt: skip
    scale = 1.0 / prices(space.graph, space.axes, hardware, now).step_s(program)
    problem = pulp.LpProblem("ratios", pulp.LpMinimize)
    b = [pulp.LpVariable(f"b_{k}", 0, 1) for k in range(len(types))]
    largest = pulp.LpVariable("largest", 0)
    objective = [(largest, scale * padded)]
    problem += pulp.lpSum(len(ranks) * b[k] for k, ranks in enumerate(types)) == 1
    for share in b:
        problem += share <= largest
    for s, (least, most) in enumerate(found * scale):
        t = pulp.LpVariable(f"t_{s}", 0)
        objective.append((t, float(times[s])))
        for k, share in enumerate(b):
            problem += t >= float(least[k]) + float(most[k] - least[k]) * share
    problem += pulp.LpAffineExpression(objective)
    problem.solve(pulp.PULP_CBC_CMD(msg=False))
    assert problem.sol_status == pulp.LpSolutionOptimal, "ratios in proportion are a solution"
    ratios = np.zeros_like(now)
    for share, ranks in zip(b, types, strict=True):
        ratios[list(ranks)] = max(share.value(), 0.0)
    normal: PerRank = ratios / ratios.sum()
    return normal
