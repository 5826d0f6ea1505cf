"""Reductions of gradients that a stage runs beside the backward of its last microbatch."""

from __future__ import annotations

from hap.ir.graph import Graph
from hap.ir.mesh import origin
from hap.ir.microbatch import EACH, SUMMED, Phase, is_of_each, is_sum, phases
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


def end_conversions(graph: Graph, program: Program) -> Numbers:
    """Return the conversions of the backward that operators after the microbatches alone read.

    They convert what exists before, such as weights of a part of the model that runs once.
    """
    found: tuple[Graph, Numbers] | None = program.memo.get("end conversions")
    if found is None or found[0] is not graph:
        found = program.memo["end conversions"] = graph, _end_conversions(graph, program)
    return found[1]


def _end_conversions(graph: Graph, program: Program) -> Numbers:
    of_node, steps = phases(graph), program.instructions
    once = {
        Value(i.tensor, program.inputs[i.tensor]) for i in graph.inputs
        if not is_of_each(i) and i.target not in (EACH, SUMMED)
    }  # fmt: skip
    wanted = {Value(o.tensor, p) for o, p in zip(graph.outputs, program.outputs, strict=True)}
    for step in steps:
        early = isinstance(step, Convert) or of_node[step.node] is Phase.ONCE
        if early and once.issuperset(step.reads(graph)):
            once.update(step.writes(graph))
        if isinstance(step, Compute) and of_node[step.node] is not Phase.END:
            wanted.update(step.reads(graph))
    found = set[int]()
    for k, step in reversed([*enumerate(steps)]):
        if not isinstance(step, Convert):
            continue
        if (
            step.backward
            and once.issuperset(step.reads(graph))
            and wanted.isdisjoint(step.writes(graph))
        ):
            found.add(k)
        else:
            wanted.update(step.reads(graph))
    return frozenset(found)


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
    of_parts, sums, alone = set[Value](), set[Value](), end_conversions(graph, program)
    early, late = set[int](), set[int]()
    for k, step in enumerate(program.instructions):
        read, made = step.reads(graph), step.writes(graph)
        phase = of_node[step.node] if isinstance(step, Compute) else None
        of_end = phase is Phase.END or k in alone
        if not of_end and waiting.isdisjoint(read) and sums.isdisjoint(read):
            if phase is Phase.PART or not of_parts.isdisjoint(read):
                of_parts.update(made)
            continue
        if isinstance(step, Compute) and is_sum(graph.by_name[step.node]):
            ready = step.backward and waiting.isdisjoint(read)
        else:  # a term of each microbatch stands for its sum
            terms = any(v in of_parts and origin(v.tensor).placement == P for v in read)
            ready = waiting.isdisjoint(read) and not terms
        (sums if ready else waiting).update(made)
        (early if ready else late).add(k)
    return frozenset(early), frozenset(late)
