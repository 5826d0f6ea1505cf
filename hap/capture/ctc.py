"""Connectionist temporal classification by row, so that a batch of sequences can be split. (torch)

torch's own operator returns tables as wide as the longest target, which only the data tells. Here a row's table
is as wide as all targets together allow, and is made anew in the backward. Labels that a mask selects, padding left
out, are likewise as many as there might be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hap.capture import tensor_constants

aten = torch.ops.aten


def _check_labels(x: Tensor, targets: Tensor, labels: Tensor) -> None:
    """Raise ``IndexError`` for a label that is no class: torch's kernel for CPUs would end the process."""
    if x.is_cpu and targets.dim() == 2 and targets.numel():
        read = torch.arange(targets.shape[1]) < labels.unsqueeze(1)
        if bool((((targets < 0) | (targets >= x.shape[2])) & read).any()):
            raise IndexError(f"a CTC label is none of the {x.shape[2]} classes")


@torch.library.custom_op("hap::ctc_loss", mutates_args=())
def _ctc_loss(
    x: Tensor, targets: Tensor, steps: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Return the loss of each row.

    Shapes: log-probabilities ``x`` (T, N, C), ``targets`` (N, S), their lengths ``steps`` and ``labels`` (N).
    """
    _check_labels(x, targets, labels)
    loss, _ = aten._ctc_loss.Tensor(x, targets, steps, labels, blank, zero_infinity)
    return torch.where(loss.isinf(), 0.0, loss) if zero_infinity else loss.clone()


@_ctc_loss.register_fake
def _(x, targets, steps, labels, blank, zero_infinity):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[1])


@torch.library.custom_op("hap::ctc_loss_backward", mutates_args=())
def _ctc_loss_backward(
    grad: Tensor, x: Tensor, targets: Tensor, steps: Tensor, labels: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of ``x``, of shape (T, N, C); ``grad``: (N)."""
    _check_labels(x, targets, labels)
    given = (x, targets, steps, labels)
    loss, table = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    made: Tensor = aten._ctc_loss_backward.Tensor(
        grad.contiguous(), *given, loss, table, blank, zero_infinity
    )
    return made


@_ctc_loss_backward.register_fake
def _(grad, x, targets, steps, labels, blank, zero_infinity):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    made = torch.ops.hap.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return made, None, None, None, None, None


_ctc_loss.register_autograd(_differentiate, setup_context=_keep)


Lengths = Tensor | Sequence[int]


def ctc_loss(
    x: Tensor, targets: Tensor, steps: Lengths, labels: Lengths, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Replace ``torch.ctc_loss`` in a captured graph; ``reduction``: 0 none, 1 mean, 2 sum.

    Shapes: ``x`` (T, N, C), ``targets`` (N, S) or all of them one after the other, lengths (N); or ``x`` (T, C),
    ``targets`` (S), and numbers.
    """
    one = x.dim() == 2
    if one:
        x, targets = x.unsqueeze(1), targets.unsqueeze(0)
    steps, labels = (
        (t if isinstance(t, Tensor) else tensor_constants.tensor(t)).reshape(-1).long()
        for t in (steps, labels)
    )
    fitting = labels
    if targets.dim() == 1:
        first = labels.cumsum(0) - labels
        # More labels than steps fit as badly as one more. How many a mask chooses is no number yet.
        count = targets.shape[0]
        widest = min(count, len(x) + 1) if isinstance(count, int) else len(x) + 1
        at = (first.unsqueeze(1) + torch.arange(widest)).clamp(max=count - 1)
        targets, fitting = targets[at], labels.clamp(max=widest)
    loss: Tensor = torch.ops.hap.ctc_loss(x, targets.long(), steps, fitting, blank, zero_infinity)
    if reduction == 1:
        return (loss / labels.clamp(min=1)).mean()
    if reduction == 2:
        return loss.sum()
    return loss[0] if one else loss


FUNCTIONS: dict[str, Callable[..., Any]] = {"ctc_loss": ctc_loss}
"""Name of a function of torch -> the one that replaces it."""
