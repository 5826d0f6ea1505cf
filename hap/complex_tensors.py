"""Complex tensors as pairs of real numbers, the form that ranks, optimizers and checkpoints hold."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor of shape (...) as a view of shape (..., 2); any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
