"""Gathers of weights in a stage: once per step, before the microbatches, or in each of them."""

from __future__ import annotations

from collections.abc import Collection

from hap.ir.graph import Graph
from hap.ir.microbatch import BEFORE, Phase, is_of_each, phases
from hap.ir.program import Compute, Convert, Program, Value

Numbers = frozenset[int]
"""Of instructions."""


def forward_gathers(graph: Graph, program: Program) -> Numbers:
    """Return the gathers of weights whose results no backward reads, and those that are fused with them.

    A stage that runs them in each microbatch holds a result no longer than operators need it, as ZeRO-3 does
    (Rajbhandari et al., SC 2020). What another stage gets once per step stays out.
    """
    early = before_microbatches(graph, program, shared=False)
    gathered, follows = dict[Value, int](), dict[Value, frozenset[int]]()
    saved, sent = set[int](), set[int]()
    for k, step in enumerate(program.instructions):
        read, made = step.reads(graph), step.writes(graph)
        if step.backward:
            saved.update(gathered[v] for v in read if v in gathered)
        elif isinstance(step, Convert) and not step.local and k in early:
            gathered.update(dict.fromkeys(made, k))
        elif step.aliases(graph) and read[0] in gathered:
            gathered.update(dict.fromkeys(made, gathered[read[0]]))
        if k in early:
            own = frozenset({k}).union(*(follows[v] for v in read if v in follows))
            follows.update(dict.fromkeys(made, own))
    for output, p in zip(graph.outputs, program.outputs, strict=True):
        if output.role == "sent":
            sent.update(follows.get(Value(output.tensor, p), ()))
    alone = set(gathered.values()) - saved
    groups = (range(*ends) for ends in program.bounds(graph))
    return frozenset(
        k for group in groups if not alone.isdisjoint(group) and sent.isdisjoint(group)
        for k in early.intersection(group)
    )  # fmt: skip


def before_microbatches(
    graph: Graph, program: Program, each: Collection[int] = (), *, shared: bool = True
) -> Numbers:
    """Return the instructions on weights and whole inputs that run once, before the microbatches.

    Args:
        each: instructions that run in each microbatch, and those that follow from them.
        shared: also those on weights of other stages.
    """
    of_node = phases(graph)
    once = {
        Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs
        if not is_of_each(i) and (i.role != "received" or (shared and i.target == BEFORE))
    }  # fmt: skip
    found = set[int]()
    for k, step in enumerate(program.instructions):
        alone = of_node[step.node] is Phase.ONCE if isinstance(step, Compute) else not step.backward
        if alone and k not in each and once.issuperset(step.reads(graph)):
            once.update(step.writes(graph))
            found.add(k)
    return frozenset(found)
