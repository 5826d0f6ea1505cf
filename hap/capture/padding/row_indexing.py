"""Indexing by masks, and by the places of their true entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hap.capture.padding import functions
from hap.capture.padding.dims import Choice, Mask, Refused, Trace, name_of
from hap.capture.padding.entries import entrywise

WHOLE = slice(None)


def _is_mask(value: Any) -> bool:
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return isinstance(example, Tensor) and example.dtype == torch.bool


def _is_part(part: Any) -> bool:
    """Return whether a part of an index is none of a tensor."""
    whole = isinstance(part, int) and not isinstance(part, bool)
    return part is None or part is Ellipsis or isinstance(part, slice) or whole


def _key(x: Any, key: Any) -> tuple[Any, ...]:
    """Return the parts of an index, without an ellipsis."""
    parts = key if isinstance(key, tuple) else (key,)
    if not any(part is Ellipsis for part in parts):
        return parts
    at = next(k for k, part in enumerate(parts) if part is Ellipsis)
    used = sum(_dims_used(part) for part in parts if part is not Ellipsis)
    rank = x.meta["example_value"].dim()
    return (*parts[:at], *[WHOLE] * (rank - used), *parts[at + 1 :])


def _dims_used(part: Any) -> int:
    if _is_mask(part):
        return int(part.meta["example_value"].dim())
    return int(part is not None)


class _Rows(NamedTuple):
    """An index that chooses rows: ``x[before][components of choice at dim at][rest]``."""

    before: tuple[Any, ...]
    at: int
    choice: Choice
    components: tuple[int, ...]
    rest: tuple[Any, ...]


def _rows(trace: Trace, key: tuple[Any, ...], size: Callable[[int], Any]) -> _Rows:
    """Return the rows that an index chooses.

    Args:
        size: returns the size of a dim of the result.

    Raises:
        Refused: it chooses none, or by several masks.
    """
    start = next((k for k, part in enumerate(key) if not _is_part(part)), len(key))
    before = key[:start]
    at = sum(not isinstance(part, int) for part in before)
    if start < len(key) and _is_mask(key[start]):
        choice = trace.choose(key[start], size(at))
        return _Rows(before, at, choice, tuple(range(len(choice.shape))), key[start + 1 :])
    found = []
    for part in key[start:]:
        if not isinstance(part, fx.Node) or part not in trace.indices:
            break
        found.append(trace.indices[part])
    if not found or any(choice != found[0][0] for choice, _ in found):
        raise Refused
    components = tuple(component for _, component in found)
    return _Rows(before, at, found[0][0], components, key[start + len(found) :])


def _before(trace: Trace, x: Any, chosen: _Rows) -> tuple[Any, list[Any]]:
    """Return a tensor after the parts of an index before the rows, and its dims."""
    dims = list(trace.dims(x))
    if all(part == WHOLE for part in chosen.before):
        return x, dims
    if trace.is_padded(x):
        raise Refused
    left: list[Any] = []
    for part in chosen.before:
        dim = 1 if part is None else dims.pop(0)
        if not isinstance(part, int):
            left.append(dim)  # slices are dims before the rows, whose size has no effect
    return trace.call(torch.Tensor.__getitem__, x, chosen.before), left + dims


def getitem(trace: Trace) -> None:
    """``x[mask]``, ``x[places]``, and parts of padded tensors."""
    node = trace.node
    x: Any
    given: Any
    x, given = node.args
    if not isinstance(x.meta.get("example_value"), Tensor):
        if x in trace.places:
            trace.indices[node] = trace.places[x], given
        return
    key = _key(x, given)
    if x in trace.places and len(key) == 2 and key[0] == WHOLE and isinstance(key[1], int):
        trace.indices[node] = trace.places[x], key[1] % len(trace.places[x].shape)
        return
    if x in trace.groups:
        _one_of_each_group(trace, x, key)
        return
    if all(map(_is_part, key)):
        _check_part(trace, x, key)
        return
    if isinstance(key[0], fx.Node) and key[0] in trace.counting:
        _one_of_each_row(trace, x, key)
        return
    example = node.meta["example_value"]
    try:
        chosen = _rows(trace, key, lambda at: example.shape[at])
    except Refused:
        if any(map(_is_mask, key)):
            raise
        _lookup(trace, x, key)
        return
    x, dims = _before(trace, x, chosen)
    _check_fits(chosen.choice, chosen.components, dims[chosen.at :])
    after = dims[chosen.at + len(chosen.components) :]
    if not all(map(_is_part, chosen.rest)) or any(
        isinstance(d, Mask) for d in after[: len(chosen.rest)]
    ):
        raise Refused
    if chosen.rest:
        x = trace.call(functions.rows, x, chosen.choice.node, chosen.components, chosen.at)
        trace.become(torch.Tensor.__getitem__, x, (*[WHOLE] * (chosen.at + 1), *chosen.rest))
    else:
        trace.become(functions.rows, x, chosen.choice.node, chosen.components, chosen.at)


def _check_fits(choice: Choice, components: Sequence[int], dims: Sequence[Any]) -> None:
    """Raise ``Refused`` unless dims are as large as those of the mask that index them."""
    if len(set(components)) < len(components):
        raise Refused
    for component, dim in zip(components, dims, strict=False):
        size = dim.size if isinstance(dim, Mask) else dim
        if size < choice.shape[component]:
            raise Refused


def _check_part(trace: Trace, x: Any, key: tuple[Any, ...]) -> None:
    """Raise ``Refused`` if an index of numbers and slices takes a part of a dim with padding."""
    taken = [part for part in key if part is not None]
    pairs = zip(taken, trace.dims(x), strict=False)
    if any(isinstance(dim, Mask) and part != WHOLE for part, dim in pairs):
        raise Refused("which row is at this index depends on data")


def _one_of_each_row(trace: Trace, x: Any, key: tuple[Any, ...]) -> None:
    """``x[torch.arange(len(x)), classes]``: an entry of each row."""
    dims, (rows, *others) = trace.dims(x), key
    mask = trace.counting[rows]
    if dims[0] is not mask or any(isinstance(d, Mask) for d in dims[1 : len(key)]):
        raise Refused
    if any(not _is_part(part) and trace.dims(part) != (mask,) for part in others):
        raise Refused("it combines these rows with other rows")
    index = (rows, *(part if _is_part(part) else trace.filled(part, 0) for part in others))
    trace.become(torch.Tensor.__getitem__, x, index)


def _one_of_each_group(trace: Trace, x: Any, key: tuple[Any, ...]) -> None:
    """``x[:, 0]`` and ``x[:, -1]``: the first or last row of each group."""
    at = key[1] if len(key) > 1 else WHOLE
    others = [part for k, part in enumerate(key) if k != 1]
    if (
        at not in (0, -1)
        or any(part != WHOLE for part in others)
        or not x.meta["example_value"].is_floating_point()
    ):
        raise Refused("which row is at this index depends on data")
    trace.become(functions.one_of_each, x, trace.groups[x].node, at == -1)


def _lookup(trace: Trace, x: Any, key: tuple[Any, ...]) -> None:
    """Look rows up in a tensor without padding, by whole numbers."""
    if trace.is_padded(x) or any(_is_mask(part) for part in key):
        raise Refused
    found = trace.call(torch.Tensor.__getitem__, x, tuple(trace.filled(part, 0) for part in key))
    trace.become(functions.harmless, found, trace.inside(trace.node))


def setitem(trace: Trace) -> None:
    """``x[mask] = rows`` and ``x[places] = rows``; of a tensor without padding, its rows in turn."""
    value: Any
    x, given, value = trace.node.args
    key = _key(x, given)
    if all(map(_is_part, key)):
        _check_part(trace, x, key)
        return
    written = trace.dims(value)
    symbol = value.meta["example_value"].shape if trace.is_padded(value) else ()
    chosen = _rows(trace, key, lambda at: symbol[at] if at < len(symbol) else None)
    if any(part != WHOLE for part in chosen.rest) or trace.is_padded(x):
        raise Refused
    view, dims = _before(trace, x, chosen)
    _check_fits(chosen.choice, chosen.components, dims[chosen.at :])
    rows_at = len(written) - (len(dims) - chosen.at - len(chosen.components)) - 1
    masks = [k for k, d in enumerate(written) if isinstance(d, Mask)]
    if masks and (masks != [rows_at] or written[rows_at] is not chosen.choice.mask):
        raise Refused("it combines these rows with other rows")
    if rows_at >= 0 and not masks and written[rows_at] != 1:
        if chosen.at or len(chosen.components) < len(chosen.choice.shape):
            raise Refused
        value = trace.call(functions.in_turn, value, chosen.choice.node)
        value = trace.call(torch.flatten, value, 0, len(chosen.choice.shape) - 1)
    if chosen.at and 0 <= rows_at != chosen.at:
        raise Refused
    trace.become(functions.put, view, value, chosen.choice.node, chosen.components, chosen.at)


def writes_rows(node: fx.Node) -> bool:
    """Return whether a node writes a tensor where a mask is true; numbers are written by an operator."""
    if getattr(node.target, "__name__", "") != "setitem" or not isinstance(node.args[2], fx.Node):
        return False
    key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return any(map(_is_mask, key))


def nonzero(trace: Trace) -> None:
    """``mask.nonzero()``, ``torch.where(mask)``."""
    node = trace.node
    given: Any = node.args[0]
    example = node.meta["example_value"]
    if not _is_mask(given):
        numbers, given = given, trace.call(torch.ne, given, 0)
        given.meta["example_value"] = numbers.meta["example_value"]
    tuples = isinstance(example, tuple | list)
    choice = trace.choose(given, (example[0] if tuples else example).shape[0])
    trace.places[node] = choice
    trace.become(functions.indices if tuples else functions.nonzero, choice.node)


def where(trace: Trace) -> None:
    """``torch.where`` of one argument; that of three chooses entries."""
    if len(trace.node.args) + len(trace.node.kwargs) == 1:
        nonzero(trace)
    else:
        entrywise(trace)


def masked_select(trace: Trace) -> None:
    """``torch.masked_select``."""
    mask: Any
    x, mask = trace.node.args
    dims, shape = trace.dims(x), trace.dims(mask)
    if dims != shape:
        raise Refused("the tensor and the mask have different shapes")
    choice = trace.choose(mask, trace.node.meta["example_value"].shape[0])
    trace.become(functions.rows, x, choice.node, tuple(range(len(shape))), 0)


def index_select(trace: Trace) -> None:
    """``torch.index_select`` by places, or by other whole numbers."""
    x, dim, index = trace.argument(0, "input"), trace.argument(1, "dim"), trace.argument(2, "index")
    at = dim % len(trace.dims(x))
    if index in trace.indices:
        choice, component = trace.indices[index]
        _check_fits(choice, (component,), trace.dims(x)[at:])
        trace.become(functions.rows, x, choice.node, (component,), at)
    elif isinstance(trace.dims(x)[at], Mask):
        raise Refused
    elif trace.is_padded(index):
        found = trace.call(torch.index_select, x, at, trace.filled(index, 0))
        trace.become(functions.harmless, found, trace.inside(trace.node))


def index_add(trace: Trace) -> None:
    """``index_add`` of rows at their places, or at those that other whole numbers tell."""
    node = trace.node
    x, dim, index, source = (
        trace.argument(k, n) for k, n in enumerate(("input", "dim", "index", "source"))
    )
    if trace.is_padded(x):
        raise Refused
    at = dim % len(trace.dims(x))
    (rows,) = trace.dims(index)
    parts = list(trace.dims(source))
    if parts.pop(at) is not rows or any(isinstance(d, Mask) for d in parts):
        raise Refused("it combines these rows with other rows")
    if index in trace.indices and at == 0:
        choice, component = trace.indices[index]
        _check_fits(choice, (component,), trace.dims(x))
        function = functions.add_rows_ if str(node.target).endswith("_") else functions.add_rows
        trace.become(function, x, source, choice.node, (component,), trace.argument(4, "alpha", 1))
    else:
        node.replace_input_with(index, trace.filled(index, 0))
        node.replace_input_with(source, trace.filled(source, 0))


def scatter(trace: Trace) -> None:
    """``scatter_add`` and ``scatter_reduce`` of rows to the places that whole numbers tell."""
    node = trace.node
    x, dim, index, source = (
        trace.argument(k, n) for k, n in enumerate(("input", "dim", "index", "src"))
    )
    at = dim % len(trace.dims(x))
    own, given = trace.inside(index), trace.inside(source)
    if trace.is_padded(x) or own != given or any(part for k, part in enumerate(own) if k != at):
        raise Refused("it combines these rows with other rows")
    if name_of(node) == "scatter_add":
        node.replace_input_with(index, trace.filled(index, 0))
        node.replace_input_with(source, trace.filled(source, 0))
        return
    rest = {k: v for k, v in node.kwargs.items() if k not in ("input", "dim", "index", "src")}
    in_place = str(node.target).endswith("_")
    trace.become(
        functions.scatter_reduce, x, at, index, source, own, in_place, *node.args[4:], **rest
    )


INDEXING: dict[str, Callable[[Trace], None]] = {
    "getitem": getitem, "setitem": setitem, "nonzero": nonzero, "argwhere": nonzero, "where": where,
    "masked_select": masked_select, "index_select": index_select, "index_add": index_add,
    "scatter_add": scatter, "scatter_reduce": scatter,
}  # fmt: skip
"""Functions that index by masks or places."""
