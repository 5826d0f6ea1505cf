"""The search for pipelines: its lower bound, its dynamic program, its groups and microbatches."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import hap
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.ir.microbatch import is_sum
from hap.ir.plan import Plan
from hap.ir.prediction import EVEN_PIPELINE
from hap.ir.program import Convert
from hap.ir.returned_sums import returned_conversions
from hap.ir.stages import cut_stages, stage_ranges
from hap.runtime.pipeline.segments import StageSegment, layout
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.message_cost import least_send
from hap.synthesizer.device_selection import CLOSE
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.planner import choose
from hap.synthesizer.schedule.pipeline_simulator import StageSeconds, simulate_pipeline
from hap.synthesizer.stages import stage_estimates
from hap.synthesizer.stages.device_blocks import DeviceBlocks
from hap.synthesizer.stages.even_pipeline import even_pipeline, even_pipelines
from hap.synthesizer.stages.flights import chosen_flights
from hap.synthesizer.stages.group_reduction import GroupReduction
from hap.synthesizer.stages.segment_costs import GroupSeconds
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_dp import Boundaries, ChainSearch
from hap.synthesizer.stages.stage_prediction import stage_bound
from hap.synthesizer.stages.stage_search import StageSearch
from hap.synthesizer.stages.stage_synthesizer import StageSynthesizer, StageTask
from hap.synthesizer.stages.stage_times import StageFigures, figures, least_gathering
from hap.synthesizer.stages.stage_transfers import StageTransfers, even_send_s
from tests.random_plans import benchmark_case, random_plan, two_machines, verdict
from tests.random_stages import divided


def unlike(world: int) -> Cluster:
    """Return devices of two kinds: the last one is slow, also to start an operator."""
    cluster = two_machines(world)
    fast = {"flops_per_s": {"float32": 1e8}, "memory_bytes_per_s": 1e8}
    slow = {"flops_per_s": {"float32": 3e7}, "memory_bytes_per_s": 5e7, "launch_s": 2e-5}
    devices = [replace(d, **(slow if k == world - 1 else fast))  # type: ignore[arg-type]
               for k, d in enumerate(cluster.devices)]  # fmt: skip
    inter = replace(cluster.inter, bandwidth_bytes_per_s=4e6)
    return replace(cluster, inter=inter, devices=tuple(devices))


@cache
def searched(family: str) -> StageSearch:
    return StageSearch(benchmark_case(family, "tiny").space, unlike(3), 2)


def groupings(world: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ordered partitions of all sets of devices."""
    for assigned in itertools.product(range(world + 1), repeat=world):
        used = sorted(set(assigned) - {world})
        if used and used == list(range(len(used))):
            yield tuple(tuple(r for r in range(world) if assigned[r] == g) for g in used)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "mlp"])
def test_no_pipeline_is_below_the_bound(family: str) -> None:
    """A certificate: the cheapest programs of any cuts, groups and microbatches, all in flight."""
    search, rng = searched(family), random.Random(family)
    estimates = search.estimates
    space = [
        (groups, cuts, count)
        for groups in groupings(3)
        for cuts in itertools.combinations(estimates.places, len(groups) - 1)
        for count in estimates.counts
    ]
    found = 0
    for groups, cuts, count in rng.sample(space, min(15, len(space))):
        sketch = Sketch(groups=groups, cuts=cuts, microbatches=count, estimate_s=0.0, least_s=0.0)
        made = search.pipeline(sketch)
        if made is None:
            continue
        found += 1
        most = [replace(s, in_flight=count) for s in made.seconds]
        step_s = simulate_pipeline(most, count).step_s
        bound = stage_bound(made.times.step_s, search)  # asserts that it is not above
        assert bound.step_s <= min(step_s, made.times.step_s)
        places = [estimates.places.index(c) for c in cuts]
        vectors = estimates.blocks.vectors.tolist()
        kinds = [k.ranks for k in estimates.blocks.kinds]
        chosen = [vectors.index([len({*g} & {*ranks}) for ranks in kinds]) for g in groups]
        assert estimates.least_s(count, places, chosen) <= min(step_s, made.times.step_s)
    assert found > 5


