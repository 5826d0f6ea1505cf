"""The paper's planner by its own arithmetic, to locate its gains over DP-CP.

    python -m benchmarks.published                 8 GPUs, all models
    python -m benchmarks.published --write-docs    also into docs/paper-testbed.md

The published code (its ``hap.rs``) counts differently from us, so its claimed gains do not hold
under our cost model. This command runs the same alternation over the same space under its prices:

* three operations per multiplication and addition of a product, where we count two;
* a convolution as if its kernel were 1x1;
* attention without its four projections;
* collectives at the rates of :data:`RATES`, of whole tensors, padded to the largest shard;
* the gradient of a parameter that is stored whole is reduced, even if all ranks compute the same;
* nothing for elementwise operators, launches, memory traffic and the optimizer. (It does count
  operations of elementwise operators; they are below a percent.)
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.paper_cluster import CLUSTERS, MODELS
from benchmarks.paper_document import BASE, CLAIMS, CONSTANTS, markdown, write_document
from hap.capture import torch_private
from hap.capture.tracing import capture
from hap.ir.axes import Axes, Shares
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.placement import LOCAL, Placement, R, conversion
from hap.ir.program import Convert, Program
from hap.synthesizer import rules
from hap.synthesizer.baselines import METHODS
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.operator_work import FLOPS, node_work
from hap.synthesizer.cost.parts import AxisParts, Parts, vectors_of
from hap.synthesizer.cost.serial_cost import Superstep, supersteps
from hap.synthesizer.hap_paper import UnfusedPrices, alternate, one_ratio
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.planner import choose
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.synthesize import Synthesizer, proportional_shares
from hap.units import format_seconds

RATES = {
    "all_gather": 0.815e9,
    "reduce_scatter": 0.876e9,
    "all_reduce": 0.477e9,
    "all_to_all": 7.50e9,
}
"""Bytes per second, of whole float32 tensors: the rates of the published code."""

ADAM = 2
"""Number of the optimizer's states."""

Pair = tuple[float, float]

COMMAND = "python -m benchmarks.published --write-docs"


class Published(UnfusedPrices):
    """The prices of the published code.

    Args:
        prepaid: tensors with an all-reduce that :func:`reduced_s` counts.
    """

    def __init__(
        self, graph: Graph, hardware: HardwareModel, parts: Parts, prepaid: Container[str] = ()
    ) -> None:
        super().__init__(graph, hardware, parts)
        self._prepaid = prepaid

    def compute(self, node: Node, row: rules.Row) -> PerRank:
        # Not by the node's key: the count also depends on the layer.
        seconds: PerRank = self._count(node) * self.parts.of_work(node, row) / self.rate
        return seconds

    def _count(self, node: Node) -> float:
        kind = FLOPS.get(node.op, ("",))[0]
        if kind.startswith("conv"):
            backward = "backward" in node.op
            x, weight = (self.graph.tensors[i] for i in node.inputs[backward : backward + 2])
            return 3.0 * (1 + backward) * weight.shape[0] * x.numel
        if not kind or (kind == "matmul" and "attention" in node.module):
            return 0.0
        return 1.5 * node_work(node, self.graph).flops

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        kind = conversion(src, dst)
        if kind is None or kind in LOCAL:
            return [Quote("", 0.0)]
        if kind == "all_reduce":
            seconds = 0.0 if tensor.name in self._prepaid else tensor.nbytes / RATES[kind]
            return [Quote("one shot", seconds)]
        parts = self.parts.of(tensor.name, src if src.sharded else dst)
        return [Quote("padded", float(parts.max()) * len(parts) * tensor.nbytes / RATES[kind])]

    def seconds(self, step: Convert) -> float:
        """Return the seconds of a conversion; each collective has one implementation."""
        return self.convert(self.graph.tensors[step.tensor], step.src, step.dst)[0].seconds


def of_ratios(graph: Graph, axes: Axes, hardware: HardwareModel, ratios: PerRank) -> Published:
    """Return the published prices under one vector of ratios for all axes."""
    return Published(graph, hardware, one_ratio(axes, ratios))


