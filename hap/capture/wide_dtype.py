"""The dtype in which sums, norms and losses are accumulated."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64, and float32 for single and half precision."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
