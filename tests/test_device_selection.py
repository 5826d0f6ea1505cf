"""Any number of each kind of device is a candidate; fewer devices win ties."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hap.cluster.topology import Cluster
from hap.ir.plan import Plan
from hap.synthesizer.device_selection import CLOSE, MOST, _fastest_of
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.synthesize import Synthesizer
from tests.test_synthesize import captured, cluster, device, planned
from tests.test_two_axes import machines


def chosen(plan: Plan) -> list[str]:
    return [d.name for d in plan.cluster.devices]


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10, 1e12])
@pytest.mark.parametrize("speeds", [(1e12,) * 4, (4e12, 4e12, 1e12, 1e12), (1e12, 4e12)])
def test_no_row_of_the_screen_is_faster_than_the_plan(
    speeds: tuple[float, ...], bandwidth: float
) -> None:
    on = cluster(*(device(r, speed=s) for r, s in enumerate(speeds)), bandwidth=bandwidth)
    plan = planned(256, 256, 31, on)
    rows = [a.step_s for a in plan.prediction.alternatives if a.fits]
    assert plan.prediction.step_s <= min(rows) * CLOSE


def test_the_most_promising_parts_need_few_estimates() -> None:
    """They are the first of all by estimate; those with a higher lower bound have none."""
    rng = random.Random(0)
    for _ in range(200):
        asked: list[int] = []
        rough = [rough_part(rng.randint(0, 9), rng.randint(0, 3), k, asked) for k in range(12)]
        found = [s.left[0] for s in _fastest_of(rough)]
        asked, seen = [], list(asked)
        order = sorted(range(12), key=lambda k: rough[k].pair.estimated_objective[1])
        assert found == order[:MOST]
        assert set(found) <= set(seen)
        last = rough[found[-1]].pair.estimated_objective[1]
        assert all(rough[k].pair.least_objective[1] <= last for k in seen)


def rough_part(least: int, more: int, number: int, asked: list[int]) -> Any:
    class Pair(SimpleNamespace):
        @property
        def estimated_objective(self) -> tuple[float, int]:
            asked.append(number)
            return 0.0, least + more

    pair = Pair(least_objective=(0.0, least), serial=SimpleNamespace(peak_bytes=np.zeros(2)))
    part = SimpleNamespace(cluster=cluster(device(0), device(1)))
    return SimpleNamespace(synthesizer=part, pair=pair, left=(number,))


@pytest.mark.slow
def test_faster_links_bring_more_devices() -> None:
    """Of four equal devices one is the best on a slow link, and all are on a fast one."""
    numbers = []
    for exponent in (6, 7, 8, 9, 10, 12):
        on = cluster(*(device(r, speed=1e11) for r in range(4)), bandwidth=10**exponent)
        numbers.append(planned(512, 512, 31, on).world_size)
    assert numbers == sorted(numbers)
    assert {1, 4} <= {*numbers}


@pytest.mark.slow
def test_the_devices_that_stay_are_the_fast_ones() -> None:
    on = cluster(
        device(0, speed=1e10), device(1, speed=1e12), device(2, speed=1e12), bandwidth=1e10
    )
    plan = planned(1024, 512, 31, on)
    assert chosen(plan) == ["m:1", "m:2"]
    assert chosen(planned(1024, 512, 31, on, all_devices=True)) == ["m:0", "m:1", "m:2"]


FAST = [device(r, speed=1e12) for r in (0, 1)]
SLOW = [device(r, speed=1e10) for r in (2, 3)]
SHORT = [device(r, speed=1e12, memory=5_500_000) for r in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "on, want",
    [
        (cluster(*FAST, *SLOW), ["m:0", "m:1"]),
        (cluster(*SHORT, *SLOW), ["m:0", "m:1", "m:2"]),
        (machines((1.0, 1.0), (1.0, 1.0), (0.01, 0.01), between=1e10), ["m0:0", "m0:1", "m1:0", "m1:1"]),
    ],
    ids=["one machine", "short memory", "machines"],
)  # fmt: skip
def test_searches_in_other_processes_change_no_plan(
    on: Cluster, want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow devices are left out, so that the searches on the fast ones count."""
    monkeypatch.setattr("hap.synthesizer.synthesize.LONG", 0)
    apart = planned(1024, 512, 31, on, accumulate=False)
    monkeypatch.setattr("hap.background._has_core", lambda: False)
    here = planned(1024, 512, 31, on, accumulate=False)
    assert apart.program == here.program and apart.shares == here.shares
    assert apart.prediction == here.prediction
    assert chosen(here) == want


@pytest.mark.parametrize("step_s, starts", [(0.0, 1), (1e9, 2)])
def test_a_search_far_behind_its_rival_is_brief(step_s: float, starts: int) -> None:
    """The first start remains."""
    space = build_space(captured(1024, 512, 31).graph)
    synthesizer = Synthesizer(space, cluster(*FAST, *SLOW), 2)
    said: list[str] = []
    pair = synthesizer.best(said.append, lambda: (0.0, step_s))
    assert len({text.split(",")[0] for text in said if "from start" in text}) == starts
    assert ("computing a lower bound of the step" in said) == (starts > 1)
    assert pair.fits and synthesizer.relaxed.bound_s <= pair.estimated_objective[1]


def test_a_rival_without_room_is_none() -> None:
    space = build_space(captured(1024, 512, 31).graph)
    said: list[str] = []
    Synthesizer(space, cluster(*FAST, *SLOW), 2).best(said.append, lambda: (1.0, 0.0))
    assert any("start 2" in text for text in said)


def test_a_step_that_waits_for_its_host_runs_on_one_device() -> None:
    """One device issues no collectives; each of them would take its host as long as an operator."""
    slow = replace(device(0, speed=1e15), host_s=1e-3)
    plan = planned(8, 16, 4, cluster(slow, replace(slow, name=device(1).name)))
    assert plan.world_size == 1
    assert not plan.program.collectives
