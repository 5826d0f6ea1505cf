"""Gathers of weights in a stage: once per step, before the microbatches, or in each of them."""

from __future__ import annotations

from collections.abc import Collection

from hap.ir.graph import Graph
from hap.ir.microbatch import BEFORE, Phase, phases
from hap.ir.program import Compute, Convert, Program, Value

Numbers = frozenset[int]
"""Of instructions."""


def forward_gathers(graph: Graph, program: Program) -> Numbers:
    """Return the gathers of weights whose results no backward reads, and those that are fused with them.

    A stage that runs them in each microbatch holds a result no longer than operators need it, as ZeRO-3 does
    (Rajbhandari et al., SC 2020).
    """
    made, late = dict[Value, int](), set[int]()
    for k in sorted(before_microbatches(graph, program, shared=False)):
        step = program.instructions[k]
        if isinstance(step, Convert) and not step.local:
            made.update(dict.fromkeys(step.writes(graph), k))
    found = set(made.values())
    for step in program.instructions:
        read = [made[v] for v in step.reads(graph) if v in made]
        if step.backward:
            late.update(read)
        elif step.aliases(graph) and step.reads(graph)[0] in made:
            made.update(dict.fromkeys(step.writes(graph), made[step.reads(graph)[0]]))
    groups = (range(*ends) for ends in program.bounds(graph))
    alone = found - late
    return frozenset(k for group in groups if not alone.isdisjoint(group) for k in group)


def before_microbatches(
    graph: Graph, program: Program, each: Collection[int] = (), *, shared: bool = True
) -> Numbers:
    """Return the instructions on weights that run once, before the microbatches.

    Args:
        each: instructions that run in each microbatch, and those that follow from them.
        shared: also those on weights of other stages.
    """
    of_node = phases(graph)
    once = {
        Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs
        if i.role not in ("input", "tangent", "received") or (shared and i.target == BEFORE)
    }  # fmt: skip
    found = set[int]()
    for k, step in enumerate(program.instructions):
        alone = of_node[step.node] is Phase.ONCE if isinstance(step, Compute) else not step.backward
        if alone and k not in each and once.issuperset(step.reads(graph)):
            once.update(step.writes(graph))
            found.add(k)
    return frozenset(found)