def of_shares(graph: Graph, axes: Axes, hardware: HardwareModel, shares: Shares) -> Published:
    """Return the published prices of a finished pair, with separate shares per axis."""
    parts = AxisParts(axes, hardware.cluster.world_size, vectors_of(shares, hardware))
    return Published(graph, hardware, parts, prepaid=frozenset(graph.gradients.values()))


def reduced_s(graph: Graph, program: Program) -> float:
    """Return seconds that reduce the gradients of all parameters stored whole, even equal ones."""
    return sum(
        graph.tensors[i.tensor].nbytes / RATES["all_reduce"]
        for i in graph.role("parameter")
        if i.target in graph.gradients and not program.inputs[i.tensor].sharded
    )


def reduced(space: Space) -> Space:
    """Return the space in which every gradient is made of terms, or in shards."""
    rows = dict(space.rows)
    for gradient in space.graph.gradients.values():
        node = space.graph.producer[gradient]
        at = node.outputs.index(gradient)
        rows[node.name] = tuple(r for r in rows[node.name] if r.outs[at] != R) or rows[node.name]
    return replace(space, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Computing and communicating of DP-CP, the original's program and our plan."""

    model: str
    theirs: tuple[Pair, ...]
    """Seconds by the published prices."""
    ours: tuple[Pair, ...]
    """Seconds by our simulator."""


def compare(model: str) -> Row:
    """Plan one model by the published code and by ours, on 8 GPUs; judge both by both."""
    cluster = CLUSTERS[CONSTANTS]()
    with torch_private.fake_mode():
        module, batch = MODELS[model](cluster.world_size)
    space = build_space(capture(module, batch, None))
    judge = Synthesizer(space, cluster, ADAM)
    even = next(m for m in METHODS if m.name == BASE).plan(space, cluster, ADAM)
    _, program, ratios = alternate(reduced(space), judge.hardware, of_ratios)
    found = judge.judge(program, proportional_shares(space.axes, ratios))
    plan = choose(space, cluster, ADAM, PlanOptions(all_devices=True)).pair
    three = (even, found, plan)
    theirs = []
    for c in three:
        prices = of_shares(space.graph, judge.cost(c).axes, judge.hardware, c.shares)
        computing, communicating = _pair(supersteps(space.graph, c.program, prices))
        theirs.append((computing, communicating + reduced_s(space.graph, c.program)))
    ours = [_pair(supersteps(space.graph, c.program, judge.cost(c))) for c in three]
    return Row(model=model, theirs=tuple(theirs), ours=tuple(ours))


def _pair(found: Sequence[Superstep]) -> Pair:
    return (
        sum(float(stage.compute_s.max()) for stage in found),
        sum(stage.communicate_s for stage in found),
    )


def table(rows: Sequence[Row]) -> str:
    """Return seconds of computing + communicating, and times DP-CP."""
    head = ["8 GPUs, the paper's constants", "claimed", "its prices: DP-CP", "its program",
            "our plan", "our prices: DP-CP", "its program", "our plan"]  # fmt: skip
    body = []
    for row in rows:
        cells = [row.model, f"{CLAIMS[row.model]:.2f}x"]
        for base, *others in (row.theirs, row.ours):
            cells += [_shown(base), *(f"{_shown(o)} ({sum(base) / sum(o):.2f}x)" for o in others)]
        body.append(cells)
    return markdown(head, body)


def _shown(pair: Pair) -> str:
    return " + ".join(map(format_seconds, pair))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--write-docs", action="store_true", help="into docs/paper-testbed.md")
    options = parser.parse_args(arguments)
    text = table([compare(model) for model in MODELS if options.only in model])
    Console(highlight=False, width=200).print(text, markup=False)
    if options.write_docs:
        write_document(Path(__file__).parents[1] / "docs" / "paper-testbed.md", text, COMMAND)


if __name__ == "__main__":
    main()
