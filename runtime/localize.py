"""Localize an operator's arguments: global sizes become a rank's local sizes.

Each operator that takes sizes has a row here. All other operators are called on local tensors
with unchanged arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from hap.ir.graph import Arg, Node
from hap.ir.image_operators import RESIZES

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
    "aten.unfold_backward.default": 1,
    "aten.diagonal_backward.default": 1,
    **{f"aten.{op}_backward.default": 2 for op in RESIZES},
}

# Operator -> (the argument that holds a size of its result, which size).
RESULT_SIZE: dict[str, tuple[int, int]] = {
    "aten.embedding_dense_backward.default": (2, 0),
    "hap.expert_mm_backward.default": (3, 0),
}


class Lookup(NamedTuple):
    """An operator that looks up indices in a dim, and its treatment of other ranks' indices.

    ``numbers``: the argument with the indices. The looked-up dim is ``dim``, or the value of the
    argument ``dim_arg``; it is a dim of the argument ``table``, or of the result if that is None.
    ``skip``: the argument that sets an ignored index; other ranks' indices become that. Without it
    they become 0, and the argument ``zero`` (None: the result) is zeroed there.
    ``inside``: in the zeroed tensor, the dims of the indices replace the looked-up dim.
    """

    numbers: int
    table: int | None = None
    dim: int = -1
    dim_arg: int | None = None
    skip: int | None = None
    zero: int | None = None
    inside: bool = False

    def where(self, node: Node, rank: int) -> int:
        """Return the looked-up dim of a table with ``rank`` dims."""
        dim = self.dim if self.dim_arg is None else int(node.args[self.dim_arg])
        return dim % max(rank, 1)


LOOKUPS: dict[str, Lookup] = {
    "aten.embedding.default": Lookup(numbers=1, table=0, dim=0),
    "aten.embedding_dense_backward.default": Lookup(numbers=1, dim=0, skip=3),
    "aten.gather.default": Lookup(numbers=2, table=0, dim_arg=1),
    "aten.index_select.default": Lookup(numbers=2, table=0, dim_arg=1, inside=True),
    "aten.scatter_add.default": Lookup(numbers=2, table=0, dim_arg=1, zero=3),
    "aten.index_add.default": Lookup(numbers=2, table=0, dim_arg=1, zero=3, inside=True),
    "aten.nll_loss_forward.default": Lookup(numbers=1, table=0, skip=4),
    "aten.nll_loss_backward.default": Lookup(numbers=2, skip=5),
    "hap.cross_entropy.default": Lookup(numbers=1, table=0, skip=2),
    "hap.cross_entropy_backward.default": Lookup(numbers=3, skip=5),
    "hap.expert_mm.default": Lookup(numbers=2, table=1, dim=0, skip=3),
    "hap.expert_mm_backward.default": Lookup(numbers=2, dim=0, skip=4),
}

# Operators without tensor inputs, which need a device argument.
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
) | {"hap.constant.default"}

# Operators whose kernels ignore the strides of an input (seen on CPU, torch 2.13).
CONTIGUOUS = frozenset(
    {"aten.native_layer_norm_backward.default", "aten.adaptive_max_pool3d_backward.default"}
)


_KNOWN = ("aten.", "hap.", "prims.", "mesh.")


def reads_contiguous(op: str) -> bool:
    """Return whether inputs must be contiguous: a user's kernel may assume it, shards are views."""
    return op in CONTIGUOUS or not op.startswith(_KNOWN)


def localize(node: Node, out_shapes: tuple[Shape | None, ...]) -> tuple[Arg, ...]:
    """Return ``node``'s arguments for local results of these shapes; tensors stay references."""
    args = list(node.args)
    if node.op in RESULT_SHAPE:
        args[RESULT_SHAPE[node.op]] = next(s for s in out_shapes if s is not None)
    if node.op in RESULT_SIZE:
        at, dim = RESULT_SIZE[node.op]
        args[at] = next(s for s in out_shapes if s is not None)[dim]
    return tuple(args)
