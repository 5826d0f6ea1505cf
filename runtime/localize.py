"""What an operator's plain arguments become on one rank: global sizes turn into local ones.

Pure data: one row per operator that takes sizes. Every operator not named here is called on
local tensors with the arguments that the whole tensors had.
"""

from __future__ import annotations

from hap.graph import Arg, Node

Shape = tuple[int, ...]

# Operator -> the argument that holds the shape of its (first) result.
RESULT_SHAPE: dict[str, int] = {
    "aten.view.default": 1,
    "aten.expand.default": 1,
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.empty.memory_format": 0,
    "aten.new_zeros.default": 1,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 1,
    "aten.new_full.default": 1,
    "aten.slice_backward.default": 1,
    "aten.select_backward.default": 1,
}

# Operators that make tensors from nothing and so must be told on which device.
FACTORIES = frozenset(
    f"aten.{op}"
    for op in [
        "full.default",
        "zeros.default",
        "ones.default",
        "empty.memory_format",
        "scalar_tensor.default",
        "arange.default",
        "arange.start",
        "arange.start_step",
    ]
)

# Operators whose kernels read some input as if it were contiguous (seen on CPU, torch 2.13).
CONTIGUOUS = frozenset({"aten.native_layer_norm_backward.default"})


def localize(node: Node, out_shapes: tuple[Shape | None, ...]) -> tuple[Arg, ...]:
    """The arguments of ``node`` on a rank with these local results; tensors stay references."""
    args = list(node.args)
    if node.op in RESULT_SHAPE:
        args[RESULT_SHAPE[node.op]] = next(s for s in out_shapes if s is not None)
    return tuple(args)