@pytest.mark.parametrize("family", ["vit", "bert", "t5", "bert_moe"])
def test_operators_stay_in_their_range_under_fewer_cuts(family: str) -> None:
    graph = divided(benchmark_case(family, "tiny")).part(2)
    places = searched(family).estimates.places
    ranges, rng = stage_ranges(graph, places), random.Random(family)
    backward = [name for name in ranges if name in graph.backward]
    assert len(backward) > len(graph.backward) / 3
    for _ in range(6):
        kept = sorted(rng.sample(range(len(places)), rng.randrange(1, 4)))
        graphs, _ = cut_stages(graph, [places[k] for k in kept])
        at = {n.name: k for k, g in enumerate(graphs) for n in g.nodes}
        for name, (first, last) in ranges.items():
            assert sum(k < first for k in kept) <= at[name] <= sum(k < last for k in kept)


def test_the_dynamic_program_finds_the_least_pipeline() -> None:
    rng = np.random.default_rng(0)
    blocks, segments = DeviceBlocks(unlike(4)), 4
    shape = segments, segments, len(blocks.vectors)
    each, extra = rng.random(shape), rng.random(shape)
    places = segments - 1, len(blocks.vectors)
    there, back, around = (rng.random(places) for _ in range(3))
    boundaries = Boundaries(microbatches=3, forward_s=there, backward_s=back, round_s=around)

    def priced(first: int) -> GroupSeconds:
        own = each[first, first:]
        return GroupSeconds(each_s=own, all_s=3 * own + extra[first, first:])

    search = ChainSearch(segments, blocks, priced, boundaries, 3)
    for stages in (1, 2, 3):
        options = [
            search.of(places, groups)
            for places in itertools.combinations(range(segments - 1), stages - 1)
            for groups in itertools.product(range(1, len(blocks.vectors)), repeat=stages)
            if (blocks.vectors[list(groups)].sum(axis=0) <= blocks.vectors[-1]).all()
        ]
        assert search.least_s(stages) == pytest.approx(min(options), rel=1e-12)
        chains = list(search.chains(stages))
        assert min(c.least_s for c in chains) == pytest.approx(min(options), rel=1e-12)
        for chain in chains:
            assert search.of(chain.places, chain.groups) == pytest.approx(chain.least_s)
        for groups in itertools.product(range(1, len(blocks.vectors)), repeat=stages):
            found = search.on_groups(groups)
            cuts = itertools.combinations(range(segments - 1), stages - 1)
            assert found
            assert found.groups == groups
            assert found.least_s == pytest.approx(min(search.of(p, groups) for p in cuts))
            assert search.of(found.places, groups) == pytest.approx(found.least_s)
    assert search.on_groups((1,) * (segments + 1)) is None


@pytest.mark.parametrize("seed", range(20))
def test_links_bound_pipelines_of_transfers_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, segments, count = DeviceBlocks(unlike(4)), 4, int(rng.integers(1, 5))
    places = segments - 1, len(blocks.vectors)
    there, back = (rng.random(places) * (rng.random((places[0], 1)) < 0.7) for _ in range(2))
    boundaries = Boundaries(
        microbatches=count, forward_s=there, backward_s=back, round_s=there * rng.integers(0, 2)
    )

    def priced(first: int) -> GroupSeconds:
        none = np.zeros((segments - first, places[1]))
        return GroupSeconds(each_s=none, all_s=none)

    search = ChainSearch(segments, blocks, priced, boundaries, segments)
    for cuts in ((1,), (0, 2), (0, 1, 2)):
        groups = rng.integers(1, places[1], len(cuts) + 1)
        taken = [
            [max(s[c, groups[k]], s[c, groups[k + 1]]) for k, c in enumerate(cuts)]
            for s in (there, back)
        ]
        stages = [
            StageSeconds(forward_s=0.0, backward_s=0.0, send_s=float(a), return_s=float(b), in_flight=count)
            for a, b in zip([*taken[0], 0.0], [*taken[1], 0.0], strict=True)
        ]  # fmt: skip
        step_s = simulate_pipeline(stages, count).step_s
        assert search.of(cuts, groups.tolist()) <= step_s * (1 + 1e-12)


@pytest.mark.parametrize("rows", [16, 4096])
def test_the_bound_of_one_device_is_not_above_its_plan(rows: int) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    cluster = "nodes:\n - {name: a, gpus: 1, type: V100-16}\n"
    plan = hap.plan(
        model, torch.zeros(rows, 512), cluster, loss=lambda out, batch: out.square().mean(),
        options=PlanOptions(stages=True),
    )  # fmt: skip
    assert all(b.step_s <= plan.prediction.step_s * (1 + 1e-9) for b in plan.prediction.bounds)
    assert len(plan.prediction.bounds) == 3


