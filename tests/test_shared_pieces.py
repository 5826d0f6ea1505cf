"""Weights of two stages that are gathered, and whose gradients are reduced, beside their transfer."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.models import gpt2
from hap.ir import shared_pieces
from hap.ir.plan import Plan
from hap.ir.program import Convert
from hap.ir.shared_pieces import in_pieces, piece
from hap.ir.stages import Transfer
from hap.runtime.pipeline.piecewise import Pieces
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.stages.stage_times import StageFigures, figures
from hap.synthesizer.stages.stage_transfers import StageTransfers
from tests.random_plans import Case, benchmark_case, make_case, two_machines, verdict
from tests.random_stages import random_staged_plan
from tests.test_verify import on_gloo, story

SMALL = 256
"""Bytes of a piece of these tests' tensors."""

GROUPS = (2, 3)
FIRST = {"bert": 48, "gpt2": 2}
"""The seed of the first random plan of :data:`GROUPS` with both kinds of pieces."""


def kinds(plan: Plan) -> set[str]:
    """Return the kinds of conversions in pieces, of all stages."""
    assert plan.stages is not None
    graphs, _ = plan.cut
    found = set()
    for graph, stage in zip(graphs, plan.stages.stages, strict=True):
        for k in in_pieces(graph, stage.program, len(stage.ranks)):
            step = stage.program.instructions[k]
            assert isinstance(step, Convert)
            found.add(step.kind)
    return found


@cache
def of_both_kinds(family: str) -> Plan:
    """Return a random plan whose last stage gathers the table and reduces its gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_pieces, "PIECE_BYTES", SMALL)
        case = benchmark_case(family, "tiny")
        plans = (random_staged_plan(case, GROUPS, seed) for seed in range(FIRST[family], 80))
        return next(plan for plan in plans if len(kinds(plan)) == 2)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 100])
def test_pieces_are_all_rows_once(start: int, rows: int) -> None:
    for count in range(1, 9):
        ends = [piece(start, start + rows, k, count) for k in range(count)]
        assert [r for first, end in ends for r in range(first, end)] == [
            *range(start, start + rows)
        ]
        sizes = [end - first for first, end in ends]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2"])
def test_pieces_compute_what_one_device_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plan = benchmark_case(family, "tiny"), of_both_kinds(family)
    assert not kinds(plan)  # its tensors are small
    monkeypatch.setattr(shared_pieces, "PIECE_BYTES", SMALL)
    assert kinds(plan) == {"all_gather", "reduce_scatter"}
    calls = Counter[str]()
    for name in ("_placed", "_reduce"):
        usual = getattr(Pieces, name)

        def noted(self, *args, name=name, usual=usual):  # type: ignore[no-untyped-def]
            calls[name] += 1
            return usual(self, *args)

        monkeypatch.setattr(Pieces, name, noted)
    found = verdict(case, plan)
    assert found.ok, story(found)
    assert calls["_placed"] == calls["_reduce"] > 2 * GROUPS[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "first"), [((1, 3), 0), ((2, 2), 4), ((3, 2), 3)])
def test_pieces_of_random_pipelines(
    groups: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: the seed of the first plan with pieces."""
    monkeypatch.setattr(shared_pieces, "PIECE_BYTES", SMALL)
    monkeypatch.setattr(shared_pieces, "MOST_PIECES", 3)
    case = benchmark_case("bert", "tiny")
    plans = (random_staged_plan(case, groups, seed) for seed in range(first, 40))
    plan = next(p for p in plans if kinds(p))
    found = verdict(case, plan)
    assert found.ok, story(found)


@cache
def large_table() -> Case:
    """Return a GPT-2 whose table is of two pieces."""
    torch.manual_seed(0)
    size = {"layers": 1, "hidden": 64, "heads": 2, "ffn": 64, "vocab": 2**15, "seq": 8}
    model = gpt2.build(**size, dropout=0.0)
    return make_case(model, gpt2.inputs(6, 8, 2**15))


@pytest.mark.slow
@pytest.mark.gloo
def test_pieces_among_real_processes() -> None:
    case = large_table()
    plans = (random_staged_plan(case, (1, 2), seed, 3) for seed in range(16, 80))
    plan = next(p for p in plans if len(kinds(p)) == 2)
    found = verdict(case, plan, run=on_gloo)
    assert found.ok, story(found)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_pieces_hide_what_is_shorter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = of_both_kinds(family)
    assert plan.stages is not None
    graphs, transfers = plan.cut
    cluster = two_machines(plan.world_size)

    def seconds() -> tuple[list[StageFigures], dict[Transfer, float]]:
        found = [
            figures(
                graph, s.program, s.shares, HardwareModel(two_machines(len(s.ranks))), 2, plan.microbatches, 1
            )
            for graph, s in zip(graphs, plan.stages.stages, strict=True)
        ]  # fmt: skip
        priced = StageTransfers(cluster, graphs, plan.stages.stages, transfers)
        return found, {t: priced._once_s([t], found) for t in transfers if t.once}

    whole, once = seconds()
    assert not any(f.pieces for f in whole)
    monkeypatch.setattr(shared_pieces, "PIECE_BYTES", SMALL)
    parts, faster = seconds()
    shared = [f.pieces for f in parts if f.pieces]
    assert sum(map(len, shared)) >= 2
    for before, after in zip(whole, parts, strict=True):
        moved = before.shared_s + before.after_s - after.shared_s - after.after_s
        starts = sum(s for s, _ in after.pieces.values()) - moved
        assert moved >= -1e-12
        assert starts >= -1e-12
        assert bool(after.pieces) == (moved > 0)
        assert np.array_equal(before.compute_s, after.compute_s)
    for t, before_s in once.items():
        group = t.src if t.backward else t.dst
        if t.tensor in parts[group].pieces:
            local_s, count = parts[group].pieces[t.tensor]
            sent_s = before_s - whole[t.src].returned_s * t.backward
            least_s = max(sent_s, local_s) + min(sent_s, local_s) / count
            assert least_s <= faster[t] <= sent_s + local_s + sent_s / count
        else:
            assert faster[t] == pytest.approx(
                before_s - t.backward * (whole[t.src].returned_s - parts[t.src].returned_s)
            )
