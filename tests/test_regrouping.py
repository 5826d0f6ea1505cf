"""The local search of pipelines: its moves, and what it brings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import networkx
import pytest

import benchmarks
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.synthesizer.stages import stage_search
from hap.synthesizer.stages.regrouping import Vector, neighbours, regrouped
from hap.synthesizer.stages.stage_estimates import MOST_STAGES
from hap.synthesizer.stages.stage_search import StageSearch
from tests.random_plans import benchmark_case, two_machines

MOST: Vector = (2, 1)
VECTORS = [v for v in itertools.product(range(3), range(2)) if any(v)]


def pipelines(stages: int) -> set[tuple[Vector, ...]]:
    """Return the groups of all pipelines of up to so many stages."""
    return {
        groups
        for count in range(1, stages + 1)
        for groups in itertools.product(VECTORS, repeat=count)
        if all(sum(n) <= most for n, most in zip(zip(*groups, strict=True), MOST, strict=True))
    }


def test_moves_lead_from_each_pipeline_to_each_other() -> None:
    """All pipelines of three blocks."""
    every = pipelines(3)
    moves = networkx.DiGraph((a, b) for a in every for b in neighbours(a, VECTORS))
    assert {*moves} == every
    assert networkx.is_strongly_connected(moves)


@pytest.mark.parametrize(
    "moved",
    [
        ((1, 0), (1, 0)),  # left out
        ((0, 1), (1, 0), (1, 0)),  # in another place
        ((1, 0), (1, 1)),  # given to another stage, of which nothing is left
        ((2, 0), (0, 1)),  # joined
    ],
)
def test_moves(moved: tuple[Vector, ...]) -> None:
    assert moved in {*neighbours(((1, 0), (1, 0), (0, 1)), VECTORS)}


def test_no_more_stages_than_the_most() -> None:
    most = (MOST_STAGES + 2,)
    groups = ((1,),) * MOST_STAGES
    vectors = [(n,) for n in range(1, most[0] + 1)]
    found = {*neighbours(groups, vectors)}
    assert found
    assert max(map(len, found)) == MOST_STAGES


def unlike(world: int) -> Cluster:
    """Return two machines, whose last devices have a third of the others' speed."""
    cluster = two_machines(world)
    slow = {"flops_per_s": {"float32": 3e7}, "memory_bytes_per_s": 5e7}
    fast = {"flops_per_s": {"float32": 1e8}, "memory_bytes_per_s": 1e8}
    devices = [replace(d, **(slow if k >= world - 3 else fast))  # type: ignore[arg-type]
               for k, d in enumerate(cluster.devices)]  # fmt: skip
    inter = replace(cluster.inter, bandwidth_bytes_per_s=4e6)
    return replace(cluster, inter=inter, devices=tuple(devices))


@cache
def searched(family: str) -> StageSearch:
    return StageSearch(benchmark_case(family, "tiny").space, unlike(7), 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "wide_mlp"])
def test_a_local_search_ends_where_no_move_is_better(family: str) -> None:
    """Of all moves, also of those that it does not simulate: none is estimated to be 1 % better."""
    estimates = searched(family).estimates
    vectors = [tuple(v) for v in estimates.blocks.vectors.tolist()]
    sketches = sorted(estimates.sketches(), key=lambda s: s.estimate_s)
    for start in sketches[:: len(sketches) // 5]:
        end = regrouped(estimates, start)
        assert end.microbatches == start.microbatches
        assert end.estimate_s <= start.estimate_s
        around = neighbours([vectors[g] for g in end.indices], vectors[1:])
        for groups in around:
            chain = estimates.chain(end.microbatches, [vectors.index(v) for v in groups])
            if chain and not (near := estimates.of_chain(end.microbatches, chain)).lacking:
                assert near.estimate_s > 0.99 * end.estimate_s


@pytest.mark.slow
@pytest.mark.parametrize(("family", "most"), [("bert_moe", 0.98), ("vit", 0.995), ("bert", 1.0)])
def test_local_searches_find_faster_pipelines(
    family: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pipeline to search, against that of the dynamic program alone."""
    cluster = load_cluster(Path(benchmarks.__file__).parent / "clusters" / "unlike8.yaml")
    search = StageSearch(benchmark_case(family, "tiny").space, cluster, 2)
    with_local, *_ = search._promising(math.inf)
    monkeypatch.setattr(stage_search, "STARTS", 0)
    without, *_ = search._promising(math.inf)
    assert with_local.estimate_s <= most * without.estimate_s
