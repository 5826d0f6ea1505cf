"""Packed sequences are padded ones with lengths in a plan, with the results of torch's."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hap.capture import packed_sequences, recurrence
from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.ir.placement import S
from tests.random_plans import Case, make_case, random_plan, verdict

LENGTHS = torch.tensor([3, 6, 1, 4, 6])

MODULES: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


@pytest.mark.parametrize(("kind", "both"), [*itertools.product(MODULES, (False, True))])
@pytest.mark.parametrize("batch_first", [False, True])
def test_results_and_gradients_are_those_of_torch(kind: str, both: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[kind](4, 3, 2, bidirectional=both, batch_first=batch_first).double()
    shape = (5, 6, 4) if batch_first else (6, 5, 4)
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    leaves = [x, *module.parameters()]

    def results(pack: Any, forward: Any, pad: Any, total: int | None) -> list[Tensor]:
        packed = pack(x, LENGTHS, batch_first=batch_first, enforce_sorted=False)
        out, last = forward(module, packed)
        padded, lengths = pad(out, batch_first, padding_value=-1.0, total_length=total)
        assert torch.equal(lengths, LENGTHS)
        return [padded, *(last if kind == "lstm" else [last])]

    ours = packed_sequences
    forward = ours.forward_of(type(module))
    with pytest.MonkeyPatch.context() as patch:
        for total in (None, 8):
            wanted = results(pack_padded_sequence, type(module).forward, pad_packed_sequence, total)
            patch.setattr(torch._VF, kind, recurrence.LAYERS[kind], raising=False)
            found = results(ours.pack_padded_sequence, forward, ours.pad_packed_sequence, total)
            patch.undo()
            weights = [torch.randn_like(t) for t in wanted]
            grads = [
                torch.autograd.grad(
                    sum((w * t).sum() for w, t in zip(weights, each, strict=True)), leaves
                )
                for each in (found, wanted)
            ]
            for a, b in (*zip(found, wanted, strict=True), *zip(*grads, strict=True)):
                torch.testing.assert_close(a, b)


class Tagger(nn.Module):
    """Labels the words of sentences of several lengths."""

    def __init__(self, kind: str, total: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.layers = MODULES[kind](4, 3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(6, 11)
        self.total = total

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.words(text), lengths, batch_first=True, enforce_sorted=False
        )
        out, last = self.layers(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=self.total)
        state = (last[0] if isinstance(last, tuple) else last).square().mean()
        return F.cross_entropy(self.head(out).flatten(0, 1), text.flatten()) + state


@cache
def tagger_case(kind: str) -> Case:
    torch.manual_seed(0)
    return make_case(Tagger(kind), (torch.randint(11, (5, 6)), LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES)
def test_plans_are_verified(kind: str) -> None:
    case = tagger_case(kind)
    recurrences = [n for n in case.graph.nodes if n.op == "hap.recurrence.default"]
    assert len(recurrences) == 2
    for seed in range(2):
        assert verdict(case, random_plan(case, 2 + seed % 2, seed)).ok


@pytest.mark.slow
def test_the_batch_is_split() -> None:
    case = tagger_case("gru")
    (node, *_) = (n for n in case.graph.nodes if n.op == "hap.recurrence.default")
    assert any(S(0) in row.outs for row in case.space.rows[node.name])


def test_a_shorter_batch_needs_a_total_length() -> None:
    shorter = LENGTHS - (LENGTHS == 6).long()
    packed = packed_sequences.pack_padded_sequence(torch.ones(5, 6, 2), shorter, batch_first=True)
    with pytest.raises(ValueError, match="total_length=6"):
        packed_sequences.pad_packed_sequence(packed)
    out, _ = packed_sequences.pad_packed_sequence(packed, batch_first=True, total_length=6)
    assert out.sum() == 2 * shorter.sum()


def test_the_steps_of_a_packed_sequence_are_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return self.layer(packed)[0].data.square().mean()

    with pytest.raises(ModelError, match="can't be captured"):
        capture(Packed(), (torch.ones(3, 4, 4), torch.tensor([4, 3, 2])))
