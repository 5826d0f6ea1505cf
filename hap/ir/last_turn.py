"""Reductions of gradients that a stage runs beside the backward of its last microbatch."""

from __future__ import annotations

from hap.ir.graph import Graph
from hap.ir.mesh import origin
from hap.ir.microbatch import SUMMED, Phase, is_sum, phases
from hap.ir.placement import P
from hap.ir.program import Compute, Convert, Program, Value
from hap.ir.returned_sums import returned_values

Numbers = frozenset[int]
"""Of instructions."""


def beside_last(graph: Graph, program: Program) -> Numbers:
    """Return the instructions on sums of gradients that may run before the last backward has ended.

    They are the sums over the microbatches, and what follows from these and from values that exist before
    the backward: reductions over the stage's ranks. A sum to which other stages contribute is left out.
    Empty if none communicates, or if the stage returns such sums: then these go first.
    """
    if returned_values(graph, program, summed=True):
        return frozenset()
    early, _ = after_microbatches(graph, program)
    steps = (program.instructions[k] for k in early)
    return early if any(isinstance(s, Convert) and not s.local for s in steps) else frozenset()


def all_after(graph: Graph, program: Program) -> Numbers:
    """Return all instructions of :func:`after_microbatches`."""
    early, late = after_microbatches(graph, program)
    return early | late


def after_microbatches(graph: Graph, program: Program) -> tuple[Numbers, Numbers]:
    """Return the instructions that run once, after the microbatches: those on sums of gradients, others."""
    found: tuple[Graph, tuple[Numbers, Numbers]] | None = program.memo.get("after microbatches")
    if found is None or found[0] is not graph:
        found = program.memo["after microbatches"] = graph, _after_microbatches(graph, program)
    return found[1]


def _after_microbatches(graph: Graph, program: Program) -> tuple[Numbers, Numbers]:
    of_node = phases(graph)
    waiting = {
        Value(i.tensor, program.inputs[i.tensor])
        for i in graph.role("received") if i.target == SUMMED
    }  # fmt: skip
    of_parts, sums = set[Value](), set[Value]()
    early, late = set[int](), set[int]()
    for k, step in enumerate(program.instructions):
        read, made = step.reads(graph), step.writes(graph)
        phase = of_node[step.node] if isinstance(step, Compute) else None
        follows = phase is Phase.END or not waiting.isdisjoint(read) or not sums.isdisjoint(read)
        if not follows:
            if phase is Phase.PART or not of_parts.isdisjoint(read):
                of_parts.update(made)
            continue
        if isinstance(step, Compute) and is_sum(graph.by_name[step.node]):
            ready = step.backward and waiting.isdisjoint(read)
        else:  # a term of each microbatch stands for its sum
            terms = any(v in of_parts and origin(v.tensor).placement == P for v in read)
            ready = waiting.isdisjoint(read) and not sums.isdisjoint(read) and not terms
        (sums if ready else waiting).update(made)
        (early if ready else late).add(k)
    return frozenset(early), frozenset(late)
