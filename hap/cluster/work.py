"""The kinds of work that operators do; a device has a rate for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

PRODUCTS: Final = ("matmul", "conv", "conv_backward", "attention", "attention_backward")
"""Kinds that run on the units for matrix products, at the rate of their dtype."""

ELEMENTWISE: Final = (
    "math", "tanh", "loss", "reduce", "norm", "norm_backward", "pool", "pool_backward", "random",
    "update",
)  # fmt: skip
"""Kinds that may take longer than their memory traffic: functions such as ``exp``, losses, sums,
layer norms, pooling, random masks and the optimizer's step. They count elements; see
:mod:`hap.synthesizer.cost.operator_work`."""

GENERAL: Final[Mapping[str, str]] = {
    "conv_backward": "conv",
    "attention_backward": "attention",
    "tanh": "math",
    "loss": "math",
    "norm": "reduce",
    "norm_backward": "norm",
    "pool_backward": "pool",
}
"""Kind -> the more general kind whose efficiency replaces a missing one, if it has one itself."""

PRECISIONS: Final = ("highest", "high", "medium")
"""Precisions of float32 products: names of :func:`torch.set_float32_matmul_precision`. The last two
allow TF32."""


SMALL_BYTES: Final = 2**18
"""Largest total of an operator's tensors that counts as small."""


class Work(NamedTuple):
    """The work of one operator, or of one local shard of it.

    Attributes:
        kind: one of ``PRODUCTS`` or ``ELEMENTWISE``, or ``memory``.
        dtype: ``float32``, ``float16``, ``bfloat16``, ``float64``, ``int64``, ...
        flops: operations; a multiplication and an addition count as two.
        bytes: bytes read from and written to the device's memory.
        small: its undivided tensors have :data:`SMALL_BYTES` at most. Small operators mostly follow
            one another, and a CPU's caches then still hold what an operator needs to start.
        launches: kernels that follow one another, as the steps of a recurrence do.
    """

    kind: str
    dtype: str
    flops: float
    bytes: float
    small: bool = False
    launches: int = 1
