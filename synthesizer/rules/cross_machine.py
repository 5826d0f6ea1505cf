"""Rules of collectives between machines, as operators of the step inside a machine.

They treat each entry of every other dim separately: each device may run its part and, if they are
linear, its term.
"""

from __future__ import annotations

from hap.synthesizer.rules.rule_table import Call, Row, equation, letters, rule


@rule("mesh.all_gather", "mesh.reduce_scatter", "mesh.slice")
def _along_a_dim(call: Call) -> list[Row]:
    kept = letters(call.ins[0], fixed=(call.dim(1, call.ins[0]),))
    return equation(call, [kept], [kept], linear=[{0}])


@rule("mesh.all_to_all")
def _between_dims(call: Call) -> list[Row]:
    x = call.ins[0]
    kept = letters(x, fixed=(call.dim(1, x), call.dim(2, x)))
    return equation(call, [kept], [kept], linear=[{0}])


@rule("mesh.all_reduce_lse")
def _not_linear(call: Call) -> list[Row]:
    kept = letters(call.ins[0])
    return equation(call, [kept], [kept])


@rule("mesh.all_reduce", "mesh.mask")
def _elementwise(call: Call) -> list[Row]:
    kept = letters(call.ins[0])
    return equation(call, [kept], [kept], linear=[{0}])
