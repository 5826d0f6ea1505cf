"""LSTM, GRU and RNN layers as one logical operator per layer and direction.

torch unrolls a recurrence into the operators of each step: a step of training of an LSTM of two layers, both
ways, has 5,200 operators on 32 tokens. ``hap::recurrence`` runs all steps of a layer. Products that need no earlier step
stay operators of the graph, for all steps at once: of the input with its weights, and those of the weights'
gradients. The rows of the batch are independent; a unit of a step depends on all units of the step before.

Tensors have the batch first. *Gates* are the sums of products of the input, (B, T, gates * H), *states* the
results of all steps, (B, T, S): the hidden state, with the cell state after it in an LSTM, so that S is H
or 2 H. Formulas are those of :class:`torch.nn.LSTM`, :class:`torch.nn.GRU` and :class:`torch.nn.RNN`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hap.capture.attention import lowered
from hap.capture.packed_sequences import last_step, turned


class Cell(NamedTuple):
    """The formulas of one step, whose results are written into given tensors.

    Attributes:
        parts, saved: columns of states and saved tensors per hidden unit.
        forward: (products, gates, earlier state, state, saved) -> None. The products are those of the hidden
            state, with the gates added to them unless the layer has a bias of its own.
        slopes: (states, earlier states, saved), of all steps -> slopes that the backward needs.
        backward: (gradient of the state, weight, saved, gradient of the gates, slopes) -> gradient of the
            earlier state.
        products: (gradient of the gates, saved) -> gradient of the products of the hidden state.
    """

    parts: int
    saved: int
    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    slopes: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    backward: Callable[..., Tensor]
    products: Callable[[Tensor, Tensor], Tensor]


def _lstm(sums: Tensor, gates: Tensor, earlier: Tensor, state: Tensor, saved: Tensor) -> None:
    (i, f, g, o), (hidden, cell) = saved.chunk(4, -1), state.chunk(2, -1)
    torch.sigmoid(sums, out=saved)
    torch.tanh(sums.chunk(4, -1)[2], out=g)
    torch.addcmul(f * earlier.chunk(2, -1)[1], i, g, out=cell)
    torch.mul(o, cell.tanh(), out=hidden)


def _lstm_slopes(states: Tensor, earlier: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = saved.chunk(4, -1)
    tanh = states.chunk(2, -1)[1].tanh()
    by_cell = [g * i * (1 - i), earlier.chunk(2, -1)[1] * f * (1 - f), i * (1 - g * g)]
    return torch.stack(by_cell, -2), tanh * o * (1 - o), o * (1 - tanh * tanh)


def _lstm_backward(
    grad: Tensor, weight: Tensor, saved: Tensor, gates: Tensor, by_cell: Tensor, by_hidden: Tensor,
    of_cell: Tensor,
) -> Tensor:  # fmt: skip
    hidden, cell = grad.chunk(2, -1)
    cell = torch.addcmul(cell, hidden, of_cell)
    parts = gates.unflatten(-1, (4, weight.shape[1]))
    torch.mul(cell.unsqueeze(-2), by_cell, out=parts[:, :3])
    torch.mul(hidden, by_hidden, out=parts[:, 3])
    return torch.cat([gates @ weight, cell * saved.chunk(4, -1)[1]], -1)


def _gru(products: Tensor, gates: Tensor, earlier: Tensor, state: Tensor, saved: Tensor) -> None:
    r, z, n, product = saved.chunk(4, -1)
    both = gates.shape[-1] // 3 * 2
    torch.add(gates[:, :both], products[:, :both], out=saved[:, :both]).sigmoid_()
    product.copy_(products[:, both:])
    torch.addcmul(gates[:, both:], r, product, out=n).tanh_()
    torch.lerp(n, earlier, z, out=state)


def _gru_slopes(states: Tensor, earlier: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
    r, z, n, product = saved.chunk(4, -1)
    of_n = (1 - z) * (1 - n * n)
    of_r, of_z = of_n * product * r * (1 - r), (earlier - n) * z * (1 - z)
    return (torch.stack([of_r, of_z, of_n], -2),)


def _gru_backward(
    grad: Tensor, weight: Tensor, saved: Tensor, gates: Tensor, slopes: Tensor
) -> Tensor:
    torch.mul(grad.unsqueeze(-2), slopes, out=gates.unflatten(-1, (3, weight.shape[1])))
    return torch.addmm(grad * saved.chunk(4, -1)[1], _gru_products(gates, saved), weight)


def _gru_products(gates: Tensor, saved: Tensor) -> Tensor:
    r, z, n = gates.chunk(3, -1)
    return torch.cat([r, z, n * saved.chunk(4, -1)[0]], -1)


def _tanh(sums: Tensor, gates: Tensor, earlier: Tensor, state: Tensor, saved: Tensor) -> None:
    torch.tanh(sums, out=state)
    torch.mul(state, state, out=saved).neg_().add_(1)


def _relu(sums: Tensor, gates: Tensor, earlier: Tensor, state: Tensor, saved: Tensor) -> None:
    torch.clamp(sums, min=0, out=state)
    saved.copy_(state > 0)


def _slopes(states: Tensor, earlier: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
    return ()


def _rnn_backward(grad: Tensor, weight: Tensor, saved: Tensor, gates: Tensor) -> Tensor:
    return torch.mul(grad, saved, out=gates) @ weight


def _alike(gates: Tensor, saved: Tensor) -> Tensor:
    return gates


CELLS = {
    "lstm": Cell(2, 4, _lstm, _lstm_slopes, _lstm_backward, _alike),
    "gru": Cell(1, 4, _gru, _gru_slopes, _gru_backward, _gru_products),
    "rnn_tanh": Cell(1, 1, _tanh, _slopes, _rnn_backward, _alike),
    "rnn_relu": Cell(1, 1, _relu, _slopes, _rnn_backward, _alike),
}


@torch.library.custom_op("hap::recurrence", mutates_args=())
def recurrence(
    gates: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Run all steps of a layer in one direction.

    Shapes: ``weight`` (gates * H, H) and ``bias`` (gates * H) make the products of the hidden state,
    ``state`` (B, S) is the first one. Only a GRU has a bias: that of others is added to the gates.

    Returns: the states, and (B, T, saved * H) for the backward.
    """
    cell, width = CELLS[kind], weight.shape[1]
    states, saved = _empty(gates, weight, kind)
    turned = weight.t()
    for t in _order(gates.shape[1], reverse):
        into = gates[:, t] if bias is None else bias
        products = torch.addmm(into, state[:, :width], turned)
        cell.forward(products, gates[:, t], state, states[:, t], saved[:, t])
        state = states[:, t]
    return states, saved


