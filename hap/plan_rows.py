"""Check that every instruction of a plan is a row that a rule gives."""

from __future__ import annotations

from collections.abc import Sequence

from hap.errors import PlanError
from hap.ir.graph import Graph, Node, Ref, substitute
from hap.ir.plan import Plan
from hap.ir.program import Compute, Program
from hap.synthesizer.rules import Row
from hap.synthesizer.rules.textual_rules import rows_of

HINT = "plan anew; a rule of your own belongs in `rules` of the model file: see docs/rules.md"


def check_rows(plan: Plan) -> None:
    """Raise ``PlanError`` for an instruction whose placements no rule allows.

    Rules are those of the table, and those that the plan holds: the user's own, and derived and
    discovered ones.
    """
    _check(plan.graph, plan.program)
    if plan.inside is not None:
        _check(*plan.whole)
    if plan.stages is not None:
        for graph, stage in zip(plan.cut[0], plan.stages.stages, strict=True):
            _check(graph, stage.program)


def _check(graph: Graph, program: Program) -> None:
    known: dict[object, Sequence[Row]] = {}
    for step in program.instructions:
        if not isinstance(step, Compute):
            continue
        node = graph.by_name[step.node]
        key = _kind(node, graph)
        if key not in known:
            known[key] = _rows(node, graph)
        cuts = [
            program.axes[f"{name}:{p.dim}"]
            for name, p in zip((*node.inputs, *node.outputs), (*step.ins, *step.outs), strict=True)
            if name is not None and p is not None and p.sharded
        ]
        if len({axis for axis, _ in cuts}) > 1:
            names = ", ".join(sorted({repr(axis) for axis, _ in cuts}))
            raise PlanError(f"{_named(step, node)} is cut along different axes: {names}", hint=HINT)
        if not any(
            row.ins == step.ins and _fits(row.outs, step.outs)
            and all(row.units % units == 0 for _, units in cuts)
            for row in known[key]
        ):  # fmt: skip
            given = Row(step.outs, step.ins)
            raise PlanError(f"{_named(step, node)} runs {given}, which no rule gives", hint=HINT)


def _fits(outs: Sequence[object], given: Sequence[object]) -> bool:
    """Are the results placed as by a row? A result that nobody reads has no placement."""
    return all(p is None or p == row for row, p in zip(outs, given, strict=True))


def _rows(node: Node, graph: Graph) -> Sequence[Row]:
    try:
        return rows_of(node, graph)
    except KeyError:
        what = f"no rule is known of operator {node.op} ({node.name})"
    except (AssertionError, ValueError, IndexError, TypeError, AttributeError) as error:
        what = f"operator {node.op} ({node.name}) has arguments that its rule can't read: {error}"
    raise PlanError(what, hint=HINT)


def _kind(node: Node, graph: Graph) -> object:
    """Calls with equal kinds have equal rows: layers repeat."""
    places = {name: str(k) for k, name in enumerate(dict.fromkeys(node.inputs))}
    args = substitute((node.args, node.kwargs), lambda ref: Ref(places[ref.name]))
    looks = tuple(
        None if name is None else (graph.tensors[name].shape, graph.tensors[name].dtype)
        for name in (*node.inputs, *node.outputs)
    )
    return node.op, repr(args), looks


def _named(step: Compute, node: Node) -> str:
    side = "backward" if step.backward else "forward"
    return f"instruction {step.node!r} ({node.op}) of the {side}"
