"""Rules of operators that create tensors: a rank can create any shard.

Random operators draw other numbers for other shards, and equal ones for replicas: hap.runtime.context.
"""

from __future__ import annotations

from hap.synthesizer.rules.rule_table import Call, Row, equation, letters, rule


@rule("aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format",
      "aten.scalar_tensor.default", "aten.rand.default", "aten.randn.default",
      "aten.randint.default", "aten.randint.low")  # fmt: skip
def _constant(call: Call) -> list[Row]:
    return equation(call, [], [letters(call.out)])


@rule("aten.new_ones.default", "aten.new_zeros.default", "aten.new_full.default",
      "aten.new_empty.default")  # fmt: skip
def _new(call: Call) -> list[Row]:
    # The input only provides its dtype: its placement and that of the result are independent.
    (x,), out = call.ins, letters(call.out)
    unlike = [d for d, size in enumerate(x.shape) if (size,) != call.out.shape[d : d + 1]]
    rows = equation(call, [letters(x, "x")], [out], depends=[set()], linear=[{0}])
    rows += equation(call, [letters(x, fixed=unlike)], [out], depends=[set()])
    return list(dict.fromkeys(rows))


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.eye.default",
      "aten.eye.m", "hap.constant.default")  # fmt: skip
def _by_place(call: Call) -> list[Row]:
    # Its elements depend on their positions: made whole, then sliced where needed.
    return equation(call, [], [[None for _ in call.out.shape]])
