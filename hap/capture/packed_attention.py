"""Attention inside of each part of a packed sequence: one call for all parts of one length.

Models of transformers that pack the patches of several images run torch's attention once per image, or per
window of an image. With kernels for packed sequences they make one call, and say where the parts begin; so they
do in a captured graph. Parts are rows of a batch there, which ranks can split.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.errors import ModelError

_NAME = "hap_flash"
"""Implementation of attention in the configuration; a name with "flash" in it gets packed sequences."""


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None,
    is_causal: bool = False, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return attention inside of each part, as an implementation of transformers' interface.

    Args:
        query: of shape (1, heads, S, features); ``key`` and ``value`` likewise, of as many or fewer heads.
        cu_seq_lens_q: where the parts begin, and S: known numbers.

    Returns:
        A tensor of shape (1, S, heads, features), and nothing.
    """
    unknown = [
        name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None
    ]
    if cu_seq_lens_q is None or attention_mask is not None or unknown:
        raise ModelError(
            f"attention over a packed sequence has {', '.join(unknown) or 'a mask'}, which hap does not support",
            hint="plan the model without it",
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=is_causal,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out

    begins = cu_seq_lens_q.tolist()
    parts: dict[int, list[int]] = {}  # length -> where parts of this length begin
    for begin, end in itertools.pairwise(begins):
        parts.setdefault(end - begin, []).append(begin)
    parts.pop(0, None)
    if len(parts) == 1:
        ((length, _),) = parts.items()
        rows = [_as_rows(t, length) for t in (query, key, value)]
        return _in_sequence(attend(*rows)), None
    order, outs = [], []
    for length, starts in parts.items():
        places = [start + k for start in starts for k in range(length)]
        index = torch.tensor(places)
        rows = [_as_rows(t[:, :, index], length) for t in (query, key, value)]
        outs.append(_in_sequence(attend(*rows)))
        order += places
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(outs, dim=1)[:, torch.tensor(back)], None


def _as_rows(t: Tensor, length: int) -> Tensor:
    """(1, heads, rows * length, features) -> (rows, heads, length, features)."""
    rows: Tensor = t.unflatten(2, (-1, length))
    return rows.squeeze(0).transpose(0, 1)


def _in_sequence(t: Tensor) -> Tensor:
    """(rows, heads, length, features) -> (1, rows * length, heads, features)."""
    rows: Tensor = t.transpose(1, 2).flatten(0, 1)
    return rows.unsqueeze(0)


@contextlib.contextmanager
def packed_in_one_call(module: nn.Module) -> Iterator[None]:
    """Let modules of transformers that know where packed parts begin call :func:`packed_attention`.

    Args:
        module: a copy of the user's, whose configurations are changed.
    """
    interface: Any = getattr(
        sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None
    )
    if not hasattr(interface, "get_interface"):
        yield
        return
    part: Any
    for part in module.modules():
        configured = hasattr(getattr(part, "config", None), "_attn_implementation")
        if configured and "cu_seqlens" in inspect.signature(part.forward).parameters:
            part.config = copy.deepcopy(part.config)
            part.config._attn_implementation = _NAME
    original = interface.get_interface

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return packed_attention if name == _NAME else original(self, name, default)

    with mock.patch.object(interface, "get_interface", get_interface):
        yield
