"""The operators of a stage's backward that no other stage waits for."""

from __future__ import annotations

from hap.ir.graph import Graph
from hap.ir.program import Program
from hap.ir.returned_sums import returned_values


def delayable(graph: Graph, program: Program) -> frozenset[int]:
    """Return the instructions of the backward on which no gradient that the stage returns depends.

    They may run later. Instructions that are fused with others that may not are left out. Empty for a
    stage that returns no gradient of each microbatch, such as the first one.
    """
    needed = set(returned_values(graph, program, summed=False))
    if not needed:
        return frozenset()
    found = set[int]()
    for first, end in reversed(program.bounds(graph)):
        group = program.instructions[first:end]
        if any(needed.intersection(step.writes(graph)) for step in group):
            needed.update(v for step in group for v in step.reads(graph))
        else:
            found.update(k for k in range(first, end) if program.instructions[k].backward)
    return frozenset(found)
