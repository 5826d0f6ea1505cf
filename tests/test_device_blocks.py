"""Blocks of alike devices: their sizes, groups of them, and bounds that cover all sets of devices."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hap.cli.pipeline_hint import pipeline_hint
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.planner import choose
from hap.synthesizer.stages import device_blocks
from hap.synthesizer.stages.device_blocks import MOST_PAIRS, DeviceBlocks
from hap.synthesizer.stages.stage_dp import Chain
from hap.synthesizer.stages.stage_prediction import stage_bound
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.synthesize import Synthesizer
from tests.random_plans import benchmark_case, random_plan, two_machines

HEAD = "links: {between: {bandwidth: 10 Gbit/s, latency: 30 us}}\nnodes:\n"


def machines(*counts: tuple[int, int]) -> Cluster:
    """Return machines of (how many, GPUs in each), each pair of another type."""
    types = ("V100-16", "P100", "T4")
    lines = (f" - {{name: n{k}, count: {n}, gpus: {gpus}, type: {kind}}}\n"
             for k, ((n, gpus), kind) in enumerate(zip(counts, types, strict=False)))  # fmt: skip
    return load_cluster(HEAD + "".join(lines))


def of_kinds(kinds: int, each: int = 1) -> Cluster:
    """Return devices of so many kinds."""
    cluster = two_machines(kinds * each)
    devices = (replace(d, memory_bytes_per_s=1e8 * (1 + k // each))
               for k, d in enumerate(cluster.devices))  # fmt: skip
    return replace(cluster, devices=tuple(devices))


CLUSTERS = {
    "61x8": (61, 8), "62x8": (62, 8), "128x8": (128, 8), "64x1": (64, 1), "1x128": (1, 128),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CLUSTERS, "8x8+8x8", "1x8+70x4"])
def test_large_clusters_have_several_blocks_of_each_kind(name: str) -> None:
    both = {"8x8+8x8": ((8, 8), (8, 8)), "1x8+70x4": ((1, 8), (70, 4))}
    cluster = machines(*both.get(name, CLUSTERS.get(name, ()) and (CLUSTERS[name],)))
    blocks = DeviceBlocks(cluster)
    assert len(blocks.whole) <= MOST_PAIRS
    for kind, ranks in zip(blocks.kinds, cluster.types(), strict=True):
        assert kind.blocks >= 2
        assert sorted(kind.ranks) == list(ranks)
        for part in kind.parts:
            inside = Counter(cluster.devices[r].node for r in part)
            if len(inside) > 1:
                assert all(n == len(cluster.ranks(node)) for node, n in inside.items())


@pytest.mark.slow
def test_a_group_is_estimated_by_the_devices_that_it_has() -> None:
    """No blocks are equal here: the first group has the large machines, the second one as many small ones."""
    nodes = "".join(f" - {{name: n{gpus}, count: {count}, gpus: {gpus}, type: V100-16, host: 0 us}}\n"
                    for count, gpus in ((2, 8), (90, 1)))  # fmt: skip
    search = StageSearch(
        benchmark_case("gpt2", "tiny").space, load_cluster(HEAD + nodes), 2, quick=True
    )
    estimates, blocks = search.estimates, search.estimates.blocks
    sizes = Counter(len(part) for part in blocks.kinds[0].parts)
    assert sizes[16] == 1 and sizes[2] > 1
    (count,) = estimates.counts
    one = next(k for k, v in enumerate(blocks.vectors.tolist()) if v == [1])
    chain = Chain(places=(3,), groups=(one, one), least_s=0.0)
    each, groups = estimates._counts[count], blocks.ranks(chain.groups)
    assert [*map(len, groups)] == [16, 2]
    assert [blocks.counts(g).tolist() for g in groups] == [[16], [2]]
    large, small = (
        estimates._sketch(count, each, chain, order, 0.0) for order in (groups, groups[::-1])
    )
    assert 1 < small.ideal_s[0] / large.ideal_s[0] <= 8
    assert 1 < large.ideal_s[1] / small.ideal_s[1] <= 8


def unequal() -> Cluster:
    """Return 67 machines of 3, 2 and 1 devices of two kinds, which no number of machines divides."""
    cluster = machines((33, 3), (34, 2))
    return cluster.keep([r for r in range(cluster.world_size) if r not in {1, 2, 7}])


@pytest.mark.slow
@pytest.mark.parametrize("keep", [(), (5, 60)])
@pytest.mark.parametrize("cluster", [machines((61, 8)), machines((128, 8)), unequal()])
def test_groups_are_disjoint_and_have_all_devices(cluster: Cluster, keep: tuple[int, ...]) -> None:
    blocks = DeviceBlocks(cluster, frozenset(keep))
    everyone = set(range(cluster.world_size))
    assert (blocks.devices[-1] == [len(ranks) for ranks in cluster.types()]).all()
    rng = np.random.default_rng(0)
    for taken in rng.permutation(np.flatnonzero(blocks.whole == len(blocks.vectors) - 1))[:100]:
        pair = int(blocks.taken[taken]), int(blocks.rest[taken])
        group, rest = blocks.ranks(pair)
        assert not {*group} & {*rest}
        assert {*group} | {*rest} == everyone
        for index, ranks in zip(pair, (group, rest), strict=True):
            own = [len({*ranks} & {*kind}) for kind in cluster.types()]
            assert (blocks.devices[index] >= own).all()
        (alone,) = blocks.ranks(pair[:1])
        assert alone == group
        if not keep:
            own = [len({*alone} & {*kind}) for kind in cluster.types()]
            assert blocks.devices[pair[0]].tolist() == own
    first = blocks.ranks([int(np.flatnonzero((blocks.vectors == 1).all(axis=1))[0])])[0]
    assert not keep or {*keep} & {*first}


def on_mixed_machines() -> Cluster:
    """Return two alike machines of two devices of a kind and one of another, and a third machine."""
    cluster = of_kinds(2, 4)
    nodes = dict(zip(range(8), "aabbabcc", strict=True))
    devices = [replace(d, node=nodes[k]) for k, d in enumerate(cluster.devices)]
    link = cluster.inter
    return replace(cluster, devices=tuple(devices), intra={"a": link, "b": link, "c": link})


def seen(cluster: Cluster, ranks: tuple[int, ...]) -> str:
    """Return the devices of each kind on each machine."""
    own = [[r for r in cluster.ranks(node) if r in ranks] for node in cluster.nodes]
    return repr(sorted(sorted(repr(cluster.devices[r].figures) for r in each) for each in own))


@pytest.mark.parametrize("cluster", [of_kinds(2, 3), on_mixed_machines()])
def test_one_group_of_all_alike_sets_comes(cluster: Cluster) -> None:
    estimates = StageSearch(benchmark_case("mlp", "tiny").space, cluster, 2).estimates
    found = list(estimates.one_groups())
    least = [least_s for least_s, _ in found]
    assert least == pytest.approx(sorted(least))
    everyone = range(cluster.world_size)
    sets = [s for n in everyone for s in itertools.combinations(everyone, n + 1)]
    assert {seen(cluster, s) for s in sets} == {seen(cluster, s) for _, s in found}
    assert len({seen(cluster, s) for _, s in found}) == len(found) < len(sets)


@cache
def planned_s(kinds: int, ranks: tuple[int, ...]) -> float:
    space = benchmark_case("vit", "tiny").space
    plan = Synthesizer(space, slow_links(kinds).keep(ranks), 2).best()
    return plan.timeline.step_s


def slow_links(kinds: int) -> Cluster:
    """Return six devices between which it does not pay to send."""
    cluster = of_kinds(kinds, 6 // kinds)
    return replace(cluster, inter=replace(cluster.inter, bandwidth_bytes_per_s=4e5))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kinds", [1, 2])
def test_the_bound_holds_for_any_devices(
    kinds: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the blocks: for plans that keep one device, a part of a machine, or a machine."""
    monkeypatch.setattr(device_blocks, "MOST_PAIRS", 3**kinds if blocks == 1 else 2000)
    search = StageSearch(benchmark_case("vit", "tiny").space, slow_links(kinds), 2)
    assert {kind.blocks for kind in search.estimates.blocks.kinds} == (
        {1} if blocks == 1 else {6 // kinds}
    )
    relaxed_s = search.relaxed(tuple(range(6))).bound_s
    steps = [planned_s(kinds, ranks) for ranks in ((0,), (5,), (2, 3), (2, 3, 4, 5))]
    assert min(steps) < relaxed_s  # all devices are no bound of some
    for step_s in steps:
        bound = stage_bound(step_s, search)  # asserts that it is not above
        assert 0 < bound.step_s <= step_s


def test_too_many_kinds_are_refused_at_once() -> None:
    start = time.perf_counter()
    said = "13 kinds of devices, and stages are searched for at most 6"
    with pytest.raises(HapError, match=said):
        DeviceBlocks(of_kinds(13, 2))
    with pytest.raises(HapError, match=said):
        StageSearch(benchmark_case("mlp", "tiny").space, of_kinds(13, 2), 2)
    assert time.perf_counter() - start < 10
    assert len(DeviceBlocks(of_kinds(6, 2)).whole) <= MOST_PAIRS
    assert pipeline_hint(random_plan(benchmark_case("mlp", "tiny"), 13, 0), of_kinds(13)) == ""


@pytest.mark.slow
def test_a_plan_of_too_many_kinds_says_why_it_has_no_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_blocks, "MOST_PAIRS", 8)
    said: list[str] = []
    space = benchmark_case("mlp", "tiny").space
    found = choose(space, of_kinds(2), 2, PlanOptions(stages=True), said.append)
    assert found.pipeline is None
    assert any("no pipeline: the cluster has 2 kinds of devices" in text for text in said)
