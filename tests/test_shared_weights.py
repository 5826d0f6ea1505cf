"""Weights of several stages: their gradients are sums that stages pass on, some later than others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hap.ir import shared_pieces
from hap.ir.plan import Plan
from hap.ir.shared_pieces import in_pieces
from tests.random_plans import Case, benchmark_case, make_case, verdict
from tests.random_stages import random_staged_plan
from tests.test_verify import story


class Passed(nn.Module):
    """Two weights, of which the stages between the sigmoids use one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 8) / 3)
        self.w2 = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = ((x @ self.w1).tanh() @ self.w2).sigmoid()
        y = ((y @ self.w2).tanh() @ self.w1).sigmoid()
        return (y @ self.w1).tanh().square().mean()


def sums(plan: Plan, src: int, dst: int) -> list[bool]:
    """Return, for each sum that a stage passes to another, whether it adds to a received one."""
    graphs, transfers = plan.cut
    once = [t for t in transfers if t.backward and t.once]
    late = {t.tensor for t in once if t.dst == src}
    for node in graphs[src].nodes:
        if late.intersection(node.inputs):
            late.update(o for o in node.outputs if o)
    return [t.tensor in late for t in once if (t.src, t.dst) == (src, dst)]


def passed() -> Case:
    torch.manual_seed(0)
    return make_case(Passed(), (torch.randn(8, 8),))


@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 1, 2)])
def test_a_late_sum_before_an_early_one(groups: tuple[int, ...]) -> None:
    case = passed()
    plan = random_staged_plan(case, groups, 0, 4, ("sigmoid", "sigmoid_1"))
    assert sums(plan, 1, 0) == [True, False]
    found = verdict(case, plan)
    assert found.ok, story(found)


@pytest.mark.slow
def test_a_late_sum_before_an_early_one_in_t5() -> None:
    case = benchmark_case("t5", "tiny")
    plan = random_staged_plan(case, (1, 1, 1), 0, 2, ("bmm", "view_68"))
    assert sums(plan, 1, 0) == [True, False]
    found = verdict(case, plan)
    assert found.ok, story(found)


class Made(nn.Module):
    """The stage between the sigmoids makes a weight of another one, which the last stage uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.w).sigmoid()
        made = self.w.tanh()
        y = (y @ made).sigmoid()
        return (y @ made).square().mean()


@pytest.mark.parametrize("groups", [(1, 1, 1), (1, 2, 1)])
def test_a_stage_passes_on_what_it_makes_of_a_received_weight(groups: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    case = make_case(Made(), (torch.randn(8, 8),))
    plan = random_staged_plan(case, groups, 3, 4, ("sigmoid", "sigmoid_1"))
    graphs, transfers = plan.cut
    weights = {(t.src, t.dst): t.tensor for t in transfers if t.once and not t.backward}
    assert graphs[1].producer[weights[1, 2]].inputs == (weights[0, 1],)
    found = verdict(case, plan)
    assert found.ok, story(found)


@pytest.mark.parametrize("seed", [0, 5])
def test_a_sum_to_which_another_stage_contributes_is_reduced_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle stage adds the last one's sum to its own before it reduces both and passes them on."""
    monkeypatch.setattr(shared_pieces, "PIECE_BYTES", 64)
    case = passed()
    plan = random_staged_plan(case, (1, 2, 2), seed, 4, ("sigmoid", "sigmoid_1"))
    assert plan.stages is not None
    (_, graph, _), (_, stage, _) = plan.cut[0], plan.stages.stages
    reduced = {s for s in stage.program.collectives if s.kind == "reduce_scatter"}
    pieces = in_pieces(graph, stage.program, len(stage.ranks))
    assert reduced - {stage.program.instructions[k] for k in pieces}
    found = verdict(case, plan)
    assert found.ok, story(found)
