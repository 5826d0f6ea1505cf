"""The output of ``hap rules``: operators with a rule, their rows, discovered rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hap.capture.building import build_without_data
from hap.capture.model_file import load_model_file
from hap.capture.tracing import capture
from hap.errors import InputError, UnsupportedOpError
from hap.launchers import started_as
from hap.rule_discovery import Discovery, calls_in, calls_of, discovered, full_name
from hap.synthesizer.rules import RULES, Call, Row


def known() -> Iterator[str]:
    """Yield the operators with a rule, by the mathematical reason that names their module."""
    reasons: dict[str, list[str]] = {}
    for op, rule in RULES.items():
        reasons.setdefault(rule.__module__.rpartition(".")[2], []).append(op)
    for reason, ops in sorted(reasons.items()):
        yield f"{reason} ({len(ops)})"
        yield from (f"  {op}" for op in sorted(ops))


def rows_text(op: str, model: str | None = None) -> str:
    """Return the rows of the table for calls of an operator.

    Raises:
        UnsupportedOpError: it has no rule, or no valid arguments are known.
    """
    op = full_name(op)
    if op not in RULES:
        raise UnsupportedOpError(
            f"operator {op} has no rule", hint=f"hap rules discover {op} finds rows"
        )
    return "\n\n".join("\n".join([_shapes(c), *_rows(RULES[op](c))]) for c in _calls(op, model))


def discovered_text(op: str, model: str | None = None) -> str:
    """Return the discovered rows of an operator's calls, the evidence, and the next steps."""
    op = full_name(op)
    calls = _calls(op, model)
    found = [discovered(call) for call in calls]
    parts = [
        "\n".join([_shapes(call), *_rows(f.rows, blocks=False), f"  {f.evidence}"])
        for call, f in zip(calls, found, strict=True)
    ]
    known = "the rule table has rows of its own, which a plan prefers\n" if op in RULES else ""
    return "\n\n".join([*parts, known + _next(op, found, model)])


def _calls(op: str, model: str | None) -> list[Call]:
    if model is None:
        return calls_of(op)
    with started_as([model.rpartition(":")[0] or model]):
        file = load_model_file(model)
        model_and_batch = build_without_data(file, lambda text: None)
    graph = capture(*model_and_batch, file.loss, autocast=file.autocast)
    calls = calls_in(graph, op)
    if not calls:
        own = [o for o in dict.fromkeys(n.op for n in graph.nodes) if o not in RULES]
        raise InputError(
            f"the step of {model} has no operator {op}",
            hint=f"without a rule are {', '.join(own)}" if own else "all its operators have rules",
        )
    return calls


def _shapes(call: Call) -> str:
    shapes = ", ".join(str(t.shape) for t in call.ins)
    return f"{call.node.op}, {shapes}" + (f"  {call.node.source}" if call.node.source else "")


def _rows(rows: Sequence[Row], *, blocks: bool = True) -> list[str]:
    width = max(len(str(row).partition("->")[0]) for row in rows)
    texts = [str(row).partition("->") for row in rows]
    return [
        f"  {left:<{width}}->{right}"
        + (f"   in {row.units} blocks" if row.units and blocks else "")
        for (left, _, right), row in zip(texts, rows, strict=True)
    ]


def _next(op: str, found: Sequence[Discovery], model: str | None) -> str:
    """Return advice: how to plan with the discovered rows, and how to store them."""
    lines = dict.fromkeys(line for f in found for line in f.lines[1:])
    written = "".join(f'\n        "{line}",' for line in lines)
    return (
        f"to plan with them:  hap plan {model or 'MODEL'}\n"
        f'to keep them, in the model file:\n\nrules = {{\n    "{op}": [{written}\n    ],\n}}'
    )
