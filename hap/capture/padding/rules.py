"""Rules for functions of torch whose arguments have padding.

A rule raises ``Refused``, keeps the call, or replaces it by one that leaves padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from hap.capture.padding import functions
from hap.capture.padding.dims import Choice, Dim, Mask, Refused, Trace, is_check, is_number, name_of
from hap.capture.padding.entries import entrywise, is_entrywise
from hap.capture.padding.losses import LOSSES

Rule = Callable[[Trace], None]


def _function(trace: Trace) -> Callable[..., Any]:
    target = trace.node.target
    return getattr(Tensor, target) if isinstance(target, str) else target


def _only(mixed: Callable[[Trace, int], Any], *whole: int) -> Rule:
    """Return the rule of a function that combines entries of some dims of its first tensor.

    Args:
        mixed: these dims, given the number of dims; of them none may have padding.
        whole: places of other tensors, such as weights, none of whose dims may.
    """

    def rule(trace: Trace) -> None:
        dims = trace.dims(trace.argument(0, "input"))
        found = mixed(trace, len(dims))
        if any(isinstance(dims[d], Mask) for d in functions.dims_of(found, len(dims))):
            raise Refused("it combines rows")
        if any(trace.is_padded(trace.node.args[k]) for k in whole if len(trace.node.args) > k):
            raise Refused

    return rule


def _dim(place: int, default: Any = None) -> Rule:
    """Return the rule of a function that combines the entries of the dim that it is given."""
    return _only(lambda trace, rank: trace.argument(place, "dim", default))


def _rows_alone(trace: Trace, rank: int) -> list[int]:
    return list(range(1, rank))


def _normalized(trace: Trace, rank: int) -> list[int]:
    return list(range(rank - len(trace.argument(1, "normalized_shape")), rank))


def unfold(trace: Trace) -> None:
    """Windows of a dim, or, as a function of ``torch.nn.functional``, of images."""
    if trace.node.op == "call_method":
        _only(lambda trace, rank: trace.argument(1, "dimension"))(trace)
    else:
        _only(_rows_alone)(trace)


def leave(trace: Trace) -> None:
    """A function that only moves dims or entries of dims without padding."""


def flip(trace: Trace) -> None:
    """``flip`` of dims without padding, given one by one or together."""
    given = trace.node.args[1:]
    listed = given[0] if given and isinstance(given[0], tuple | list) else given
    _only(lambda trace, rank: listed or trace.argument(1, "dims"))(trace)


def pad(trace: Trace) -> None:
    """``pad`` of dims without padding; sizes are in pairs, of the last dim first."""
    dims = trace.dims(trace.node.args[0])
    sizes = trace.argument(1, "pad")
    if any(size and isinstance(dims[-1 - k // 2], Mask) for k, size in enumerate(sizes)):
        raise Refused("it adds rows before or after these rows")


def unbind(trace: Trace) -> None:
    """``unbind``, also of places into those of each dim."""
    x: Any = trace.node.args[0]
    if x in trace.places and trace.argument(1, "dim", 0) in (1, -1):
        trace.places[trace.node] = trace.places[x]
    _dim(1, 0)(trace)


def reshape(trace: Trace) -> None:
    """Views, by their result's sizes; a dim with padding keeps its place among the entries."""
    x: Any = trace.node.args[0]
    if _divide(trace, x):
        return
    if _with_places(trace.dims(x)) != _with_places(trace.dims(trace.node)):
        raise Refused("a dim of rows is divided or joined with others")
    if x in trace.places and len(trace.dims(trace.node)) == 1:
        trace.indices[trace.node] = trace.places[x], 0
    trace.become(torch.reshape, x, trace.sizes(trace.node))


def _divide(trace: Trace, x: Any) -> bool:
    """Divide the rows that a mask of two dims chooses by the first, as ``x[mask].view(len(x), -1, width)`` does."""
    sizes, dims = trace.node.meta["example_value"].shape, trace.dims(x)
    table = trace.tables.get(dims[0]) if dims else None
    alone = [k for k, size in enumerate(sizes) if isinstance(size, torch.SymInt)] == [1]
    if not table or not alone or sizes[0] != table.shape[0] or tuple(sizes[2:]) != dims[1:]:
        return False
    trace.groups[trace.node] = table
    trace.become(torch.reshape, x, (*table.shape, *dims[1:]))
    return True


def unique_consecutive(trace: Trace) -> None:
    """Numbers without those that are equal to the one before, of which only checks read how many there are."""
    if not _is_only_checked(trace.node):
        raise Refused


