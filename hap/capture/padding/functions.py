"""Functions of tensors with padding: dims of which some entries do not count.

An argument ``inside`` has an entry for each dim of a tensor: a boolean tensor of the dim's size that says which of its
entries count, or None if all do. Padding holds a harmless value from the start, and no result that
leaves the padded tensors depends on it, so that neither its numbers nor its gradients reach others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.wide_dtype import wide_dtype

Inside = Sequence[Tensor | None]


def filled(x: Tensor, inside: Inside, value: Any) -> Tensor:
    """Return ``x`` with ``value`` in its padding."""
    for dim, counts in enumerate(inside):
        if counts is not None:
            x = torch.where(counts.view(-1, *[1] * (x.dim() - dim - 1)), x, value)
    return x


def harmless(x: Tensor, inside: Inside) -> Tensor:
    """Fill padding with a number at which common functions and their derivatives are finite."""
    if x.dtype == torch.bool:
        return filled(x, inside, False)
    return filled(x, inside, 0.5 if x.is_floating_point() else 1)


def count(mask: Tensor) -> Tensor:
    """Return how many entries of a mask are true, without dims."""
    return mask.sum()


# --- rows of a mask ---


def rows(x: Tensor, mask: Tensor, components: Sequence[int], at: int) -> Tensor:
    """Return the entries of ``x`` that a mask chooses, and those that it does not as padding, in one dim.

    Args:
        x: its dims from ``at`` on are indexed.
        mask: boolean; its entries in row-major order are those of the result's dim ``at``.
        components: the dim of the mask for each indexed dim of ``x``, as in ``x[mask.nonzero()[:, 0]]``.
    """
    found = _as_mask(_first(x, len(components), at), mask, components)
    found = found.expand(*mask.shape, *found.shape[mask.dim() :]).flatten(0, mask.dim() - 1)
    zero = False if x.dtype == torch.bool else 0
    found = filled(found, (mask.flatten(),), 0.5 if x.is_floating_point() else zero)
    return found.movedim(0, at) if at else found


def _first(x: Tensor, count: int, at: int) -> Tensor:
    """Return a view with ``count`` dims, from ``at`` on, before the others."""
    return x.movedim([*range(at, at + count)], [*range(count)]) if at else x


def _as_mask(x: Tensor, mask: Tensor, components: Sequence[int]) -> Tensor:
    """Return ``x`` with the dims of the mask first, of size 1 where none of ``x`` is indexed."""
    used = range(len(components))
    x = x[tuple(slice(mask.shape[d]) for d in components)]
    x = x.permute(*sorted(used, key=components.__getitem__), *range(len(components), x.dim()))
    sizes = [mask.shape[d] if d in components else 1 for d in range(mask.dim())]
    return x.reshape(*sizes, *x.shape[len(components) :])


def _of_rows(given: Any, x: Tensor, mask: Tensor, components: Sequence[int]) -> Tensor:
    """Return the sums of rows, which begin with the dim of the mask's entries, for the dims of ``x``."""
    rest = x.shape[len(components) :]
    given = torch.as_tensor(given, dtype=x.dtype, device=x.device)
    given = given.expand(mask.numel(), *rest).unflatten(0, mask.shape)
    given = given.where(mask.view(*mask.shape, *[1] * len(rest)), 0)
    left = [d for d in range(mask.dim()) if d not in components]
    summed: Tensor = given.sum(left) if left else given
    return summed.permute(*_places(components), *range(len(components), summed.dim()))


def _places(components: Sequence[int]) -> list[int]:
    """Return the rank of each component: the dim at which it is among those that are in order."""
    order = sorted(components)
    return [order.index(c) for c in components]


def put(x: Tensor, value: Any, mask: Tensor, components: Sequence[int], at: int) -> None:
    """Write rows into ``x``, as ``x[mask] = value`` does."""
    view = _first(x, len(components), at)[tuple(slice(mask.shape[d]) for d in components)]
    if at and isinstance(value, Tensor) and value.dim() > at:
        value = value.movedim(at, 0)
    hit = mask
    for d in reversed(range(mask.dim())):
        hit = hit if d in components else hit.any(d)
    hit = hit.permute(_places(components))
    hit = hit.view(*hit.shape, *[1] * (view.dim() - hit.dim()))
    view.copy_(torch.where(hit, _of_rows(value, view, mask, components), view))


def in_turn(source: Tensor, mask: Tensor) -> Tensor:
    """Return the next row of ``source`` (N, ...) for each entry of a mask that is true; (*mask.shape, ...)."""
    at = (mask.flatten().cumsum(0) - 1).clamp(min=0).view(mask.shape)
    table = source.reshape(len(source), -1)
    return F.embedding(at, table).view(*mask.shape, *source.shape[1:])


def add_rows(x: Tensor, value: Any, mask: Tensor, components: Sequence[int], alpha: Any) -> Tensor:
    """Return ``x`` plus the rows at their places in its first dim; ``x`` may have more of these."""
    sizes = tuple(slice(mask.shape[d]) for d in components)
    more = _of_rows(value, x[sizes], mask, components) * alpha
    return x + F.pad(more, (*[0, 0] * (x.dim() - 1), 0, len(x) - len(more)))


def add_rows_(x: Tensor, value: Any, mask: Tensor, components: Sequence[int], alpha: Any) -> Tensor:
    """Add rows to ``x`` in place."""
    return x.copy_(add_rows(x, value, mask, components, alpha))


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, inside: Inside, in_place: bool, *args: Any, **kwargs: Any
) -> Tensor:  # fmt: skip
    """Replace ``x.scatter_reduce``; padding is reduced into an entry of its own, which is dropped."""
    index = filled(index, inside, x.shape[dim])
    longer = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    found = longer.scatter_reduce(dim, index, source, *args, **kwargs).narrow(dim, 0, x.shape[dim])
    return x.copy_(found) if in_place else found


