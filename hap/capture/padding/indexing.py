"""Indexing by masks, and by the places of their true entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from hap.capture.padding import functions
from hap.capture.padding.dims import Mask, Refused, Trace

WHOLE = slice(None)


def _is_mask(value: Any) -> bool:
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return isinstance(example, Tensor) and example.dtype in (torch.bool, torch.uint8)


def _key(key: Any) -> tuple[Any, ...]:
    return tuple(key) if isinstance(key, tuple | list) else (key,)


def _chosen(trace: Trace, key: tuple[Any, ...], size: Any) -> tuple[Mask, tuple[int, ...], int, tuple[Any, ...]]:  # fmt: skip
    """Return the mask of an index, which dims of it are places, at which dim they begin, and the rest of the index.

    Args:
        size: returns the size of a dim of the result.
    """
    at = next((k for k, part in enumerate(key) if part != WHOLE), len(key))
    if at == len(key):
        raise Refused
    if _is_mask(key[at]):
        mask = trace.name_mask(key[at], size(at))
        return mask, tuple(range(len(mask.shape))), at, key[at + 1 :]
    found = []
    for part in key[at:]:
        if part not in trace.indices:
            break
        found.append(trace.indices[part])
    if not found or any(mask is not found[0][0] for mask, _ in found):
        raise Refused
    return found[0][0], tuple(c for _, c in found), at, key[at + len(found) :]


def _is_static(rest: tuple[Any, ...]) -> bool:
    return all(part is None or isinstance(part, int | slice) for part in rest)


def getitem(trace: Trace) -> None:
    """``x[mask]``, ``x[places]``, and parts of padded tensors."""
    node = trace.node
    x, given = node.args
    if not isinstance(x.meta.get("example_value"), Tensor):  # type: ignore[union-attr]
        if x in trace.places:
            trace.indices[node] = trace.places[x], int(given)  # type: ignore[index, arg-type]
        return
    key = _key(given)
    if x in trace.places and len(key) == 2 and key[0] == WHOLE and isinstance(key[1], int):
        trace.indices[node] = trace.places[x], key[1] % len(trace.places[x].shape)  # type: ignore[index]
        return
    if all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in key):
        _check_part(trace, x, key)
        return
    example = node.meta["example_value"]
    try:
        mask, components, at, rest = _chosen(trace, key, lambda at: example.shape[at])
    except Refused:
        _lookup(trace, x, key)
        return
    dims = trace.dims(x)
    _check_fits(mask, components, dims[at:])
    if not _is_static(rest) or any(isinstance(d, Mask) for d in dims[at + len(components) :][: len(rest)]):
        raise Refused
    if rest:
        x = trace.call(functions.rows, x, mask.node, components, at)
        trace.become(torch.Tensor.__getitem__, x, (*[WHOLE] * (at + 1), *rest))
    else:
        trace.become(functions.rows, x, mask.node, components, at)


def _check_fits(mask: Mask, components: tuple[int, ...], dims: tuple[Any, ...]) -> None:
    """Raise ``Refused`` unless dims are as large as those of the mask that index them."""
    if len(set(components)) < len(components):
        raise Refused
    for component, dim in zip(components, dims, strict=False):
        size = dim.size if isinstance(dim, Mask) else dim
        if size < mask.shape[component]:
            raise Refused


def _check_part(trace: Trace, x: Any, key: tuple[Any, ...]) -> None:
    """Raise ``Refused`` if an index of numbers and slices takes a part of a dim with padding."""
    dims = list(trace.dims(x))
    before = key[: key.index(Ellipsis)] if Ellipsis in key else key
    after = key[key.index(Ellipsis) + 1 :] if Ellipsis in key else ()
    pairs = [*zip([k for k in before if k is not None], dims, strict=False)]
    pairs += zip([k for k in reversed(after) if k is not None], reversed(dims), strict=False)
    if any(isinstance(dim, Mask) and part != WHOLE for part, dim in pairs):
        raise Refused("which of the rows is in this place is data")


def _lookup(trace: Trace, x: Any, key: tuple[Any, ...]) -> None:
    """Look rows up in a tensor without padding, by whole numbers."""
    if trace.is_padded(x) or any(_is_mask(part) for part in key):
        raise Refused
    found = trace.call(torch.Tensor.__getitem__, x, tuple(trace.filled(part, 0) for part in key))
    trace.become(functions.harmless, found, trace.inside(trace.node))


def setitem(trace: Trace) -> None:
    """``x[mask] = rows`` and ``x[places] = rows``."""
    x, given, value = trace.node.args
    key = _key(given)
    if all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in key):
        _check_part(trace, x, key)
        return
    written = trace.dims(value)
    rank = len(trace.dims(x))
    at = next((k for k, part in enumerate(key) if part != WHOLE), 0)

    def size(at: int) -> Any:
        example = value.meta["example_value"]  # type: ignore[union-attr]
        return example.shape[at]

    mask, components, at, rest = _chosen(trace, key, size)
    after = rank - at - len(components)
    _check_fits(mask, components, trace.dims(x)[at:])
    if any(part != WHOLE for part in rest) or trace.is_padded(x):
        raise Refused
    if any(isinstance(d, Mask) for d in written):
        padded_at = len(written) - after - 1
        masks = [k for k, d in enumerate(written) if isinstance(d, Mask)]
        if masks != [padded_at] or written[padded_at] is not mask or (at and padded_at != at):
            raise Refused
    trace.become(functions.put, x, value, mask.node, components, at)


def nonzero(trace: Trace) -> None:
    """``mask.nonzero()``, ``torch.where(mask)``."""
    node = trace.node
    given, example = node.args[0], node.meta["example_value"]
    if not _is_mask(given):
        given = trace.call(torch.ne, given, 0)
        given.meta["example_value"] = node.args[0].meta["example_value"]  # type: ignore[union-attr]
    tuples = isinstance(example, tuple | list)
    mask = trace.name_mask(given, (example[0] if tuples else example).shape[0])
    trace.places[node] = mask
    trace.become(functions.indices if tuples else functions.nonzero, mask.node)


def where(trace: Trace) -> None:
    """``torch.where`` of one argument; that of three chooses entries."""
    from hap.capture.padding.rules import entrywise

    if len(trace.node.args) + len(trace.node.kwargs) == 1:
        nonzero(trace)
    else:
        entrywise(trace)


def masked_select(trace: Trace) -> None:
    """``torch.masked_select``."""
    x, mask = trace.node.args
    dims, shape = trace.dims(x), trace.dims(mask)
    if dims != shape:
        raise Refused("the tensor and the mask have other shapes")
    found = trace.name_mask(mask, trace.node.meta["example_value"].shape[0])  # type: ignore[arg-type]
    trace.become(functions.rows, x, found.node, tuple(range(len(shape))), 0)


def index_select(trace: Trace) -> None:
    """``torch.index_select`` by places."""
    x, dim, index = trace.node.args
    if index not in trace.indices:
        raise Refused
    mask, component = trace.indices[index]  # type: ignore[index]
    at = int(dim) % len(trace.dims(x))  # type: ignore[arg-type]
    _check_fits(mask, (component,), trace.dims(x)[at:])
    trace.become(functions.rows, x, mask.node, (component,), at)


def index_add(trace: Trace) -> None:
    """``index_add`` of rows at their places."""
    node = trace.node
    x, dim, index, source = node.args
    if index not in trace.indices or dim != 0 or trace.is_padded(x):
        raise Refused
    mask, component = trace.indices[index]  # type: ignore[index]
    _check_fits(mask, (component,), trace.dims(x))
    if trace.dims(source)[:1] != (mask,) or any(isinstance(d, Mask) for d in trace.dims(source)[1:]):
        raise Refused
    function = functions.add_rows_ if str(node.target).endswith("_") else functions.add_rows
    trace.become(function, x, source, mask.node, (component,), node.kwargs.get("alpha", 1))


INDEXING: dict[str, Callable[[Trace], None]] = {
    "getitem": getitem, "setitem": setitem, "nonzero": nonzero, "argwhere": nonzero, "where": where,
    "masked_select": masked_select, "index_select": index_select, "index_add": index_add,
}  # fmt: skip
"""Functions that index by masks or places."""