def _is_only_checked(node: fx.Node) -> bool:
    return all(
        is_check(user) or (is_number(user) and _is_only_checked(user)) for user in node.users
    )


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
    x: Any = trace.node.args[0]
    if x in trace.places and trace.dims(x)[1:] == (1,):
        trace.repeated[trace.node] = trace.places[x]
    trace.become(Tensor.expand, x, trace.sizes(trace.node))


def create(trace: Trace) -> None:
    """``torch.zeros`` and its like, with rows."""
    name, args = name_of(trace.node), trace.node.args
    kwargs = {k: v for k, v in trace.node.kwargs.items() if k not in ("size", "fill_value")}
    first = args[:1] if name.startswith("new_") else ()
    last = [trace.argument(len(first) + 1, "fill_value")] if name.endswith("full") else []
    trace.become(_function(trace), *first, trace.sizes(trace.node), *last, **kwargs)


def dropout(trace: Trace) -> None:
    """Dropout that does nothing."""
    if trace.argument(1, "p", 0.5) and trace.argument(2, "training", True):
        raise Refused("it draws a random number for each row")


def lookup(trace: Trace) -> None:
    """Embeddings, with a whole number that exists in padding."""
    x, *rest = trace.node.args
    if (
        any(map(trace.is_padded, rest))
        or trace.argument(3, "max_norm")
        or trace.argument(5, "scale_grad_by_freq")
    ):
        raise Refused
    trace.node.args = (trace.filled(x, 0), *rest)


def gather(trace: Trace) -> None:
    """``gather`` in a dim without padding, by numbers that exist or by the places of rows."""
    _dim(1)(trace)
    x, index = trace.node.args[0], trace.argument(2, "index")
    at = trace.argument(1, "dim") % len(trace.dims(x))
    if (choice := _places_of(trace, index)) and not trace.is_padded(x):
        others = [dims[:at] + dims[at + 1 :] for dims in (trace.dims(x), trace.dims(index))]
        if at or others[0] != others[1] or choice.shape != trace.dims(x)[:1]:
            raise Refused
        trace.become(functions.rows, x, choice.node, (0,), 0)
        return
    if trace.inside(x) != trace.inside(index):
        raise Refused
    trace.become(torch.gather, x, trace.argument(1, "dim"), trace.filled(index, 0))


def _places_of(trace: Trace, index: Any) -> Choice | None:
    """Return the choice of whose entries an index has the places, repeated over its other dims."""
    choice, component = trace.indices.get(index, (trace.repeated.get(index), 0))
    return choice if choice and len(choice.shape) == 1 and component == 0 else None


def batch_norm(trace: Trace) -> None:
    """Batch norm with the running statistics."""
    if trace.argument(5, "training", False):
        raise Refused("it combines rows")


def attention(trace: Trace) -> None:
    """Attention inside of each row."""
    given = [trace.dims(n) for n in trace.node.all_input_nodes]
    if any(isinstance(d, Mask) for dims in given for d in dims[-2:]):
        raise Refused("it combines rows")
    if trace.argument(4, "dropout_p", 0.0):
        raise Refused("it draws a random number for each row")


def one_hot(trace: Trace) -> None:
    """``one_hot`` with its number of classes."""
    x, classes = trace.node.args[0], trace.argument(1, "num_classes", -1)
    trace.become(F.one_hot, trace.filled(x, 0), classes)


def matmul(trace: Trace) -> None:
    """Products of matrices; rows that are summed over are zeros in padding."""
    a, b = trace.node.args[:2]
    left, right = trace.dims(a), trace.dims(b)
    summed = right[-2] if len(right) > 1 else right[-1]
    if left[-1] != summed:
        raise Refused("it combines these rows with other rows")
    if isinstance(summed, Mask):
        trace.node.args = (trace.filled(a, 0), trace.filled(b, 0))


def concatenate(trace: Trace) -> None:
    """``cat`` and ``stack``; rows of several masks are rows of a longer one."""
    parts: Any = trace.argument(0, "tensors")
    dim = int(trace.argument(1, "dim", 0))
    example = trace.node.meta["example_value"]
    at = dim % example.dim()
    rest = [list(trace.inside(part)) for part in parts]
    if name_of(trace.node) == "stack":
        joined: tuple[Dim, ...] = ()
    else:
        joined = tuple(trace.dims(part)[at] for part in parts)
        rest = [r[:at] + r[at + 1 :] for r in rest]
    if any(r != rest[0] for r in rest):
        raise Refused("it combines these rows with other rows")
    if not any(isinstance(d, Mask) for d in joined):
        return
    size = example.shape[at].node.expr
    if size.is_number or trace.joined.setdefault(size, joined) != joined:
        raise Refused("different rows are joined to the same number of rows")
    if size not in trace.masks:
        inside = [
            d.inside if isinstance(d, Mask) else trace.call(torch.ones, d, dtype=torch.bool)
            for d in joined
        ]
        total = sum(d.size if isinstance(d, Mask) else d for d in joined)
        trace.masks[size] = Mask(trace.call(torch.cat, inside), total)


