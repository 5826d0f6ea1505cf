"""Arithmetic and memory traffic of each operator.

Operators not named here are memory traffic: they read their inputs and write their outputs. Only
the operators in :data:`hap.ir.graph.FREE` cost nothing, because they run no kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from hap.cluster.work import SMALL_BYTES, Work
from hap.ir.graph import FREE, Graph, Node
from hap.ir.graph_builder import LOOKUPS
from hap.ir.image_operators import MAX_POOLS, POOLS
from hap.synthesizer.rules.rule_table import Call, numel
from hap.synthesizer.rules.textual_rules import lines_of, written_flops


def _product(rows: int) -> Callable[[Call], float]:
    return lambda call: 2.0 * call.ins[rows].numel * call.out.shape[-1]


def _tensordot(call: Call) -> float:
    summed = numel(call.ins[1].shape[dim] for dim in call.arg(3))
    return 2.0 * call.ins[0].numel * call.ins[1].numel / summed


def _convolution(call: Call) -> float:
    weight = call.ins[1]
    return 2.0 * call.out.numel * numel(weight.shape[1:])


def _convolution_backward(call: Call) -> float:
    grad, _, weight = call.ins
    products = sum(o is not None for o in call.node.outputs[:2])
    return 2.0 * grad.numel * numel(weight.shape[1:]) * products


TILE = 128
"""Rows and columns of scores that attention computes or skips as one in half precision (Dao, 2023)."""


def _attention(products: int, first: int) -> Callable[[Call], float]:
    def flops(call: Call) -> float:
        q, k, v = call.ins[first : first + 3]
        causal = next(a for a in call.node.args if isinstance(a, bool))
        tile = TILE if q.dtype in ("bfloat16", "float16") else 1
        rows, columns = (-(-x.shape[-2] // tile) for x in (q, k))
        tiles = rows * (columns + (tile > 1)) / 2 if causal else rows * columns
        scores = numel(q.shape[:-2]) * tiles * tile**2
        return products * scores * (q.shape[-1] + v.shape[-1])

    return flops


def _recurrence(call: Call) -> float:
    weight = next(t for t in call.ins if len(t.shape) == 2)
    return 2.0 * numel(call.ins[0].shape[:2]) * weight.numel


FLOPS: dict[str, tuple[str, Callable[[Call], float]]] = {
    "aten.mm.default": ("matmul", _product(0)),
    "aten.bmm.default": ("matmul", _product(0)),
    "aten.addmm.default": ("matmul", _product(1)),
    "aten.linear.default": ("matmul", _product(0)),
    "aten.matmul.default": ("matmul", _product(0)),
    "aten.tensordot.default": ("matmul", _tensordot),
    "hap.expert_mm.default": ("matmul", _product(0)),
    "hap.expert_mm_backward.default": ("matmul", _product(0)),
    "aten.convolution.default": ("conv", _convolution),
    "aten.convolution_backward.default": ("conv_backward", _convolution_backward),
    "hap.sdpa.default": ("attention", _attention(2, 0)),
    "hap.sdpa_backward.default": ("attention_backward", _attention(5, 1)),
    "hap.recurrence.default": ("matmul", _recurrence),
    "hap.recurrence_backward.default": ("matmul", _recurrence),
}
"""Op -> (kind of work, floating-point operations of the whole call)."""

STEP_LAUNCHES = {"hap.recurrence.default": 7, "hap.recurrence_backward.default": 7}
"""Op -> kernels of a step of an LSTM; a GRU has at most as many. The steps are the second dim."""

LOWERED = ("matmul", "attention", "attention_backward")
"""Kinds of work that :func:`torch.set_float32_matmul_precision` makes faster."""

ALWAYS_LOWERED = ("conv", "conv_backward")
"""Kinds of work that torch does in TF32 by default, where a device has it."""

ELEMENTS: dict[str, str] = {
    f"{'' if op.startswith('hap.') else 'aten.'}{op}": kind
    for kind, ops in {
        "math": [
            "gelu.default", "gelu_backward.default", "silu.default", "silu_backward.default",
            "sigmoid.default", "exp.default", "log.default", "erf.default", "logsumexp.default",
            "_softmax.default", "_log_softmax.default", "_log_softmax_backward_data.default",
        ],
        "tanh": ["tanh.default"],
        "loss": ["hap.cross_entropy.default", "hap.cross_entropy_backward.default"],
        "reduce": ["sum.dim_IntList", "sum.default", "amax.default", "mean.dim", "var.correction",
                   "_softmax_backward_data.default"],
        "norm": ["native_layer_norm.default", "_fused_rms_norm.default", "hap.group_norm.default"],
        "norm_backward": ["native_layer_norm_backward.default", "_fused_rms_norm_backward.default",
                          "hap.group_norm_backward.default"],
        "pool": [f"{op}.default" for op in (*MAX_POOLS, *POOLS)],
        "pool_backward": [f"{op}_backward.default" for op in (*MAX_POOLS, *POOLS)],
        "random": ["native_dropout.default"],
    }.items()
    for op in ops
}  # fmt: skip
"""Op -> kind of work that may be slower than its traffic, with one operation per element of the
largest tensor. The device's ``efficiency`` decides."""