def indices(mask: Tensor) -> tuple[Tensor, ...]:
    """Return the place of each entry of a mask in its dims; 0 in padding."""
    places = torch.arange(mask.numel(), device=mask.device)
    found = []
    for dim in reversed(range(mask.dim())):
        found.append(torch.where(mask.flatten(), places % mask.shape[dim], 0))
        places = torch.div(places, mask.shape[dim], rounding_mode="floor")
    return (*reversed(found),)


def first(x: Tensor, inside: Inside) -> Tensor:
    """Return the entries of ``x`` (N) that count, and zeros after them."""
    (counts,) = inside
    assert counts is not None
    at = torch.where(counts, counts.cumsum(0) - 1, len(x))
    return x.new_zeros(len(x) + 1).scatter(0, at, x)[: len(x)]


def nonzero(mask: Tensor) -> Tensor:
    """Replace ``mask.nonzero()``: (entries, dims)."""
    return torch.stack(indices(mask), 1)


def one_of_each(x: Tensor, mask: Tensor, last: bool) -> Tensor:
    """Return the first or last row of each group, (B, ...), of rows ``x`` (B, T, ...) that ``mask`` (B, T) chooses.

    NaN if groups have different numbers of rows: torch cannot divide them, or mixes them.
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    place = torch.where(mask, place if last else -place, -mask.shape[1])
    hit = mask & (place == place.amax(1, keepdim=True))
    hit = hit.view(*mask.shape, *[1] * (x.dim() - 2))
    numbers = mask.sum(1)
    alike = (numbers.amin() == numbers.amax()) & (numbers.amin() > 0)
    return torch.where(alike, torch.where(hit, x, 0).sum(1), math.nan)


# --- reductions ---


def dims_of(given: Any, rank: int) -> list[int]:
    """Return the dims of a reduction, of which torch takes one, several, or none for all."""
    every = given is None or given in ((), [])
    listed = range(rank) if every else [given] if isinstance(given, int) else given
    return [d % max(rank, 1) for d in listed]


def number(x: Tensor, inside: Inside, dims: Sequence[int]) -> Tensor | int:
    """Return how many entries a reduction of these dims counts."""
    found: Tensor | int = 1
    for dim in dims:
        counts = inside[dim]
        found = found * (x.shape[dim] if counts is None else counts.sum())
    return found


def sum_(x: Tensor, dim: Any = None, keepdim: bool = False, *, inside: Inside, dtype: Any = None) -> Tensor:  # fmt: skip
    """Replace ``torch.sum``."""
    return filled(x, inside, 0).sum(dims_of(dim, x.dim()), keepdim, dtype=dtype)


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, inside: Inside, dtype: Any = None) -> Tensor:  # fmt: skip
    """Replace ``torch.mean``."""
    total = sum_(x, dim, keepdim, inside=inside, dtype=dtype or wide_dtype(x))
    return (total / number(x, inside, dims_of(dim, x.dim()))).to(dtype or x.dtype)


def var(
    x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, inside: Inside,
    correction: Any = None,
) -> Tensor:  # fmt: skip
    """Replace ``torch.var``."""
    dims = dims_of(dim, x.dim())
    centred = x - mean(x, dims, True, inside=inside)
    less = int(unbiased) if correction is None else correction
    free = torch.as_tensor(number(x, inside, dims) - less).clamp(min=0)
    return sum_(centred.square(), dims, keepdim, inside=inside) / free


def std(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace ``torch.std``."""
    squared = var(x, *args, **kwargs)
    zero = squared == 0  # where torch's own gradient is 0, and a root's is not finite
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": sum_, "mean": mean, "var": var, "std": std}
"""Functions that combine entries of a dim -> those that leave padding out."""


def _lowest(x: Tensor) -> Any:
    if x.dtype == torch.bool:
        return False
    return -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min


def _highest(x: Tensor) -> Any:
    if x.dtype == torch.bool:
        return True
    return math.inf if x.is_floating_point() else torch.iinfo(x.dtype).max


FILLS: dict[str, Callable[[Tensor], Any]] = {
    **dict.fromkeys(["amax", "max", "logsumexp"], _lowest), **dict.fromkeys(["amin", "min"], _highest),
    **dict.fromkeys(["softmax", "log_softmax"], lambda x: torch.finfo(x.dtype).min),
    **dict.fromkeys(["any", "norm", "linalg_vector_norm", "count_nonzero"], lambda x: 0),
    **dict.fromkeys(["all", "prod"], lambda x: 1),
}  # fmt: skip
"""Functions that combine entries of a dim -> the number in padding that has no effect."""


def without_effect(x: Tensor, inside: Inside, name: str) -> Tensor:
    """Fill padding for a function of :data:`FILLS`."""
    return filled(x, inside, FILLS[name](x))


# --- losses ---


def _reduced(losses: Tensor, inside: Inside, reduction: str, rows: Any) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "mean":
        return mean(losses, inside=inside)
    total = sum_(losses, inside=inside)
    return total / rows if reduction == "batchmean" else total


def loss(name: str, given: dict[str, Any], inside: Inside, reduction: str) -> Tensor:
    """Call a loss of torch, by name, without its reduction, and reduce what counts; ``inside`` is that of its result."""
    losses = getattr(F, name)(**given, reduction="none")
    return _reduced(losses, inside, reduction, number(losses, inside, [0]))