def test_groups_have_devices_of_several_kinds_and_leave_some_out() -> None:
    sketches = list(searched("vit").estimates.sketches())
    cluster = unlike(3)
    kinds = [{cluster.devices[r].figures for r in g} for s in sketches for g in s.groups]
    assert max(map(len, kinds)) == 2
    assert min(sum(map(len, s.groups)) for s in sketches) == 1
    assert {len(s.groups) for s in sketches} >= {1, 2, 3}


def test_no_more_in_flight_than_gain_time() -> None:
    slow = [
        StageSeconds(forward_s=1.0, backward_s=1.0, send_s=2.0, return_s=2.0, in_flight=1),
        StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1),
    ]
    near = [replace(s, send_s=0.0, return_s=0.0) for s in slow]
    assert chosen_flights(near, 8, (8, 8)) == (2, 1)
    ahead = chosen_flights(slow, 8, (8, 8))
    assert ahead[0] > 2
    assert chosen_flights(slow, 8, (2, 8))[0] == 2
    assert chosen_flights(slow, 8, (8, 0)) == ()


@pytest.mark.slow
def test_the_even_pipeline_is_even() -> None:
    case, cluster = benchmark_case("vit", "tiny"), two_machines(4)
    search = StageSearch(case.space, cluster, 2)
    row, made = even_pipeline(search)
    assert row.step_s > 0
    assert row.fits
    assert "stages" in row.note
    odd, _ = even_pipeline(StageSearch(case.space, two_machines(3), 2))
    assert odd.step_s == 0.0
    assert "equal stages" in odd.note
    cuts = search.estimates.even_cuts(2)
    found = {how: p for p, how in even_pipelines(search) if p.stages.cuts == cuts}
    assert found.keys() == {"data parallel", "tensor parallel"}
    for made in found.values():
        assert [s.ranks for s in made.stages.stages] == [(0, 1), (2, 3)]
        assert [s.in_flight for s in made.stages.stages] == [2, 1]
        for stage in made.stages.stages:
            assert all(max(units) - min(units) <= 1 for units in stage.shares.values())


@pytest.mark.slow
def test_a_stage_that_lacks_memory_alone_runs_its_forwards_again() -> None:
    case, cluster = benchmark_case("vit", "tiny"), two_machines(2)
    search = StageSearch(case.space, cluster, 2)
    sketch = Sketch(
        groups=((0,), (1,)), cuts=search.estimates.even_cuts(2), microbatches=6, estimate_s=0.0,
        least_s=0.0,
    )  # fmt: skip
    free = search.pipeline(sketch)
    assert free is not None
    assert free.seconds[0].in_flight > 1
    assert not any(stage.recompute for stage in free.stages.stages)
    one = free.figures[0].with_in_flight(1)
    little = round(float(one.peak_bytes[0] + 0.5 * one.saved_bytes[0]))
    devices = tuple(
        replace(d, memory_bytes=little if k == 0 else d.memory_bytes)
        for k, d in enumerate(cluster.devices)
    )
    made = StageSearch(case.space, replace(cluster, devices=devices), 2).pipeline(sketch)
    assert made is not None
    assert made.fits
    assert [stage.recompute for stage in made.stages.stages] == [True, False]
    assert made.times.step_s > free.times.step_s
    plan = replace(
        random_plan(case, 2, 0), program=made.over_time.program,
        shares=made.over_time.shares(6) or {}, idle=(), stages=made.stages,
    )  # fmt: skip
    assert verdict(case, plan).ok
    assert Plan.from_json(plan.to_json()) == plan


def _task(family: str, cluster: Cluster, count: int) -> StageTask:
    """Return the first of two stages on all devices of a cluster."""
    search = StageSearch(benchmark_case(family, "tiny").space, cluster, 2)
    time = divided(benchmark_case(family, "tiny"))
    cuts = search.estimates.even_cuts(2)
    whole, part = (cut_stages(g, cuts)[0][0] for g in (time.whole(), time.part(count)))
    ranks = tuple(range(cluster.world_size))
    return StageTask(whole=whole, part=part, ranks=ranks, count=count, in_flight=2)


