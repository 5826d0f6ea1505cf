"""The operator that rounds a gradient and keeps what was lost for the next one.

After 1-bit SGD's error feedback (Seide et al., Interspeech 2014). The losses are a rank's own, so the
rank's context runs the operator; called alone it rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("hap::rounded_with_feedback", mutates_args=())
def rounded_with_feedback(x: Tensor, dtype: torch.dtype, site: str) -> Tensor:
    """Return ``x`` plus what was lost at ``site`` before, rounded to ``dtype``."""
    return x.to(dtype, copy=True)


@rounded_with_feedback.register_fake
def _(x, dtype, site):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, dtype=dtype)
