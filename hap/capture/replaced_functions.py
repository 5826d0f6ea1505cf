"""Functions of torch whose trace would be wrong or ends, as where they check their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hap.capture import packed_sequences


def cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Replace ``torch.cov``, whose trace ends at a check of the count; ``x``: (variables, samples).

    Sums of weights are checked as well; with weights it is torch's own function.
    """
    if fweights is not None or aweights is not None:
        return _cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    centred = rows - rows.mean(1, keepdim=True)
    found = centred @ centred.conj().mT / max(rows.shape[1] - correction, 0)
    return found if x.dim() == 2 else found.reshape(())


def corrcoef(x: Tensor) -> Tensor:
    """Replace ``torch.corrcoef``; ``x``: (variables, samples)."""
    if x.dim() < 2:
        return cov(x) / cov(x)
    together = cov(x)
    spread = together.diagonal().sqrt()
    return (together / spread.unsqueeze(1) / spread.unsqueeze(0)).clamp(-1, 1)


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Replace ``torch.bincount``, whose size is data; ``x``: (N,), each less than ``minlength``."""
    if not minlength:
        return _bincount(x, weights, minlength)
    each = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    if not each.is_floating_point() and weights is not None:
        each = each.double()
    return each.new_zeros(minlength).index_add(0, x, each)


def multilabel_margin_loss(
    x: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Replace the function of ``torch.nn.functional``: torch's trace of it counts targets after a -1.

    Shapes: ``x`` and ``target`` (N, C) or (C). (torch 2.13)
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    one = x.dim() < 2
    x, target = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = torch.arange(x.shape[1], device=x.device)
    end = torch.where(target == -1, classes, x.shape[1]).amin(1, keepdim=True)
    given = classes < end
    own = x.gather(1, torch.where(given, target, 0))
    is_target = (torch.where(given, target, -1).unsqueeze(2) == classes).any(1)
    margins = (1 - own.unsqueeze(2) + x.unsqueeze(1)).clamp_min(0)
    counted = given.unsqueeze(2) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / x.shape[1]
    if reduction == "none":
        return losses[0] if one else losses
    return losses.sum() if reduction == "sum" else losses.mean()


def checkpoint_sequential(
    functions: nn.Sequential | Iterable[Callable[..., Any]], segments: int, input: Any,
    use_reentrant: bool | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Replace the function of ``torch.utils.checkpoint``, which the tracer does not enter.

    The last segment, with the rest of the functions, has no checkpoint.
    """
    every = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    size = len(every) // segments

    def run(start: int, end: int) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            for function in every[start:end]:
                x = function(x)
            return x

        return forward

    last = size * (segments - 1)
    for start in range(0, last, max(size, 1)):
        input = checkpoint(
            run(start, start + size), input, use_reentrant=bool(use_reentrant), **kwargs
        )
    return run(last, len(every))(input)


_cov, _bincount = torch.cov, torch.bincount

REPLACED: dict[Any, Callable[..., Any]] = {F.multilabel_margin_loss: multilabel_margin_loss}
"""Functions of torch in a trace -> the functions that replace them."""

INLINED: dict[Any, Callable[..., Any]] = {
    torch.utils.checkpoint.checkpoint_sequential: checkpoint_sequential,
    **packed_sequences.INLINED,
}
"""Functions of torch -> the functions whose lines are traced in place of theirs."""

UNTRACED: dict[str, Callable[..., Any]] = {"cov": cov, "corrcoef": corrcoef, "bincount": bincount}
"""Names of functions of torch that the tracer cannot run -> the functions that it calls instead."""
