"""What becomes of a function of torch whose arguments have padding.

A rule raises ``Refused``, lets the call as it is, or replaces it by one that leaves padding out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.padding import functions
from hap.capture.padding.dims import Dim, Mask, Refused, Trace, name_of

Rule = Callable[[Trace], None]


def _argument(trace: Trace, place: int, name: str, default: Any = None) -> Any:
    args, kwargs = trace.node.args, trace.node.kwargs
    return args[place] if len(args) > place else kwargs.get(name, default)


def _function(trace: Trace) -> Callable[..., Any]:
    target = trace.node.target
    return getattr(Tensor, target) if isinstance(target, str) else target


# --- each entry by itself ---


def is_entrywise(name: str) -> bool:
    """Return whether a function computes each entry of its result from those at the same place."""
    packet = getattr(torch.ops.aten, name, None)
    if name in CONVERSIONS or packet is None or not hasattr(packet, "overloads"):
        return name in CONVERSIONS
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(torch.Tag.pointwise in t and torch.Tag.nondeterministic_seeded not in t for t in tags)


CONVERSIONS = frozenset(
    "float double half bfloat16 long int bool to type type_as detach clone contiguous zeros_like ones_like "
    "full_like empty_like relu6 hardtanh softsign tanhshrink logsigmoid nan_to_num masked_fill where".split()
)
"""Functions of entries that are no operators of their own, or make new ones of a tensor's shape."""

SMOOTH = frozenset(
    "add sub mul neg relu gelu silu tanh sigmoid eq ne lt le gt ge bitwise_and bitwise_or bitwise_not logical_and "
    "logical_or logical_not where masked_fill clamp maximum minimum abs".split()
)
"""Functions of entries with finite derivatives at all numbers; the others get harmless ones in padding."""


def entrywise(trace: Trace) -> None:
    """Check that padding meets padding of the same mask; make it harmless where that matters."""
    node = trace.node
    dims = trace.dims(node)
    for given in node.all_input_nodes:
        own = trace.dims(given)
        for dim, of_result in zip(reversed(own), reversed(dims), strict=False):
            if isinstance(of_result, Mask) and dim is not of_result and dim != 1:
                raise Refused("other rows are at the same places")
    name = name_of(node)
    if name in SMOOTH or name in CONVERSIONS or str(node.target).endswith("_"):
        return
    safe = {n: trace.call(functions.harmless, n, trace.inside(n))
            for n in node.all_input_nodes if trace.is_padded(n)}  # fmt: skip
    node.args = torch.fx.node.map_arg(node.args, lambda n: safe.get(n, n))
    node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: safe.get(n, n))


# --- functions that combine the entries of some dims ---


def _dims_of(given: Any, rank: int) -> list[int]:
    every = given is None or given in ((), [])
    listed = range(rank) if every else [given] if isinstance(given, int) else given
    return [d % rank for d in listed]


def _only(mixed: Callable[[Trace, int], Any], *whole: int) -> Rule:
    """Return the rule of a function that combines entries of some dims of its first tensor.

    Args:
        mixed: these dims, given the number of dims; of them none may have padding.
        whole: places of other tensors, such as weights, none of whose dims may.
    """

    def rule(trace: Trace) -> None:
        dims = trace.dims(_argument(trace, 0, "input"))
        found = mixed(trace, len(dims))
        if any(isinstance(dims[d], Mask) for d in _dims_of(found, len(dims))):
            raise Refused("it combines rows")
        if any(trace.is_padded(trace.node.args[k]) for k in whole if len(trace.node.args) > k):
            raise Refused

    return rule


def _dim(place: int, default: Any = None) -> Rule:
    """Return the rule of a function that combines the entries of the dim that it is given."""
    return _only(lambda trace, rank: _argument(trace, place, "dim", default))


def _rows_alone(trace: Trace, rank: int) -> list[int]:
    return list(range(1, rank))


def _normalized(trace: Trace, rank: int) -> list[int]:
    return list(range(rank - len(_argument(trace, 1, "normalized_shape")), rank))


def leave(trace: Trace) -> None:
    """A function that only moves dims or entries of dims without padding."""


def reshape(trace: Trace) -> None:
    """Views, by their result's sizes; a dim with padding keeps its place among the entries."""
    x = trace.node.args[0]
    if _with_places(trace.dims(x)) != _with_places(trace.dims(trace.node)):
        raise Refused("a dim of rows is divided or joined with others")
    if x in trace.places and len(trace.dims(trace.node)) == 1:
        trace.indices[trace.node] = trace.places[x], 0  # type: ignore[index]
    trace.become(torch.reshape, x, trace.sizes(trace.node))


def _with_places(dims: Sequence[Dim]) -> list[tuple[Mask, int]]:
    """Return each dim with padding, and how many entries are before it."""
    before, found = 1, []
    for dim in dims:
        if isinstance(dim, Mask):
            found.append((dim, before))
        before *= dim.size if isinstance(dim, Mask) else dim
    return found