@torch.library.custom_op("hap::recurrence_backward", mutates_args=())
def recurrence_backward(
    grad: Tensor, states: Tensor, saved: Tensor, weight: Tensor, state: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the gates and of the first state."""
    cell = CELLS[kind]
    gates = grad.new_empty(*grad.shape[:2], len(weight))
    slopes = cell.slopes(states, earlier_states(states, state, reverse), saved)
    carry = torch.zeros_like(state)
    for t in reversed(_order(grad.shape[1], reverse)):
        now = (x[:, t] for x in (saved, gates, *slopes))
        carry = cell.backward(grad[:, t] + carry, weight, *now)
    return gates, carry


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def earlier_states(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step; shapes: (B, T, S) and (B, S)."""
    first = first.unsqueeze(1)
    return torch.cat([states[:, 1:], first] if reverse else [first, states[:, :-1]], 1)


def _empty(gates: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    width, cell = weight.shape[1], CELLS[kind]
    lead = gates.shape[:2]
    return gates.new_empty(*lead, cell.parts * width), gates.new_empty(*lead, cell.saved * width)


@recurrence.register_fake
def _(gates, weight, bias, state, kind, reverse):  # type: ignore[no-untyped-def]
    return _empty(gates, weight, kind)


@recurrence_backward.register_fake
def _(grad, states, saved, weight, state, kind, reverse):  # type: ignore[no-untyped-def]
    return grad.new_empty(*grad.shape[:2], len(weight)), torch.empty_like(state)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, kind: str,
        reverse: bool,
    ) -> Tensor:  # fmt: skip
        states, saved = torch.ops.hap.recurrence(gates, weight, bias, state, kind, reverse)
        ctx.save_for_backward(states, saved, weight, state)
        ctx.options = kind, reverse, bias is not None
        return states  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        states, saved, weight, state = ctx.saved_tensors
        kind, reverse, has_bias = ctx.options
        of_gates, of_state = torch.ops.hap.recurrence_backward(
            grads[0], states, saved, weight, state, kind, reverse
        )
        of_products, width = CELLS[kind].products(of_gates, saved), weight.shape[1]
        hidden = earlier_states(states[..., :width], state[:, :width], reverse)
        of_weight = of_products.flatten(0, 1).t() @ hidden.flatten(0, 1)
        of_bias = of_products.sum((0, 1)) if has_bias else None
        return of_gates, of_weight, of_bias, of_state, None, None


def layers(kind: str) -> Callable[..., Any]:
    """Return the function that replaces ``torch.lstm`` or another of :data:`CELLS` in a captured graph.

    It takes the lengths (B,) of padded sequences as well. LSTMs with projections keep torch's function.
    """
    original, cell = getattr(torch, kind), CELLS[kind]

    def run(
        x: Tensor, hx: Any, params: Any, biases: Any, count: Any = 1, dropout: float = 0.0,
        train: bool = False, both: bool = False, batch_first: Any = False,
        lengths: Tensor | None = None,
    ) -> Any:  # fmt: skip
        given = (x, hx, params, biases, count, dropout, train, both, batch_first)
        each = 4 if biases is True else 2
        if not isinstance(biases, bool) or len(params) != count * (1 + both) * each:
            return original(*given)
        first = torch.cat(list(hx), -1) if kind == "lstm" else hx
        out = x if batch_first else x.transpose(0, 1)
        last = []
        for layer in range(count):
            seen = []
            for way in range(1 + both):
                k = layer * (1 + both) + way
                weights = params[k * each : (k + 1) * each]
                states, end = _layer(out, weights, first[k], kind, way == 1, lengths)
                seen.append(states[..., : states.shape[-1] // cell.parts])
                last.append(end)
            out = torch.cat(seen, -1) if both else seen[0]
            if layer < count - 1:
                out = F.dropout(out, dropout, train)
        ends = torch.stack(last)
        out = out if batch_first else out.transpose(0, 1)
        return (out, *(end.contiguous() for end in ends.chunk(cell.parts, -1)))

    return run


def _layer(
    x: Tensor, weights: Any, state: Tensor, kind: str, reverse: bool, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the states of one layer in one direction, and the last ones (B, S).

    Shapes: ``x`` (B, T, I), ``state`` (B, S), ``lengths`` (B,).
    """
    if torch.is_autocast_enabled("cpu"):  # torch's own function casts; a custom op doesn't
        half = torch.get_autocast_dtype("cpu")
        weights, state = [lowered(w, half) for w in weights], lowered(state, half)
    into, weight, *biases = weights
    bias, own = biases or (None, None)
    if kind != "gru" and bias is not None:
        bias, own = bias + own, None
    elif kind == "gru" and own is None:
        own = weight.new_zeros(len(weight))
    gates = F.linear(x, into, bias)
    if lengths is None:
        states = _Recurrence.apply(gates, weight, own, state, kind, reverse)  # type: ignore[no-untyped-call]
        return states, states[:, 0 if reverse else -1]
    # A sequence ends before its padding in both directions.
    gates = turned(gates, lengths) if reverse else gates
    states = _Recurrence.apply(gates, weight, own, state, kind, False)  # type: ignore[no-untyped-call]
    end = last_step(states, lengths)
    return (turned(states, lengths) if reverse else states), end


LAYERS = {kind: layers(kind) for kind in CELLS}
"""Name of a function of torch -> the one that replaces it."""
