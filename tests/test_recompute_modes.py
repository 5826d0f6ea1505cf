"""The recompute mode of a plan: the fastest one that fits, and one that fits if others do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.api import plan_again, plan_file
from hap.capture.recompute import WAYS
from hap.capture.tracing import capture
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, PlanningStopped
from hap.ir.plan import Plan, Source
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.recompute_modes import WORTH, choose_for_model
from tests.random_plans import two_machines
from tests.test_synthesize import screen

MODES = ("", *WAYS)
BATCH = torch.empty(512, 64)


class Deep(nn.Module):
    """Blocks whose activations are cheap to compute again, of about as many bytes as their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.GELU(), nn.Linear(256, 64))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def unlike(nbytes: float) -> Cluster:
    """Return two fast devices and a slow one, each with so much memory."""
    cluster = two_machines(3)
    devices = [replace(d, memory_bytes=int(nbytes)) for d in cluster.devices]
    devices[2] = replace(devices[2], flops_per_s={"float32": 4e9})
    return replace(cluster, devices=tuple(devices))


def planned(on: Cluster, mode: str | None) -> Plan | None:
    torch.manual_seed(0)
    try:
        return hap.plan(Deep(), BATCH, on, options=PlanOptions(recompute=mode, accumulate=False))
    except InfeasibleError:
        return None


@cache
def peak_bytes() -> int:
    """Return the highest peak of the plan without limits of memory."""
    plan = planned(unlike(1e9), None)
    assert plan is not None
    assert plan.recipe.recompute == ""
    return max(rank.peak_bytes for rank in plan.prediction.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "mode"), [(0.9, ""), (0.8, "cheap"), (0.6, "blocks"), (0.4, None)]
)
def test_the_mode_is_the_fastest_that_fits(part: float, mode: str | None) -> None:
    """Without recomputation a plan fits 0.8 of the peak too, but takes longer."""
    on = unlike(part * peak_bytes())
    plan = planned(on, None)
    forced = {mode: p.prediction.step_s for mode in MODES if (p := planned(on, mode))}
    assert (plan is None) == (not forced) == (mode is None)
    if plan is not None:
        assert plan.recipe.recompute == mode
        assert plan.prediction.step_s <= min(forced.values()) / WORTH
        assert all(r.peak_bytes <= r.memory_bytes for r in plan.prediction.ranks)
        others = {a.name: a for a in plan.prediction.alternatives if "recomp" in a.name}
        assert all(not a.fits or a.step_s >= plan.prediction.step_s for a in others.values())
        rows = {0.8: {"without recomputation"}, 0.6: {"recomputing (cheap)"}}
        assert set(others) == rows.get(part, set())
        said = screen(plan)
        assert ("which saves memory" in said) == bool(mode)
        assert set(others) <= {line.split("  ")[1] for line in said.splitlines() if "  " in line}
    if part == 0.8:
        assert forced[""] > 1.2 * forced["cheap"]


@pytest.mark.slow
def test_a_search_that_is_stopped_keeps_the_plan_of_another_mode() -> None:
    graphs = {mode: capture(Deep(), BATCH, recompute=mode) for mode in MODES}
    said = list[str]()

    def stop(text: str) -> None:
        said.append(text)
        if said.count("search from start 1, round 1") == 2:
            raise PlanningStopped("stopped")

    on, options = unlike(0.6 * peak_bytes()), PlanOptions(stages=True)
    _, mode, pair = choose_for_model(graphs.__getitem__, WAYS, on, 2, options, stop)
    assert (mode, pair.stopped) == ("", "stopped")
    assert pair.pipeline


@pytest.mark.slow
@pytest.mark.parametrize(("part", "mode"), [(1.1, ""), (0.8, "cheap")])
def test_a_part_of_the_cluster_is_planned_with_the_mode_that_it_needs(
    part: float, mode: str, tmp_path: Path
) -> None:
    file = tmp_path / "deep.py"
    file.write_text(
        "from tests.test_recompute_modes import BATCH, Deep as model\nbatch = lambda: BATCH\n"
    )
    whole = plan_file(str(file), unlike(1e9))
    assert whole.recipe.recompute == ""
    on, options = unlike(part * peak_bytes()), PlanOptions(allow_idle=True)
    again, anew = plan_again(whole, on, options), plan_file(str(file), on, options=options)
    assert again.recipe.recompute == mode
    assert again.prediction.step_s == anew.prediction.step_s
    kept = plan_again(replace(whole, source=Source()), on, options)
    assert kept.recipe.recompute == ""
    kept = plan_again(replace(again, source=Source()), on, options)
    assert kept.recipe.recompute == mode


@pytest.mark.slow
@pytest.mark.parametrize(("part", "mode"), [(0.9, ""), (0.8, "cheap"), (0.4, None)])
def test_a_stop_after_short_searches_keeps_what_fits(part: float, mode: str | None) -> None:
    def stop(text: str) -> None:
        if "(blocks)" in text or text.startswith("search from"):
            raise PlanningStopped("stopped")

    on = unlike(part * peak_bytes())
    if mode is None:
        with pytest.raises(PlanningStopped):
            hap.plan(Deep(), BATCH, on, progress=stop)
        return
    plan = hap.plan(Deep(), BATCH, on, progress=stop)
    assert (plan.stopped, plan.recipe.recompute) == ("stopped", mode)
    assert all(r.peak_bytes <= r.memory_bytes for r in plan.prediction.ranks)