def expand(trace: Trace) -> None:
    """Repeat entries of dims of size 1, also for each row."""
    trace.become(Tensor.expand, trace.node.args[0], trace.sizes(trace.node))


def create(trace: Trace) -> None:
    """``torch.zeros`` and its like, with rows."""
    name, args = name_of(trace.node), trace.node.args
    kwargs = {k: v for k, v in trace.node.kwargs.items() if k not in ("size", "fill_value")}
    first = args[:1] if name.startswith("new_") else ()
    last = [trace.node.kwargs.get("fill_value", args[-1])] if name.endswith("full") else []
    trace.become(_function(trace), *first, trace.sizes(trace.node), *last, **kwargs)


def dropout(trace: Trace) -> None:
    """Dropout that does nothing."""
    if _argument(trace, 1, "p", 0.5) and _argument(trace, 2, "training", True):
        raise Refused("it draws a random number for each of them")


def lookup(trace: Trace) -> None:
    """Embeddings, with a whole number that exists in padding."""
    x, *rest = trace.node.args
    if any(map(trace.is_padded, rest)):
        raise Refused
    trace.node.args = (trace.filled(x, 0), *rest)


def gather(trace: Trace) -> None:
    """``gather`` in a dim without padding, by numbers that exist."""
    _dim(1)(trace)
    x, index = trace.node.args[0], _argument(trace, 2, "index")
    if trace.inside(x) != trace.inside(index):
        raise Refused
    trace.become(torch.gather, x, _argument(trace, 1, "dim"), trace.filled(index, 0))


def one_hot(trace: Trace) -> None:
    """``one_hot`` with its number of classes."""
    x, classes = trace.node.args[0], _argument(trace, 1, "num_classes", -1)
    trace.become(F.one_hot, trace.filled(x, 0), classes)


def matmul(trace: Trace) -> None:
    """Products of matrices; rows that are summed over are zeros in padding."""
    a, b = trace.node.args[:2]
    left, right = trace.dims(a), trace.dims(b)
    summed = right[-2] if len(right) > 1 else right[-1]
    if left[-1] is not summed and left[-1] != summed:
        raise Refused("other rows are at the same places")
    if isinstance(summed, Mask):
        trace.node.args = (trace.filled(a, 0), trace.filled(b, 0))


def concatenate(trace: Trace) -> None:
    """``cat`` and ``stack`` in a dim without padding."""
    parts: Any = _argument(trace, 0, "tensors")
    dims = trace.dims(trace.node)
    at = int(_argument(trace, 1, "dim", 0)) % len(dims)
    rest = [list(trace.inside(part)) for part in parts]
    if name_of(trace.node) != "stack":
        rest = [r[:at] + r[at + 1 :] for r in rest]
    if isinstance(dims[at], Mask) or any(r != rest[0] for r in rest):
        raise Refused


def reduction(trace: Trace) -> None:
    """Sums and other functions of the entries of some dims."""
    name, (x, *rest) = name_of(trace.node), trace.node.args
    if rest and isinstance(rest[0], torch.fx.Node):
        entrywise(trace)  # the maximum of two tensors
        return
    kwargs = dict(trace.node.kwargs)
    if name in ("var", "std") and rest and isinstance(rest[0], bool):
        kwargs["unbiased"], rest = rest[0], [None, *rest[1:]]
        kwargs["dim"], rest = None, []
    place = 1 if name in ("norm", "vector_norm") else 0
    dim = rest[place] if len(rest) > place else kwargs.get("dim")
    dims = trace.dims(x)
    if not any(isinstance(dims[d], Mask) for d in _dims_of(dim, len(dims))):
        return
    if name in ("max", "min") and dim is not None:
        raise Refused("it tells which row has it")
    own = {"sum": functions.sum_, "mean": functions.mean, "var": functions.var, "std": functions.std}
    if name in own:
        trace.become(own[name], x, *rest, inside=trace.inside(x), **kwargs)
    else:
        trace.node.args = (trace.call(functions.without_effect, x, trace.inside(x), name), *rest)


# --- losses ---


def _bound(trace: Trace) -> tuple[dict[str, Any], str]:
    """Return the arguments of a loss by name, and its reduction."""
    function = getattr(F, name_of(trace.node))
    bound = inspect.signature(function).bind(*trace.node.args, **trace.node.kwargs)
    given = dict(bound.arguments)
    old = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if old != (None, None):
        reduction = torch.nn._reduction.legacy_get_string(*old)
    return given, reduction


def loss_of_entries(trace: Trace) -> None:
    """A loss of each entry, and their mean or sum."""
    given, reduction = _bound(trace)
    dims: list[Dim] = []
    for value in given.values():
        own = list(trace.dims(value))
        dims = [1] * (len(own) - len(dims)) + dims
        for k, dim in enumerate(own, len(dims) - len(own)):
            if isinstance(dims[k], Mask) and dim is not dims[k] and dim != 1:
                raise Refused("other rows are at the same places")
            if isinstance(dim, Mask) and dims[k] not in (1, dim):
                raise Refused("other rows are at the same places")
            dims[k] = dim if dims[k] == 1 else dims[k]
    _loss(trace, given, tuple(dims), reduction)


