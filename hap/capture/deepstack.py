"""Features of an image that are added to its tokens in several layers, as in Qwen3-VL. (torch)

After DeepStack (Meng et al., 2024). ``transformers`` selects the tokens by a mask, so that shapes depend on
data; the sum is the same if the features are scattered into zeros first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn

_METHOD = "_deepstack_process"


def _add_features(
    self: Any, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor
) -> Tensor:
    """Return the sum; the features are in the order of the tokens that the mask selects.

    Shapes: ``hidden_states`` (B, S, D), ``visual_pos_masks`` (B, S), ``visual_embeds`` (selected tokens, D).
    """
    features = visual_embeds.to(hidden_states.dtype)
    mask = visual_pos_masks.unsqueeze(-1).expand_as(hidden_states)
    return hidden_states + hidden_states.new_zeros(hidden_states.shape).masked_scatter(
        mask, features
    )


@contextlib.contextmanager
def features_scattered(module: nn.Module) -> Iterator[None]:
    """Let the models of transformers that add such features scatter them."""
    kinds = {type(part) for part in module.modules() if hasattr(type(part), _METHOD)}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, _METHOD, _add_features))
        yield
