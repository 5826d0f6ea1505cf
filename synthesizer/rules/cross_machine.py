"""Rules of collectives between machines, as operators of the step inside a machine.

They move data along one dim, or add terms up, and treat all other dims entry by entry. So each
device of a machine may do its part of them and, where they are linear, its term as well.
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
