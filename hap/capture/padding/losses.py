"""Losses of tensors with padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hap.capture.padding import functions
from hap.capture.padding.dims import Dim, Mask, Refused, Trace, name_of


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
        dims = [*[1] * (len(own) - len(dims)), *dims]
        for k, dim in enumerate(own, len(dims) - len(own)):
            if isinstance(dims[k], Mask) and dim is not dims[k] and dim != 1:
                raise Refused("it combines these rows with other rows")
            if isinstance(dim, Mask) and dims[k] not in (1, dim):
                raise Refused("it combines these rows with other rows")
            dims[k] = dim if dims[k] == 1 else dims[k]
    _loss(trace, given, tuple(dims), reduction)


def loss_of_rows(trace: Trace) -> None:
    """A loss of each row, the first dim of all tensors with padding, and their mean or sum."""
    given, reduction = _bound(trace)
    padded = [trace.dims(v) for v in given.values() if trace.is_padded(v)]
    if any(d[0] is not padded[0][0] or any(isinstance(x, Mask) for x in d[1:]) for d in padded):
        raise Refused("it combines these rows with other rows")
    _loss(trace, given, padded[0][:1], reduction)


def _loss(trace: Trace, given: dict[str, Any], dims: tuple[Dim, ...], reduction: str) -> None:
    safe = {name: _safe(trace, value) for name, value in given.items()}
    trace.become(functions.loss, name_of(trace.node), safe, trace.inside(dims), reduction)


def _safe(trace: Trace, value: Any) -> Any:
    if not trace.is_padded(value):
        return value
    whole = not value.meta["example_value"].is_floating_point()  # the number of a class, perhaps
    return (
        trace.filled(value, 0)
        if whole
        else trace.call(functions.harmless, value, trace.inside(value))
    )


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
        raise Refused("it combines these rows with other rows")
    ignored = given.setdefault("ignore_index", -100)
    given["target"] = trace.filled(given["target"], ignored)
    function: Callable[..., Any] = getattr(F, name_of(trace.node))
    trace.become(function, **given, reduction=reduction)


def ctc_loss(trace: Trace) -> None:
    """The loss of sequences whose labels are one after the other, as many as a mask chooses."""
    targets = trace.argument(1, "targets")
    others = [n for n in trace.node.all_input_nodes if n is not targets]
    if any(map(trace.is_padded, others)) or len(trace.dims(targets)) != 1:
        raise Refused
    packed = trace.call(functions.first, targets, trace.inside(targets))
    trace.node.replace_input_with(targets, packed)


LOSSES: dict[str, Callable[[Trace], None]] = {
    **dict.fromkeys(
        ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "soft_margin_loss",
         "binary_cross_entropy_with_logits", "hinge_embedding_loss", "poisson_nll_loss", "margin_ranking_loss"],
        loss_of_entries,
    ),
    **dict.fromkeys(
        ["cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_soft_margin_loss"],
        loss_of_rows,
    ),
    "cross_entropy": class_loss, "nll_loss": class_loss, "ctc_loss": ctc_loss,
}  # fmt: skip
"""Losses of torch -> their rules."""