def _chosen(task: StageTask, cluster: Cluster) -> StageFigures:
    program, shares = StageSynthesizer(task, cluster, 2).chosen()
    axes = task.space.axes
    for (tensor, dim), axis in axes.of.items():  # the shares are those of a microbatch
        assert task.part.tensors[tensor].shape[dim] % axes.axes[axis].units == 0
    how = task.part, program, shares, HardwareModel(cluster), 2, task.count, 2
    memory = [d.memory_bytes for d in cluster.devices]
    return least_gathering(
        lambda each: figures(*how, recompute=True, gather_each=each), memory
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "wide_mlp"])
def test_a_stage_is_searched_within_its_memory(family: str) -> None:
    cluster = two_machines(4)
    task = _task(family, cluster, 2)
    free = _chosen(task, cluster)
    room = round(0.9 * float(free.peak_bytes.max()))
    devices = tuple(replace(d, memory_bytes=room) for d in cluster.devices)
    small = _chosen(task, replace(cluster, devices=devices))
    assert small.peak_bytes.max() <= room


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", ["vit", "bert"])
def test_gradients_are_reduced_once_per_step(family: str, count: int) -> None:
    cluster = two_machines(2)
    task = _task(family, cluster, count)
    terms = {n.inputs[0] for n in task.part.nodes if is_sum(n)}
    program, _ = StageSynthesizer(task, cluster, 2).chosen()
    assert program.collectives
    assert not [c.tensor for c in program.collectives if c.tensor in terms]


@pytest.mark.slow
def test_a_shared_weight_is_reduced_once_and_crosses_once() -> None:
    """Stages of two devices: the last one reads the weight of the first one's embedding."""
    case, cluster = benchmark_case("bert", "tiny"), two_machines(4)
    search = StageSearch(case.space, cluster, 2)
    sketch = Sketch(
        groups=((0, 2), (1, 3)), cuts=search.estimates.even_cuts(2), microbatches=2,
        estimate_s=0.0, least_s=0.0,
    )  # fmt: skip
    made = search.pipeline(sketch)
    assert made is not None
    shared = {t.tensor: t for t in made.transfers if t.once}
    assert {t.backward for t in shared.values()} == {False, True}
    for number, (part, stage) in enumerate(zip(made.parts, made.stages.stages, strict=True)):
        program, returned = stage.program, returned_conversions(part, stage.program)
        assert bool(returned) == bool(number)
        sent = {t.tensor for t in shared.values() if t.backward and t.src == number}
        steps = enumerate(program.instructions)
        assert returned == {k for k, s in steps if isinstance(s, Convert) and s.tensor in sent}
        segments = layout(part, program).numbers
        assert set(segments[StageSegment.RETURNED]) == returned
        assert (made.figures[number].returned_s > 0) == bool(number)
    priced = StageTransfers(cluster, made.parts, made.stages.stages, made.transfers)
    for t in shared.values():
        crossed = sum(nbytes for _, _, nbytes in priced.messages(t))
        assert crossed == pytest.approx(made.parts[t.src].tensors[t.tensor].nbytes)
    plan = replace(
        random_plan(case, 4, 0), program=made.over_time.program,
        shares=made.over_time.shares(2) or {}, idle=(), stages=made.stages,
    )  # fmt: skip
    found = verdict(case, plan)
    assert found.ok, found


@pytest.mark.parametrize("seed", range(10))
def test_messages_take_as_long_as_the_busiest_link(seed: int) -> None:
    rng, cluster = random.Random(seed), two_machines(6)
    order = rng.sample(range(6), 6)
    src, dst = tuple(sorted(order[:3])), tuple(sorted(order[3:5]))
    rows = 12
    held = {r: (4 * k, 4 * k + 4) for k, r in enumerate(src)}
    needed = {r: (6 * k, 6 * k + 6) for k, r in enumerate(dst)}
    busy: defaultdict[tuple[object, str], float] = defaultdict(float)
    latency_s = 0.0
    for row in range(rows):
        a, b = (next(r for r, (x, y) in ends.items() if x <= row < y) for ends in (held, needed))
        here, there = cluster.devices[a].node, cluster.devices[b].node
        link = cluster.intra[here] if here == there else cluster.inter
        latency_s = max(latency_s, link.latency_s)
        ends = (a, b) if here == there else (here, there)
        for end, way in zip(ends, ("out", "in"), strict=True):
            busy[end, way] += 1e6 / link.bandwidth_bytes_per_s
    expected = latency_s + max(busy.values())
    found_s = even_send_s(cluster, src, dst, rows * 1e6)
    assert found_s == pytest.approx(expected)
    start, per_byte = least_send(cluster)
    assert found_s >= start + rows * 1e6 * per_byte / len(src)


