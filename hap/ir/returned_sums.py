"""Gradients that a stage returns to others: of each microbatch, or sums of a shared weight's gradients."""

from __future__ import annotations

from collections import Counter

from hap.ir.graph import Graph
from hap.ir.mesh import origin
from hap.ir.placement import P
from hap.ir.program import Convert, Program, Value


def returned_values(graph: Graph, program: Program, *, summed: bool) -> list[Value]:
    """Return the gradients that a stage returns: sums over the microbatches, or those of each."""
    ends = zip(graph.outputs, program.outputs, strict=True)
    return [
        Value(o.tensor, p) for o, p in ends
        if o.role == "returned" and (origin(o.tensor).placement == P) == summed
    ]  # fmt: skip


def returned_conversions(graph: Graph, program: Program) -> frozenset[int]:
    """Return the instructions that convert only what the stage sends once per step.

    They run once, on the sums over the microbatches.
    """
    sent = set(returned_values(graph, program, summed=True))
    if not sent:
        return frozenset()
    readers = Counter(v for step in program.instructions for v in step.reads(graph))
    found = set[int]()
    for k in reversed(range(len(program.instructions))):
        step = program.instructions[k]
        if not isinstance(step, Convert):
            continue
        (made,), (source,) = step.writes(graph), step.reads(graph)
        if made in sent and not readers[made]:
            found.add(k)
            readers[source] -= 1
            sent.add(source)
    return frozenset(found)
