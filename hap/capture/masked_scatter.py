"""Rows that are replaced by others in turn, such as the embeddings of an image's tokens by its features.

``masked_scatter`` takes the elements of its source one after the other, so that no rank knows where its part of a
split batch begins in the source. If whole rows are replaced, a row's place in the source is the number of such
rows before it. The result is then a lookup in the source, whose rows ranks may split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hap.capture.padding.functions import in_turn


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Replace ``torch.masked_scatter`` in a captured graph.

    Shapes: ``x`` (..., D), ``mask`` (..., 1) or the same expanded to (..., D), ``source`` (..., D); others run as
    torch's own operator.
    """
    width = x.shape[-1:]
    same_in_row = mask.shape[-1:] == (1,) or (mask.shape == x.shape and mask.stride()[-1:] == (0,))
    if not same_in_row or mask.shape[:-1] != x.shape[:-1] or source.shape[-1:] != width:
        return torch.masked_scatter(x, mask, source)
    replaced = mask[..., 0]
    return torch.where(replaced.unsqueeze(-1), in_turn(source.reshape(-1, *width), replaced), x)
