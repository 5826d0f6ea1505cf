"""Packed sequences as padded ones with their lengths.

``pack_padded_sequence`` orders the steps of all sequences by time, as many as the lengths add up to, so that
shapes depend on data. Here a layer runs all steps of the padded batch; the results at padding reach nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from hap.capture import torch_private


class PaddedSequence(NamedTuple):
    """A padded batch in place of a ``PackedSequence`` in a trace.

    Attributes:
        padded: (B, T, ...).
        lengths: (B,), each 1 or more.
    """

    padded: Tensor
    lengths: Tensor


def pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PaddedSequence:
    """Replace the function of ``torch.nn.utils.rnn``; the order of the batch stays."""
    padded = input if batch_first else input.transpose(0, 1)
    known = torch.as_tensor(lengths, dtype=torch.int64, device=input.device)
    return PaddedSequence(padded, known)


def pad_packed_sequence(
    sequence: PaddedSequence, batch_first: bool = False, padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Replace the function of ``torch.nn.utils.rnn``.

    torch cuts its result after the longest sequence. Without ``total_length`` the longest one must be as long
    as the padded batch, which each step checks.
    """
    padded, lengths = sequence
    steps = padded.shape[1]
    if total_length is None:
        lengths = torch.ops.hap.full_lengths(lengths, steps)
    elif total_length < steps:
        raise ValueError(f"total_length is {total_length}, but the padded batch has {steps} steps")
    inside = _inside(lengths, steps).view(*padded.shape[:2], *[1] * (padded.dim() - 2))
    found = torch.where(inside, padded, padding_value)
    if total_length is not None and total_length > steps:
        rest = found.new_full((len(found), total_length - steps, *found.shape[2:]), padding_value)
        found = torch.cat([found, rest], 1)
    return found if batch_first else found.transpose(0, 1), lengths


@torch.library.custom_op("hap::full_lengths", mutates_args=())
def full_lengths(lengths: Tensor, steps: int) -> Tensor:
    """Return the lengths (B,) of sequences, the longest of which has ``steps``.

    Raises:
        ValueError: it has fewer; on a GPU an assertion fails.
    """
    message = (
        f"the longest sequence of a batch is shorter than its {steps} steps: call "
        f"pad_packed_sequence with total_length={steps}, or pad each batch to one length"
    )
    if lengths.is_cuda:
        torch_private.assert_async(lengths.max() == steps, message)
    elif int(lengths.max()) != steps:
        raise ValueError(message)
    return lengths.clone()


@full_lengths.register_fake
def _(lengths, steps):  # type: ignore[no-untyped-def]
    return torch.empty_like(lengths)


def _inside(lengths: Tensor, steps: int) -> Tensor:
    """Return (B, T): whether a step belongs to a sequence."""
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(1)


def turned(x: Tensor, lengths: Tensor) -> Tensor:
    """Return each sequence backwards, with its padding where it was; ``x``: (B, T, D)."""
    steps = x.shape[1]
    at = torch.arange(steps, device=x.device)
    order = torch.where(_inside(lengths, steps), lengths.unsqueeze(1) - 1 - at, at)
    return x.gather(1, order.unsqueeze(2).expand_as(x))


def last_step(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the last step of each sequence, (B, D), of ``x`` (B, T, D)."""
    at = (lengths - 1).view(-1, 1, 1).expand(-1, 1, x.shape[2])
    return x.gather(1, at).squeeze(1)


def forward_of(kind: type[nn.RNNBase]) -> Callable[..., Any]:
    """Return the forward of a recurrent module that takes padded sequences, too."""
    original: Callable[..., Any] = kind.forward

    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PaddedSequence):
            return original(self, input, hx)
        self._update_flat_weights()
        padded, lengths = input
        count = self.num_layers * (2 if self.bidirectional else 1)
        if hx is None:
            hx = padded.new_zeros(count, len(padded), self.hidden_size)
            hx = (hx, hx) if self.mode == "LSTM" else hx
        found = torch_private.recurrent_layer(self.mode)(
            padded, hx, self._flat_weights, self.bias, self.num_layers, self.dropout,
            self.training, self.bidirectional, True, lengths,
        )  # fmt: skip
        last = found[1:] if self.mode == "LSTM" else found[1]
        return PaddedSequence(found[0], lengths), last

    return forward


INLINED: dict[Any, Callable[..., Any]] = {
    rnn.pack_padded_sequence: pack_padded_sequence,
    rnn.pad_packed_sequence: pad_packed_sequence,
}
"""Functions of torch -> the functions whose lines are traced in place of theirs."""

MODULES: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
"""Modules that take packed sequences."""