def test_estimates_learn_from_pipelines() -> None:
    estimates = StageSearch(benchmark_case("vit", "tiny").space, unlike(3), 2).estimates
    before = [s for s in estimates.sketches() if s.microbatches == 2]
    for sketch in before:
        estimates.learn(sketch, [3 * s for s in sketch.ideal_s], 3 * sketch.estimate_s)
    after = [s for s in estimates.sketches() if s.microbatches == 2]
    assert min(s.estimate_s for s in after) > 1.2 * min(s.estimate_s for s in before)
    bounds = {(s.groups, s.cuts): s.least_s for s in before}
    known = [s for s in after if (s.groups, s.cuts) in bounds]
    assert known
    assert all(s.least_s == bounds[s.groups, s.cuts] for s in known)


def test_expected_times_are_estimates_times_the_mean_ratio_of_predictions() -> None:
    estimates = StageSearch(benchmark_case("vit", "tiny").space, unlike(3), 2).estimates
    sketches = list(estimates.sketches())
    assert all(estimates.expected_s(s) == s.estimate_s for s in sketches)
    ratios = {2: [2.0, 0.5, 2.0], 3: [0.8]}
    for count, each in ratios.items():
        sketch = next(s for s in sketches if s.microbatches == count)
        excess = estimates._counts[count].excess
        as_estimated = [s * excess[k] for s, k in zip(sketch.ideal_s, sketch.indices, strict=True)]
        for ratio in each:
            estimates.learn(sketch, as_estimated, ratio * sketch.estimate_s)
    assert {s.microbatches for s in sketches} > {*ratios}
    for sketch in sketches:
        known = ratios.get(sketch.microbatches, [2.0, 0.5, 2.0, 0.8])
        expected_s = sketch.estimate_s * np.prod(known) ** (1 / len(known))
        assert estimates.expected_s(sketch) == pytest.approx(expected_s)


def test_the_next_numbers_of_microbatches_are_near() -> None:
    estimates = StageSearch(benchmark_case("vit", "tiny").space, unlike(3), 2).estimates
    for sketch in estimates.sketches():
        near = estimates.other_counts(sketch)
        number = estimates.counts.index(sketch.microbatches)
        expected = {k for k in (number - 1, number + 1) if 0 <= k < len(estimates.counts)}
        assert {estimates.counts.index(s.microbatches) for s in near} == expected
        assert {(s.groups, s.cuts) for s in near} <= {(sketch.groups, sketch.cuts)}


def _ends(crossings: set[tuple[int, int, bool]]) -> set[tuple[int, int, bool]]:
    """Return the weights that cross forward, and the ends of the gradients that come back."""
    back = [(src, dst) for src, dst, backward in crossings if backward]
    forward = {each for each in crossings if not each[2]}
    return forward | {(max(s for s, _ in back), min(d for _, d in back), True) for _ in back[:1]}


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_estimates_know_between_which_stages_a_weight_crosses(family: str) -> None:
    """Against the transfers of the stages; the last stage need not read the weight of the first one."""
    estimates, rng = searched(family).estimates, random.Random(family)
    count, found = estimates.counts[0], 0
    costs, graph = estimates._counts[count].costs, estimates._over_time.part(count)
    groups: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,))
    last = len(estimates.places) - 1
    every = [(last - 1, last), *(tuple(sorted(rng.sample(range(last + 1), 2))) for _ in range(9))]
    for places in every:
        _, transfers = cut_stages(graph, [estimates.places[k] for k in places])
        once = {(t.src, t.dst, t.backward) for t in transfers if t.once}
        expected = {
            (t.src, stage, t.backward)
            for stage in range(3)
            for t in estimates._awaits(costs, places, groups, stage)
        }
        # A gradient may be added up on its way: an estimate has its ends.
        assert _ends(once) == _ends(expected)
        found += len(once)
    assert bool(found) == (family != "vit")


def test_gradients_are_reduced_in_two_parts_where_that_takes_no_longer() -> None:
    cluster = load_cluster(
        "links: {between: {bandwidth: 10 Gbit/s, latency: 30 us}}\n"
        "nodes: [{name: a, count: 2, gpus: 4, type: P100}, {name: b, gpus: 2, type: P100}]"
    )
    reduction = GroupReduction(cluster, DeviceBlocks(cluster, frozenset()))
    assert reduction.of((0,), 1e9) == (0.0, 0.0)
    groups = {(0, 1, 2, 3): True, tuple(range(8)): True, tuple(range(10)): False}
    for ranks, in_parts in groups.items():
        even = np.full(len(ranks), 1 / len(ranks))
        network = HardwareModel(cluster.keep(ranks)).network
        before_s, after_s = reduction.of(ranks, 2.0**26)
        assert before_s == pytest.approx(after_s if in_parts else 0.0)
        whole_s = network.choices("all_reduce", 2**26, even, even)[0].seconds
        assert before_s + after_s == pytest.approx(whole_s, rel=CLOSE - 1)


