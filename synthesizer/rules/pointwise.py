"""Rules of elementwise operators."""

from __future__ import annotations

from hap.synthesizer.rules.rule_table import Call, Row, broadcast, equation, letters, rule

# Nonlinear in every argument, or on integers and Booleans: no partial inputs.
PLAIN = """
abs.default acos.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor ceil.default
clamp.default clamp_max.default clamp_min.default cos.default elu.default eq.Scalar eq.Tensor
erf.default exp.default expm1.default floor.default floor_divide.default ge.Scalar ge.Tensor
gelu.default gt.Scalar gt.Tensor hardsigmoid.default hardswish.default hardtanh.default isinf.default isnan.default
le.Scalar le.Tensor leaky_relu.default log.default log1p.default logical_and.default
logical_not.default logical_or.default lt.Scalar lt.Tensor maximum.default minimum.default
ne.Scalar ne.Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
reciprocal.default relu.default remainder.Scalar round.default rsqrt.default rsub.Scalar
sigmoid.default sign.default silu.default sin.default softplus.default sqrt.default tanh.default
add.Scalar sub.Scalar
native_dropout.default
"""

# Linear in the arguments at these positions (each set jointly, the sets one at a time).
_FIRST = """
alias.default neg.default mul.Scalar div.Tensor div.Scalar threshold_backward.default gelu_backward.default
elu_backward.default silu_backward.default sigmoid_backward.default tanh_backward.default
leaky_relu_backward.default hardtanh_backward.default hardswish_backward.default
hardsigmoid_backward.default native_dropout_backward.default softplus_backward.default
mish_backward.default logit_backward.default hardshrink_backward.default
"""
LINEAR: dict[str, list[set[int]]] = {
    **{f"aten.{op}": [{0}] for op in _FIRST.split()},
    "aten.mul.Tensor": [{0}, {1}], "aten.where.self": [{1, 2}],
    "hap.by_mode.default": [{0, 1}], "hap.in_training.default": [{0}],
}  # fmt: skip


def pointwise(call: Call, linear: list[set[int]]) -> list[Row]:
    out = call.out
    count = len(call.ins)
    return equation(
        call,
        [broadcast(t, out) for t in call.ins],
        [letters(out) for _ in call.node.outputs],
        linear=[group for group in linear if max(group) < count],
    )


@rule(*(f"aten.{op}" for op in PLAIN.split()))
def _plain(call: Call) -> list[Row]:
    return pointwise(call, [])


@rule(*LINEAR)
def _linear(call: Call) -> list[Row]:
    return pointwise(call, LINEAR[call.node.op])


@rule("aten.ones_like.default", "aten.zeros_like.default", "aten.full_like.default",
      "aten.empty_like.default", "aten.rand_like.default", "aten.randn_like.default",
      "aten.bernoulli.p")  # fmt: skip
def _like(call: Call) -> list[Row]:
    # The terms of a sum have its shape, which is all that the rule needs.
    given = letters(call.out)
    return equation(call, [given], [given], depends=[set()], linear=[{0}])


@rule("aten.add.Tensor", "aten.sub.Tensor")
def _sum(call: Call) -> list[Row]:
    # With a number as second argument the sum is affine, not linear.
    return pointwise(call, [{0, 1}] if len(call.ins) == 2 else [])


@rule("aten.masked_fill.Scalar")
def _masked_fill(call: Call) -> list[Row]:
    return pointwise(call, [{0}] if call.arg(2) == 0 else [])


@rule("aten._to_copy.default", "hap.rounded_with_feedback.default")
def _to_copy(call: Call) -> list[Row]:
    floats = all("float" in t.dtype for t in (call.ins[0], call.out))
    return pointwise(call, [{0}] if floats else [])