FUNCTIONS = {"aten.gelu_backward.default": 2}
"""Op -> operations per element, if not one: here the normal distribution and its density."""


def product_operations(graph: Graph) -> dict[str, float]:
    """Return the floating-point operations of a step's products by dtype; float32 if there are none."""
    found: dict[str, float] = {}
    for node in graph.nodes:
        if node.op in FLOPS and (work := node_work(node, graph)).flops:
            found[work.dtype] = found.get(work.dtype, 0.0) + work.flops
    return found or {"float32": 1.0}


def node_work(node: Node, graph: Graph) -> Work:
    """Return the work of the undivided operator; both figures are 0 if it runs no kernel."""
    call = Call(node=node, tensors=graph.tensors)
    tensors = [*dict.fromkeys(call.ins), *(o for o in call.outs if o is not None)]
    dtype = call.out.dtype
    if node.op in FREE:
        return Work("memory", dtype, 0.0, 0.0)
    if node.op in LOOKUPS:
        tensors[0] = call.out  # of the table, what is written is read
    traffic = float(sum(t.nbytes for t in tensors))
    small = traffic <= SMALL_BYTES
    if node.op in FLOPS:
        kind, flops = FLOPS[node.op]
        if dtype == "float32" and kind in LOWERED:
            dtype = graph.products
        if dtype == "float32" and kind in ALWAYS_LOWERED:
            dtype = "tfloat32"
        launches = STEP_LAUNCHES[node.op] * call.ins[0].shape[1] if node.op in STEP_LAUNCHES else 1
        return Work(kind, dtype, flops(call), traffic, small, launches)
    said = written_flops(call, lines_of(call, graph.rules) or ())
    if said is not None:
        dtype = graph.products if dtype == "float32" else dtype
        return Work("matmul", dtype, said, traffic, small)
    count = FUNCTIONS.get(node.op, 1) * max(t.numel for t in tensors)
    return Work(ELEMENTS.get(node.op, "memory"), dtype, float(count), traffic, small)


_UPDATE_KERNELS = (1, 3, 9)


def update_work(dtype: str, states: int) -> Work:
    """Return the optimizer's work per element and byte; multiply it by both.

    It reads parameter, gradient and states, and writes parameter and states: the minimum, of one kernel.
    Torch's SGD, SGD with momentum and Adam run 1, 3 and 9 by default, which are counted as operations.
    """
    kernels = _UPDATE_KERNELS[min(states, len(_UPDATE_KERNELS) - 1)]
    return Work("update", dtype, float(kernels), float(3 + 2 * states))