def test_cuts_are_moved_to_where_the_estimate_is_least(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = searched("vit").estimates
    places = estimates.places
    sketches = [s for s in estimates.sketches() if len(s.groups) == 2]
    assert len(places) > 4
    assert len(sketches) > 4

    def at(sketch: Sketch, place: str) -> Sketch:
        return replace(sketch, cuts=(place,), estimate_s=np.inf)

    for sketch in sketches[::4]:
        found = estimates.recut(at(sketch, places[0]))
        with monkeypatch.context() as patch:
            patch.setattr(stage_estimates, "MOVED", 0)
            each = [estimates.recut(at(sketch, place)).estimate_s for place in places]
        own = places.index(found.cuts[0])
        near = each[max(0, own - stage_estimates.MOVED) : own + stage_estimates.MOVED + 1]
        assert found.estimate_s == each[own] == min(near)
        assert each[places.index(sketch.cuts[0])] == sketch.estimate_s


@pytest.mark.slow
def test_moved_cuts_count_only_if_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Sketch]()

    def elsewhere(sketch: Sketch) -> Sketch:
        """Move all cuts to the first places, which makes the last stage long."""
        places = search.estimates.places
        tried.append(replace(sketch, cuts=places[: len(sketch.cuts)]))
        return tried[-1]

    def best_s() -> float:
        found = search.best(np.inf)
        assert found is not None
        return found.times.step_s

    search = StageSearch(benchmark_case("vit", "tiny").space, unlike(3), 2)
    monkeypatch.setattr(search.estimates, "recut", lambda sketch: sketch)
    unmoved_s = best_s()
    search = StageSearch(benchmark_case("vit", "tiny").space, unlike(3), 2)
    monkeypatch.setattr(search.estimates, "recut", elsewhere)
    assert best_s() == unmoved_s
    moved = search.pipeline(tried[-1])
    assert moved is not None
    assert moved.times.step_s > unmoved_s
    search = StageSearch(benchmark_case("vit", "tiny").space, unlike(3), 2)
    assert best_s() <= unmoved_s


def test_a_stage_that_brings_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages, of which the last one has hardly any work."""
    cluster = two_machines(3)
    search = StageSearch(benchmark_case("vit", "tiny").space, cluster, 2)
    places = search.estimates.places
    three = next(s for s in search.estimates.sketches() if len(s.groups) == 3)
    middle = places[len(places) // 2]
    three = replace(three, cuts=(middle, places[-1]), estimate_s=0.0)
    with_all = search.pipeline(three)
    assert with_all is not None
    monkeypatch.setattr(search.estimates, "sketches", lambda below_s: iter([three]))
    monkeypatch.setattr(search.estimates, "recut", lambda sketch: sketch)
    found = search.best(np.inf)
    assert found is not None
    assert found.cluster.world_size == 2
    assert found.stages.cuts == (middle,)
    assert found.times.step_s <= CLOSE * with_all.times.step_s
    keeping = StageSearch(benchmark_case("vit", "tiny").space, cluster, 2, frozenset({0, 1, 2}))
    assert not keeping.estimates.without_stage(three)
    limit_s = with_all.times.step_s * (1 + 1e-9)
    near = search.best(limit_s)
    assert near is not None
    assert near.times.step_s < limit_s


@pytest.mark.slow
def test_no_row_is_faster_than_a_plan_with_stages() -> None:
    case = benchmark_case("vit", "tiny")
    options = PlanOptions(stages=True, compare=True)
    found = choose(case.space, unlike(4), 2, options)
    rows = [row for row in found.prediction.alternatives if row.fits]
    assert any(row.name == EVEN_PIPELINE for row in found.prediction.alternatives)
    assert min(row.step_s for row in rows) >= found.prediction.step_s * (1 - 1e-9)
    without = choose(case.space, unlike(4), 2, PlanOptions(compare=True))
    row = next(row for row in without.prediction.alternatives if row.name == EVEN_PIPELINE)
    assert not row.fits
    assert "--stages" in row.note