def loss_of_rows(trace: Trace) -> None:
    """A loss of each row, the first dim of all tensors with padding, and their mean or sum."""
    given, reduction = _bound(trace)
    padded = [trace.dims(v) for v in given.values() if trace.is_padded(v)]
    if any(d[0] is not padded[0][0] or any(isinstance(x, Mask) for x in d[1:]) for d in padded):
        raise Refused("other rows are at the same places")
    _loss(trace, given, padded[0][:1], reduction)


def _loss(trace: Trace, given: dict[str, Any], dims: tuple[Dim, ...], reduction: str) -> None:
    safe = {k: trace.call(functions.harmless, v, trace.inside(v)) if trace.is_padded(v) else v
            for k, v in given.items()}  # fmt: skip
    trace.become(functions.loss, name_of(trace.node), safe, trace.inside(dims), reduction)


def class_loss(trace: Trace) -> None:
    """Cross-entropy: padding has the class that is ignored."""
    given, reduction = _bound(trace)
    x, target = trace.dims(given["input"]), trace.dims(given["target"])
    classes = 0 if len(x) == 1 else 1
    if isinstance(x[classes], Mask):
        raise Refused("it combines rows")
    if len(x) == len(target):  # probabilities of classes
        if len(x) != 2:
            raise Refused
        loss_of_rows(trace)
        return
    if trace.inside((*x[:classes], *x[classes + 1 :])) != trace.inside(target):
        raise Refused("other rows are at the same places")
    ignored = given.setdefault("ignore_index", -100)
    given["target"] = trace.filled(given["target"], ignored)
    trace.become(getattr(F, name_of(trace.node)), **given, reduction=reduction)


def ctc_loss(trace: Trace) -> None:
    """The loss of sequences whose labels are one after the other, as many as a mask chooses."""
    targets = _argument(trace, 1, "targets")
    others = [n for n in trace.node.all_input_nodes if n is not targets]
    if any(map(trace.is_padded, others)) or len(trace.dims(targets)) != 1:
        raise Refused
    packed = trace.call(functions.first, targets, trace.inside(targets))
    trace.node.replace_input_with(targets, packed)


RULES: dict[str, Rule] = {
    **dict.fromkeys("view reshape flatten unsqueeze squeeze unflatten view_as".split(), reshape),
    **dict.fromkeys("expand expand_as broadcast_to".split(), expand),
    **dict.fromkeys("transpose permute t swapaxes movedim getattr".split(), leave),
    **dict.fromkeys("zeros ones empty full new_zeros new_ones new_empty new_full".split(), create),
    **dict.fromkeys("dropout dropout1d dropout2d alpha_dropout".split(), dropout),
    **dict.fromkeys("argmax argmin cumsum narrow select flip".split(), _dim(1)),
    **dict.fromkeys("normalize cosine_similarity".split(), _dim(2, 1)),
    **dict.fromkeys("topk".split(), _dim(2, -1)), **dict.fromkeys("sort argsort glu".split(), _dim(1, -1)),
    **dict.fromkeys("chunk split".split(), _dim(2, 0)), "unbind": _dim(1, 0),
    **dict.fromkeys("layer_norm rms_norm".split(), _only(_normalized, 2, 3)),
    "linear": _only(lambda trace, rank: [rank - 1], 1, 2),
    "group_norm": _only(_rows_alone, 2, 3),
    **dict.fromkeys("conv1d conv2d conv3d".split(), _only(_rows_alone, 1, 2)),
    **dict.fromkeys("max_pool1d max_pool2d avg_pool1d avg_pool2d".split(), _only(_rows_alone)),
    **dict.fromkeys("adaptive_avg_pool1d adaptive_avg_pool2d interpolate pad".split(), _only(_rows_alone)),
    **dict.fromkeys("matmul mm bmm".split(), matmul), **dict.fromkeys("cat stack concat".split(), concatenate),
    "embedding": lookup, "gather": gather, "one_hot": one_hot,
    **dict.fromkeys(["sum", "mean", "var", "std", *functions.FILLS], reduction),
    **dict.fromkeys("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss "
                    "binary_cross_entropy_with_logits hinge_embedding_loss poisson_nll_loss "
                    "margin_ranking_loss".split(), loss_of_entries),
    **dict.fromkeys("cosine_embedding_loss triplet_margin_loss multi_margin_loss "
                    "multilabel_soft_margin_loss".split(), loss_of_rows),
    **dict.fromkeys("cross_entropy nll_loss".split(), class_loss), "ctc_loss": ctc_loss,
}  # fmt: skip
"""Functions of torch -> what becomes of them; others may be functions of entries."""


def leaves_dims_alone(trace: Trace) -> bool:
    """Apply the rule of functions of entries, if the node calls one."""
    if not is_entrywise(name_of(trace.node)):
        return False
    entrywise(trace)
    return True
