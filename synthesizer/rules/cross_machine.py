"""Rules of collectives between machines, as operators of the step inside a machine.

They treat each entry of every other dim separately: each device may run its part and, if they are
linear, its term.
"""

from __future__ import annotations

from hap.synthesizer.rules.rule_table import Call, Row, equation, letters, rule


@rule("mesh.all_gather", "mesh.reduce_scatter", "mesh.slice", "mesh.all_to_all")
def _along_dims(call: Call) -> list[Row]:
    x, ends = call.ins[0], (1, 2) if call.node.op == "mesh.all_to_all" else (1,)
    kept = letters(x, fixed=[call.dim(k, x) for k in ends])
    return equation(call, [kept], [kept], linear=[{0}])


@rule("mesh.all_reduce", "mesh.all_reduce_lse", "mesh.mask")
def _elementwise(call: Call) -> list[Row]:
    kept = letters(call.ins[0])
    return equation(call, [kept], [kept], linear=[] if "lse" in call.node.op else [{0}])
