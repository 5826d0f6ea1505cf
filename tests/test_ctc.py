"""Connectionist temporal classification: the losses of torch's own operator, and batches that are split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hap.capture import ctc
from tests.random_plans import make_case, random_plan, verdict

STEPS, ROWS, CLASSES = 12, 6, 20
X = torch.randn(STEPS, ROWS, CLASSES, dtype=torch.float64).log_softmax(-1)
TARGETS = torch.randint(1, CLASSES, (ROWS, 5))
LENGTHS = torch.tensor([12, 11, 12, 9, 3, 12])
LABELS = torch.tensor([5, 3, 1, 2, 5, 4])  # the fifth row has more labels than steps


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("form", ["padded", "one after the other", "numbers"])
def test_losses_and_gradients_are_those_of_torch(
    form: str, reduction: str, zero_infinity: bool
) -> None:
    given: tuple[Any, ...] = (TARGETS, LENGTHS, LABELS)
    if form == "one after the other":
        given = (torch.cat([row[:n] for row, n in zip(TARGETS, LABELS, strict=True)]), *given[1:])
    elif form == "numbers":
        given = (TARGETS, LENGTHS.tolist(), LABELS.tolist())
    found = []
    for run, kind in (
        (F.ctc_loss, reduction),
        (ctc.ctc_loss, ["none", "mean", "sum"].index(reduction)),
    ):
        x = X.clone().requires_grad_(True)
        loss = run(x, *given, 2, kind, zero_infinity)
        loss[loss.isfinite()].sum().backward() if reduction == "none" else loss.backward()
        found.append((loss.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_more_labels_than_steps(zero_infinity: bool) -> None:
    given = (X[:3], torch.randint(1, CLASSES, (20,)), [3] * ROWS, [2, 9, 1, 3, 4, 1], 0)
    found = ctc.ctc_loss(*given, 0, zero_infinity)
    assert found.isinf().any() != zero_infinity
    torch.testing.assert_close(found, F.ctc_loss(*given, "none", zero_infinity))


def test_one_sequence_without_a_batch() -> None:
    given = (X[:, 0], TARGETS[0], LENGTHS[0], LABELS[0])
    torch.testing.assert_close(
        ctc.ctc_loss(*given, reduction=0), F.ctc_loss(*given, reduction="none")
    )


class Speech(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(8, CLASSES), form

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        steps, there = torch.full((len(x),), STEPS), y >= 0
        labels = there.sum(-1)
        if self.form == "padded":
            return F.ctc_loss(scores, y.clamp(min=1), steps, labels)
        if self.form == "numbers":
            return F.ctc_loss(scores, y.clamp(min=1), [STEPS] * len(x), [2] * len(x))
        if self.form == "selected":
            with torch.backends.cudnn.flags(enabled=False):
                return F.ctc_loss(scores, y.masked_select(there), steps, labels, reduction="sum")
        if self.form == "selected by a function":
            return nn.CTCLoss()(scores, torch.masked_select(y, there), steps, labels)
        if self.form == "named":
            return F.ctc_loss(
                scores, targets=y.masked_select(there), input_lengths=steps, target_lengths=labels
            )
        if self.form == "in a checkpoint":
            chosen = checkpoint(
                lambda s: s.masked_select(s > -2).square().mean(), scores, use_reentrant=False
            )
            assert isinstance(chosen, Tensor)
            return chosen
        if self.form == "read by others":
            chosen = y.masked_select(there)
            return F.ctc_loss(scores, chosen, steps, labels) * chosen.sum()
        return scores.masked_select(scores > -2).sum()


def batch() -> dict[str, Tensor]:
    y = torch.randint(1, CLASSES, (ROWS, 5))
    y[1, 3:] = y[4, 2:] = -100
    return {"x": torch.randn(ROWS, STEPS, 8), "y": y}


FORMS = ("padded", "numbers", "selected", "selected by a function", "named", "read by others")


@pytest.mark.parametrize(("form", "world"), itertools.product(FORMS, (2, 3)))
def test_ranks_compute_what_one_device_does(form: str, world: int) -> None:
    torch.manual_seed(0)
    case = make_case(Speech(form), batch())
    ops = {node.op for node in case.graph.nodes}
    assert {"hap.ctc_loss.default", "hap.ctc_loss_backward.default"} <= ops
    seen = verdict(case, random_plan(case, world, 0))
    assert seen.ok, seen.first_bad


@pytest.mark.parametrize("form", ["no loss reads them", "in a checkpoint"])
def test_others_may_read_selected_elements(form: str) -> None:
    torch.manual_seed(0)
    case = make_case(Speech(form), batch())
    assert verdict(case, random_plan(case, 3, 0)).ok


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_is_an_error(label: int) -> None:
    wrong, padding = TARGETS.clone(), TARGETS.clone()
    wrong[0, 2], padding[2, 3] = label, label  # the third row has one label
    x = X.clone().requires_grad_(True)
    with pytest.raises(IndexError, match="none of the 20 classes"):
        ctc.ctc_loss(x, wrong, LENGTHS, LABELS)
    assert ctc.ctc_loss(x, padding, LENGTHS, LABELS, zero_infinity=True).isfinite()
