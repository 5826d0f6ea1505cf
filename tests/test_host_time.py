"""The host's time per operator in the turns of stages, and in the estimates of pipelines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hap.cluster.topology import Cluster
from hap.ir.microbatch import is_sum
from hap.ir.program import Compute
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.schedule.event_simulator import group_seconds
from hap.synthesizer.stages.segment_costs import together_s
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.stages.stage_times import figures, stage_cost
from tests.random_plans import benchmark_case, two_machines
from tests.random_stages import random_staged_plan


def hosted(cluster: Cluster, host_s: float) -> Cluster:
    devices = tuple(replace(d, host_s=host_s) for d in cluster.devices)
    return replace(cluster, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_turns_take_at_least_the_time_of_the_host(seed: int) -> None:
    """A host that takes a second per operator decides: turns take as many seconds as they have operators."""
    plan = random_staged_plan(benchmark_case("bert", "tiny"), (2, 1), seed)
    assert plan.stages is not None
    for graph, stage in zip(plan.cut[0], plan.stages.stages, strict=True):
        how = graph, stage.program, stage.shares

        def turns(host_s: float, how=how, ranks=stage.ranks) -> tuple[float, float]:  # type: ignore[no-untyped-def]
            hardware = HardwareModel(hosted(two_machines(len(ranks)), host_s))
            found = figures(*how, hardware, 2, plan.microbatches, 1)
            return found.forward_s, found.backward_s

        cost = stage_cost(*how, HardwareModel(two_machines(len(stage.ranks))), 2)
        issued = np.zeros(len(stage.ranks))
        for first, end in stage.program.bounds(graph):
            group = stage.program.instructions[first:end]
            seconds, messages = group_seconds(graph, group, cost)
            adds = sum(isinstance(s, Compute) and is_sum(graph.by_name[s.node]) for s in group)
            issued += 1.0 if messages else adds or seconds > 0
        free, one, two = turns(0.0), turns(1.0), turns(2.0)
        assert max(free) < 0.5
        assert 0 < sum(one) <= issued.sum()
        for side in (0, 1):
            # The host issues a whole number of operators; the last of them then takes its own time.
            assert 0 <= one[side] - round(one[side]) + 1e-9 <= free[side] + 2e-9
            assert two[side] == pytest.approx(2 * round(one[side]), abs=free[side] + 1e-9)


def test_groups_take_the_longer_of_computing_and_issuing() -> None:
    rng = np.random.default_rng(0)
    work_s, devices = rng.uniform(0, 1, (3, 4, 5, 2)), rng.integers(0, 3, (6, 2))
    devices[:, 0] += devices.sum(axis=1) == 0
    found = together_s(work_s, devices)
    assert found.shape == (4, 5, 6)
    for at in np.ndindex(4, 5):
        busy, launches, issuing = work_s[:, *at]
        for group, counts in enumerate(devices):
            here = counts > 0
            computing = 1 / (counts / busy).sum() + launches[here].max()
            assert found[*at, group] == pytest.approx(max(computing, issuing[here].max()))


def test_estimates_of_pipelines_count_the_host() -> None:
    space = benchmark_case("vit", "tiny").space
    free, slow = (
        StageSearch(space, hosted(two_machines(4), host_s), 2).estimates.sketches(np.inf)
        for host_s in (0.0, 1.0)
    )
    least = min(s.estimate_s for s in slow)
    assert least > 10 > max(s.estimate_s for s in free)
