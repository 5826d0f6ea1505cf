"""Graphs whose programs are too entangled for elimination are planned all the same."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.errors import TooEntangledError
from hap.ir.plan import Plan
from hap.synthesizer import planner
from hap.synthesizer.search import astar, bucket_elimination, engines
from hap.synthesizer.search.bucket_elimination import TooWide
from hap.synthesizer.search.cost_tables import Problem
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.search.search_result import Pairs, SearchResult, SearchStatus, Unary
from hap.synthesizer.synthesize import Synthesizer
from tests.random_plans import make_case, two_machines, verdict


class Dense(nn.Module):
    """Every layer reads the outputs of all before it, as in a DenseNet."""

    def __init__(self, layers: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width * k), nn.ReLU(), nn.Conv2d(width * k, width, 3, padding=1)
            )
            for k in range(1, layers + 1)
        )  # fmt: skip
        self.head = nn.Linear(width * (layers + 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return F.cross_entropy(
            self.head(torch.cat(made, 1).mean((2, 3))), torch.arange(len(x), device=x.device) % 5
        )


BATCH = (torch.randn(12, 4, 6, 6, generator=torch.Generator().manual_seed(0)),)


@functools.cache
def _planned(layers: int) -> tuple[Plan, str]:
    said: list[str] = []
    plan = hap.plan(Dense(layers), BATCH, two_machines(2), progress=said.append)
    return plan, "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["narrower", "whole"])
def test_a_dense_network_is_planned_with_its_gap(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of few entries make a small network as entangled as a large one.

    A narrower space is searched, unless an A* over the whole space finds a better program.
    """
    exact, said = _planned(5)
    assert "too entangled" not in said
    monkeypatch.setattr(bucket_elimination, "LARGEST_TABLE", 200)
    monkeypatch.setattr(engines, "FEW", 40)  # A* proves nothing
    if whole:
        monkeypatch.setattr(planner, "bound", astar.search)
    lines: list[str] = []
    plan = hap.plan(Dense(5), BATCH, two_machines(2), progress=lines.append)
    said = "\n".join(lines)
    assert whole or "now with the axes of the batch alone" in said
    assert "weights that many layers share" not in said, (
        "there are none: that space is the whole one"
    )
    assert ("now with everything free, by A*" in said) == whole
    assert plan.prediction.step_s <= exact.prediction.step_s * (1.001 if whole else 1.05)
    for bound in plan.prediction.bounds:
        assert 0 < bound.step_s <= exact.prediction.step_s * (1 + 1e-9)
        assert 0 <= bound.gap < (1 if whole else 0.2)
    torch.manual_seed(0)
    assert verdict(make_case(Dense(5), BATCH, graph=plan.graph), plan).ok


@pytest.mark.slow
def test_a_network_that_is_too_wide_for_elimination_is_planned_by_a_star() -> None:
    plan, said = _planned(20)
    assert "now with everything free, by A*" in said
    space = build_space(plan.graph)
    synthesizer = Synthesizer(space, two_machines(2), 2)
    problem = Problem(space, synthesizer._cost(None, next(synthesizer.starts())))
    with pytest.raises(TooWide):
        problem.solve()
    assert problem.outcome(engines.eliminate).status is SearchStatus.OPTIMAL
    assert all(bound.gap < 0.2 for bound in plan.prediction.bounds)


@pytest.mark.slow
def test_a_search_that_finds_nothing_leaves_all_of_the_step_to_every_rank() -> None:
    def gives_up(unary: Unary, pairs: Pairs) -> SearchResult:
        return SearchResult(bound=0, labelling=None)

    space = build_space(_planned(5)[0].graph)
    synthesizer = Synthesizer(space, two_machines(2), 2, engine=gives_up)
    found = synthesizer.cheapest(next(synthesizer.starts()))
    assert not found.program.used_axes()
    assert synthesizer.gap == 1.0


def test_an_exact_engine_alone_refuses_tables_that_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = build_space(_planned(5)[0].graph)
    monkeypatch.setattr(bucket_elimination, "LARGEST_TABLE", 20)
    monkeypatch.setattr(engines, "FEW", 40)
    synthesizer = Synthesizer(space, two_machines(2), 2, engine=engines.eliminate)
    with pytest.raises(TooEntangledError, match="too entangled"):
        synthesizer.cheapest(next(synthesizer.starts()))
