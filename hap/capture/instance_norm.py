"""Instance norm: a group norm of single channels; with running statistics one program for both modes.

torch's function is a batch norm whose channels are all channels of all samples, so that no dim is the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.batch_norm import batch_norm
from hap.capture.wide_dtype import wide_dtype


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Replace ``F.instance_norm`` in a captured graph; ``input``: (N, C, ...)."""
    pixels = input[0, 0].numel()
    if use_input_stats and pixels == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {input.shape}"
        )
    own = F.group_norm(input, input.shape[1], weight, bias, eps) if use_input_stats else input
    if running_mean is None or running_var is None:
        return own
    given = running_mean, running_var, weight, bias
    if not use_input_stats:
        return batch_norm(input, *given, eps=eps)
    by_running = batch_norm(input, running_mean.clone(), running_var.clone(), weight, bias, eps=eps)
    with torch.no_grad():
        x, spatial = input.to(wide_dtype(input)), [*range(2, input.dim())]
        mean = x.mean(spatial, keepdim=True)
        var = (x - mean).square().sum(spatial) / (pixels - 1)
        for running, now in ((running_mean, mean.flatten(1)), (running_var, var)):
            running.copy_(running * (1 - momentum) + momentum * now.mean(0))
    return _ByMode.apply(own, by_running)  # type: ignore[no-untyped-call, no-any-return]


class _ByMode(torch.autograd.Function):
    """The first in training, the second in ``eval()``, and so the gradient."""

    @staticmethod
    def forward(ctx: Any, training: Tensor, otherwise: Tensor) -> Tensor:
        chosen: Tensor = torch.ops.hap.by_mode(training, otherwise)
        return chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        of_training = torch.ops.hap.in_training(grads[0])
        return of_training, grads[0] - of_training