def arange(trace: Trace) -> None:
    """The numbers of all rows, with which only :func:`hap.capture.padding.row_indexing.getitem` may index."""
    (dim,) = trace.dims(trace.node)
    if len(trace.node.args) != 1 or not isinstance(dim, Mask):
        raise Refused
    trace.counting[trace.node] = dim
    trace.become(torch.arange, dim.size, **trace.node.kwargs)


def reduction(trace: Trace) -> None:
    """Sums and other functions of the entries of some dims."""
    name, (x, *rest) = name_of(trace.node), trace.node.args
    named = {"axis": "dim", "keepdims": "keepdim"}  # as in numpy
    trace.node.kwargs = {named.get(k, k): v for k, v in trace.node.kwargs.items()}
    if isinstance(trace.argument(1, "other"), fx.Node):
        entrywise(trace)  # the maximum of two tensors
        return
    kwargs = dict(trace.node.kwargs)
    if name in ("var", "std") and rest and isinstance(rest[0], bool):
        kwargs["unbiased"], rest = rest[0], []
    place = 1 if name in ("norm", "linalg_vector_norm") else 0
    power = trace.argument(1, "p" if name == "norm" else "ord", 2)
    if place and (not isinstance(power, int | float) or power <= 0):
        raise Refused("such a norm of zeros is not 0")
    dim = rest[place] if len(rest) > place else kwargs.get("dim")
    dims = trace.dims(x)
    if not any(isinstance(dims[d], Mask) for d in functions.dims_of(dim, len(dims))):
        return
    if name in ("max", "min") and dim is not None:
        raise Refused("it returns the index of a row")
    if name in functions.REDUCTIONS:
        trace.become(functions.REDUCTIONS[name], x, *rest, inside=trace.inside(x), **kwargs)
    else:
        trace.node.args = (trace.call(functions.without_effect, x, trace.inside(x), name), *rest)


RULES: dict[str, Rule] = {
    **dict.fromkeys(["view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "view_as"], reshape),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expand),
    **dict.fromkeys(["transpose", "permute", "t", "swapaxes", "movedim", "getattr"], leave),
    **dict.fromkeys(["zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"], create),
    **dict.fromkeys(["dropout", "dropout1d", "dropout2d", "alpha_dropout"], dropout),
    **dict.fromkeys(["argmax", "argmin", "cumsum", "narrow", "select"], _dim(1)),
    **dict.fromkeys(["normalize", "cosine_similarity"], _dim(2, 1)),
    **dict.fromkeys(["topk"], _dim(2, -1)), **dict.fromkeys(["sort", "argsort", "glu"], _dim(1, -1)),
    **dict.fromkeys(["chunk", "split"], _dim(2, 0)), "unbind": unbind, "size": leave,
    **dict.fromkeys(["layer_norm", "rms_norm"], _only(_normalized, 2, 3)),
    "unfold": unfold, "linear": _only(lambda trace, rank: [rank - 1], 1, 2),
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], _only(_rows_alone, 1, 2)),
    **dict.fromkeys(["max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d"], _only(_rows_alone)),
    **dict.fromkeys(["adaptive_avg_pool1d", "adaptive_avg_pool2d", "interpolate"], _only(_rows_alone)),
    **dict.fromkeys(["matmul", "mm", "bmm"], matmul), **dict.fromkeys(["cat", "stack", "concat"], concatenate),
    "group_norm": _only(_rows_alone, 2, 3), "batch_norm": batch_norm, "scaled_dot_product_attention": attention,
    "embedding": lookup, "arange": arange, "unique_consecutive": unique_consecutive, "gather": gather, "one_hot": one_hot, "flip": flip, "pad": pad,
    **dict.fromkeys([*functions.REDUCTIONS, *functions.FILLS], reduction),
    **LOSSES,
}  # fmt: skip
"""Functions of torch -> their rules; :mod:`hap.capture.padding.entries` has those of entries."""


def rule_of(name: str) -> Rule:
    """Return the rule of a function.

    Raises:
        Refused: there is none.
    """
    if name in RULES:
        return RULES[name]
    if is_entrywise(name):
        return entrywise
    raise Refused
