"""Find a rule for each operator of a graph that the table lacks. (torch)

In this order: the user's own rule; one derived from the operator's tags and schema; rows discovered
by running it; and at last none: every rank runs the whole call, which is right for any operator
whose results depend on its inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hap.errors import ModelError
from hap.ir.graph import Graph
from hap.rule_cache import RuleCache
from hap.rule_check import Case
from hap.rule_derivation import derived
from hap.rule_discovery import NoSampleError, full_name, samples_of
from hap.rule_process import InterruptedRunError, discovered_apart
from hap.synthesizer.rules import RULES, Call
from hap.synthesizer.rules.textual_rules import kind, read, written_rows

Progress = Callable[[str], None]


def with_rules(
    graph: Graph, rules: Mapping[str, Sequence[str]], *, strict: bool = False,
    progress: Progress = lambda text: None,
) -> Graph:  # fmt: skip
    """The graph with the rules that its operators need beside the table.

    Args:
        rules: a user's own, operator -> lines; each is tried on the calls of the graph first.
        strict: leave operators without a rule whose rows can't be derived.

    Raises:
        ModelError: a rule can't be read, or does not hold.
        UnsupportedOpError: no row can describe an operator: it draws random numbers, writes into
            its inputs, or makes shapes of data.
    """
    given = {full_name(op): tuple(lines) for op, lines in rules.items()}
    for op, lines in given.items():
        try:
            read(lines)
        except ValueError as error:
            raise ModelError(f"the rule of {op}: {error}", hint="see docs/rules.md") from error
    for op in sorted(given.keys() - {node.op for node in graph.nodes}):
        progress(f"the rule of {op} is not used: the step has no such operator")
    needed: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    cache = RuleCache(progress)
    for node in graph.nodes:
        if node.op in RULES and node.op not in given:
            continue
        call = Call(node=node, tensors=graph.tensors)
        if kind(call) in seen:
            continue
        seen.add(kind(call))
        if node.op in given:
            progress(f"checking the rule of {node.op}")
            _try(call, given[node.op])
            needed[node.op] = given[node.op]
        elif (found := derived(call)) is not None:
            needed[kind(call)] = found
        elif not strict:
            needed[kind(call)] = _found(call, cache, progress)
    return replace(graph, rules=needed) if needed else graph


_interrupted: dict[str, tuple[str, ...]] = {}
"""The rules of kinds of calls whose discovery was interrupted in this process."""


def _found(call: Call, cache: RuleCache, progress: Progress) -> tuple[str, ...]:
    """The rule of a call by running the operator; if it runs on no sample, all is replicated."""
    op = call.node.op
    known = cache.get(op, kind(call)) or _interrupted.get(kind(call))
    if known is not None:
        return known
    progress(f"discovering how {op} can be split")
    try:
        lines = discovered_apart(call)
    except NoSampleError as error:
        progress(f"{error.what}; every rank runs all of it")
        lines = ("origin replicated", f"# {' '.join(error.what.split())}")
        if isinstance(error, InterruptedRunError):
            # The machine may have been busy, or short of memory: the next process tries again.
            _interrupted[kind(call)] = lines
            return lines
    cache.put(op, kind(call), lines)
    return lines


def _try(call: Call, lines: Sequence[str]) -> None:
    """Raise unless a user's rule holds for samples of a call."""
    node = call.node
    try:
        written_rows(call, lines)
    except ValueError as error:
        raise ModelError(str(error), where=node.source, hint="see docs/rules.md") from error
    samples, tolerance = samples_of(call)
    for case in (Case(sample, tolerance) for sample in samples):
        for row in written_rows(Call(node=case.node, tensors=case.graph.tensors), lines):
            if wrong := case.wrong(row):
                raise ModelError(
                    f"the rule of {node.op} does not hold for {case.sample}: {wrong}",
                    where=node.source,
                    hint=f"hap rules discover {node.op} --model FILE shows the rows that do",
                )
