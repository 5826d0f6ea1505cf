"""Draws the last lines of a random module: a scalar loss of its last value and of others."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.grammar import Scope


def loss(scope: Scope) -> None:
    """Add ``loss = ...; return loss``: a loss of the last value, plus up to two of other values."""
    terms = [_term(scope, scope.names[0])]
    for _ in range(scope.draw(st.integers(0, 2))):
        terms.append(_term(scope, scope.value()))
    scope.run(f"loss = {' + '.join(terms)}", ["loss"])
    scope.lines.append("return loss")


def _term(scope: Scope, v: str) -> str:
    shape = scope.shape(v)
    kinds = ["mean", "sum", "square", "mse"]
    if len(shape) >= 1:
        kinds += ["logsumexp", "smooth", "binary"]
    if len(shape) == 2 and shape[1] > 1:
        kinds += ["cross", "cross", "nll", "cross_flat"]
    if len(shape) > 2:
        kinds += ["cross_flat", "cross_moved"]
    reduction = scope.one(("mean", "sum"))
    match scope.one(kinds):
        case "mean":
            return f"{v}.mean()"
        case "sum":
            return f"({v} * {scope.other(shape)}).sum()"
        case "square":
            return f"{v}.pow(2).mean()"
        case "mse":
            return f"F.mse_loss({v}, {scope.input(shape)}, reduction={reduction!r})"
        case "logsumexp":
            return f"{v}.logsumexp({scope.dim(v)}).mean()"
        case "smooth":
            return f"F.smooth_l1_loss({v}, {scope.input(shape)}, reduction={reduction!r})"
        case "binary":
            target = f"{scope.input(shape, 'bool')}.to({v}.dtype)"
            return f"F.binary_cross_entropy_with_logits({v}, {target}, reduction={reduction!r})"
        case "cross":
            y = scope.input(shape[:1], shape[1])
            ignored = f", ignore_index={scope.draw(st.integers(0, shape[1] - 1))}"
            more = ignored if shape[0] > 2 and scope.chance() else ""
            return f"F.cross_entropy({v}, {y}, reduction={reduction!r}{more})"
        case "nll":
            y = scope.input(shape[:1], shape[1])
            return f"F.nll_loss(F.log_softmax({v}, -1), {y}, reduction={reduction!r})"
        case "cross_flat":
            y = scope.input(shape[:-1], shape[-1])
            return f"F.cross_entropy({v}.flatten(0, -2), {y}.flatten(), reduction={reduction!r})"
        case "cross_moved":
            y = scope.input((shape[0], *shape[2:]), shape[1])
            return f"F.cross_entropy({v}, {y}, reduction={reduction!r})"
    raise AssertionError("no such loss")
