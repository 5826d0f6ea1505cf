"""Lower bounds never exceed the fastest program, which simulating all programs finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hap.cluster.device import Contention, Device
from hap.cluster.link import IMPLEMENTATIONS, LEVELS, Link
from hap.cluster.topology import Cluster
from hap.ir.axes import Shares
from hap.ir.graph import Tensor
from hap.ir.placement import P, R
from hap.ir.program import Program
from hap.synthesizer.bounds.branching import Box, BoxPrices, Branching
from hap.synthesizer.bounds.lower_bound import (
    AnyShares,
    FixedShares,
    Floors,
    OverlapPrice,
    Relaxation,
    best_weights,
)
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.search.bucket_elimination import FORBIDDEN
from hap.synthesizer.search.cost_tables import Problem
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.synthesize import Synthesizer
from tests.random_plans import RandomPrices, benchmark_case, random_shares
from tests.small_plan import small_graph
from tests.test_bucket_elimination import one_layer

ENOUGH = 200
"""Limit on the programs of a random space, which are all simulated."""


def random_cluster(rng: random.Random, world: int | None = None) -> Cluster:
    """Return up to three types of devices on up to three machines, with any mix of costs."""
    world = world or rng.randint(2, 5)
    rate = 10 ** rng.uniform(6, 10)
    kinds = [
        {
            "flops_per_s": {"float32": rate * rng.choice((1, 1.7, 4))},
            "memory_bytes_per_s": rate * rng.choice((0.1, 0.5, 3)),
            "launch_s": rng.choice((0.0, 1e-7, 1e-6)),
        }
        for _ in range(rng.randint(1, 3))
    ]
    nodes = sorted(rng.choice("abc") for _ in range(world))
    devices = tuple(
        Device(name=f"{n}:{r}", kind="x", node=n, memory_bytes=2**30, **rng.choice(kinds))
        for r, n in enumerate(nodes)
    )
    latency = rng.choice((0.0, 1e-7, 1e-5))
    links = [Link(rate * 10 ** rng.uniform(-2, 2), latency * k) for k in (1, 2)]
    return Cluster("random", devices, dict.fromkeys(nodes, links[0]), links[1])


def disturbed(cluster: Cluster, rng: random.Random) -> Cluster:
    """Return the cluster with random contention and relaunch costs."""
    devices = tuple(
        replace(
            d,
            contention=Contention(
                interference=rng.choice((0.0, 0.3, 0.9)),
                drag=rng.choice((1.0, 1.5, 2.5, 9.0)),
                delay_s=rng.choice((0.0, 1e-3)),
            ),
            relaunch=rng.choice((0.1, 0.6, 1.0)),
        )
        for d in cluster.devices
    )
    return replace(cluster, devices=devices)


def random_space(space: Space, rng: random.Random) -> Space:
    """Return a part of a space with few programs: some rows, holdings and stored placements."""

    def some(options: tuple, always: int, most: int) -> tuple:  # type: ignore[type-arg]
        rest = list(options[always:])
        rng.shuffle(rest)
        return (*options[:always], *rest[: rng.randint(0 if always else 1, most)])

    while True:
        rows = {n: some(rows, 0, 2) for n, rows in space.rows.items()}
        sources = {t: some(options, 1, 1) for t, options in space.sources.items()}
        # A tensor can be held in each placement in which it is made, as in any space.
        made = {t: set(options) for t, options in sources.items()}
        for node in space.graph.nodes:
            for row in rows[node.name]:
                made.setdefault(node.outputs[0], set()).add(row.outs[0])
        holdings = {}
        for t, held in space.holdings.items():
            kept = [h for h in held[1:] if len(h) == 1 and h[0] in made[t]]
            holdings[t] = some(
                (held[0], *kept, *(h for h in held[1:] if h not in kept)), 1 + len(kept), 1
            )
        part = replace(space, rows=rows, holdings=holdings, sources=sources)
        if 1 < len(list(itertools.islice(programs(part), ENOUGH + 1))) <= ENOUGH:
            return part


def programs(space: Space) -> Iterator[tuple[Problem, Program, list[int]]]:
    """Yield all programs of a small space: every labelling without a forbidden entry."""
    hardware = HardwareModel(random_cluster(random.Random(0), 2))
    problem = Problem(space, AnyShares(space, hardware, 2), time=lambda v: 0.0)
    sizes = [len(u) for u in problem.unary]
    near: dict[int, list[tuple[int, int]]] = {}
    for u, v in problem.pairs:
        near.setdefault(max(u, v), []).append((u, v))

    def extend(labels: list[int]) -> Iterator[list[int]]:
        if len(labels) == len(sizes):
            yield labels
            return
        for label in range(sizes[len(labels)]):
            more = [*labels, label]
            pairs = near.get(len(labels), [])
            if all(problem.pairs[u, v][more[u], more[v]] < FORBIDDEN for u, v in pairs):
                yield from extend(more)

    for labels in extend([]):
        yield problem, problem.program(_Labels(tuple(labels))), labels  # type: ignore[arg-type]


class _Labels:
    def __init__(self, labels: tuple[int, ...]) -> None:
        self.labels = labels


def all_shares(space: Space, world: int, rng: random.Random, count: int) -> list[Shares]:
    """Return random shares, different for every axis, with zeros; the first are all on one rank."""
    axes = space.axes.axes
    alone = rng.randrange(world)
    found: list[Shares] = [
        {n: tuple(a.units * (r == alone) for r in range(world)) for n, a in axes.items()}
    ]
    for _ in range(count - 1):
        found.append({n: random_shares(a.units, world, rng) for n, a in axes.items()})
    return found


SPACES = {"one layer": build_space(one_layer()), "two layers": build_space(small_graph(4))}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("seed", range(2, 6))
def test_no_program_is_faster_than_the_bounds(name: str, seed: int) -> None:
    rng = random.Random(f"{name}/{seed}")
    space = random_space(SPACES[name], rng)
    cluster = random_cluster(rng)
    if seed >= 4:
        cluster = disturbed(cluster, rng)
    synthesizer = Synthesizer(space, cluster, 2)
    every = [program for _, program, _ in programs(space)]
    free = synthesizer.relaxed.bound_s
    assert free > 0
    for shares in all_shares(space, cluster.world_size, rng, 4):
        judged = [synthesizer.judge(p, shares) for p in every]
        for program, pair in zip(every, judged, strict=True):
            links_s = synthesizer._links_s(program)
            assert links_s <= min(pair.serial.communicate_s, pair.timeline.step_s) * (1 + 1e-12)
        best = min(pair.timeline.step_s for pair in judged)
        fixed = synthesizer.fixed(shares).bound_s
        assert fixed <= best * (1 + 1e-12)
        assert free <= best * (1 + 1e-12)


def totals(shares: tuple[int, ...], cluster: Cluster) -> list[tuple[int, int]]:
    """Return, per type of devices, the units of all its ranks and of its largest rank."""
    return [(sum(shares[r] for r in k), max(shares[r] for r in k)) for k in cluster.types()]


def box_around(axis: str, shares: tuple[int, ...], cluster: Cluster, rng: random.Random) -> Box:
    """Return a random box that holds the given shares."""

    def around(units: int) -> tuple[int, int]:
        return max(0, units - rng.randint(0, 2)), units + rng.randint(0, 2)

    held = totals(shares, cluster)
    box = Box(
        axis=axis, units=sum(shares), sizes=tuple(map(len, cluster.types())),
        total=tuple(around(total) for total, _ in held),
        most=tuple(around(most) for _, most in held),
    ).tightened()  # fmt: skip
    assert box is not None and holds(box, shares, cluster)
    return box


def holds(box: Box, shares: tuple[int, ...], cluster: Cluster) -> bool:
    return all(
        lo <= total <= hi and least <= most <= largest
        for (total, most), (lo, hi), (least, largest) in zip(
            totals(shares, cluster), box.total, box.most, strict=True
        )
    )


def floors(
    space: Space, hardware: HardwareModel, shares: Shares, rng: random.Random
) -> list[Floors]:
    axis = rng.choice(list(shares))
    box = box_around(axis, shares[axis], hardware.cluster, rng)
    return [
        FixedShares(space, hardware, shares, 2),
        AnyShares(space, hardware, 2),
        BoxPrices(space, hardware, 2, box),
    ]


@pytest.mark.parametrize("file", ["bert", "bert_moe", "vgg19", "mlp"])
@pytest.mark.parametrize("seed", range(3))
def test_no_labelling_is_priced_above_its_program(file: str, seed: int) -> None:
    """Check each labelling, and so each fusion, under any weights: stronger than the bound."""
    space = benchmark_case(file, "tiny").space
    rng = random.Random(f"{file}/{seed}")
    cluster = random_cluster(rng)
    world = cluster.world_size
    shares = all_shares(space, world, rng, 2)[1]
    if seed == 0:  # prices of a real search give likelier programs
        problem = Problem(space, Synthesizer(space, cluster, 2)._cost(None, shares))
    else:
        problem = Problem(space, RandomPrices(space, cluster, dict(shares), rng))
    labelling = problem.solve()
    assert labelling is not None
    synthesizer = Synthesizer(space, cluster, 2)
    step_s = synthesizer.judge(problem.program(labelling), shares).timeline.step_s
    for prices in floors(space, synthesizer.hardware, shares, rng):
        found = Relaxation(space, prices).evaluate(labelling)
        given = np.random.default_rng(seed).dirichlet(
            np.full(2 * len(prices.overlap_price.lost), 0.5)
        )
        some = prices.overlap_price.mean(*np.split(given, 2))
        best = best_weights([found], prices.overlap_price)
        assert found.at(some) * (1 - 1e-9) <= found.at(best) <= step_s * (1 + 1e-6)
        assert found.at(best) >= step_s * 1e-4, "a bound that says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_boxes_hold_all_shares_and_bound_their_programs(seed: int) -> None:
    """However often boxes are cut, each split is in one box, whose bound no program beats."""
    rng = random.Random(f"boxes/{seed}")
    space = random_space(SPACES["one layer"], rng)
    cluster = random_cluster(rng, rng.randint(2, 3))
    if seed % 2:
        cluster = measured(cluster, rng)
    synthesizer = Synthesizer(space, cluster, 2)
    every = [program for _, program, _ in programs(space)]
    root = synthesizer.relaxed
    for axis in sorted(space.axes.axes):
        branching = Branching(space, synthesizer.hardware, 2, None, root, axis)
        branching.run(12, np.inf)
        assert branching.bound_s >= root.bound_s
        for shares in all_shares(space, cluster.world_size, rng, 6):
            best = min(synthesizer.judge(p, shares).timeline.step_s for p in every)
            leaves = [f for f in branching._leaves if holds(f.box, shares[axis], cluster)]
            assert len(leaves) == 1
            assert leaves[0].bound_s <= best * (1 + 1e-12)


def measured(cluster: Cluster, rng: random.Random) -> Cluster:
    """Return the cluster with links of their own for some implementations, on one level or both."""

    def link() -> Link:
        return Link(10 ** rng.uniform(7, 11), 10 ** rng.uniform(-6, -3))

    collectives = {
        kind: {
            how: {level: link() for level in LEVELS if rng.random() < 0.7}
            for how in ways
            if rng.random() < 0.7
        }
        for kind, ways in IMPLEMENTATIONS.items()
    }
    return replace(cluster, collectives=collectives)


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_no_collective_is_cheaper_than_its_floor(kind: str) -> None:
    rng = random.Random(kind)
    for number in range(300):
        cluster = random_cluster(rng)
        if number % 2:
            cluster = measured(cluster, rng)
        world, network = cluster.world_size, HardwareModel(cluster).network
        src, dst = (np.array(random_shares(12, world, rng)) / 12 for _ in range(2))
        if rng.random() < 0.3:
            src = dst = np.full(world, 1 / world)
        nbytes = rng.randint(1, 10**6)
        start = rng.choice((0.0, 0.3, 1.0))
        found = network.choices(kind, nbytes, src, dst, start=start)[0].seconds
        assert network.floor_s(kind, nbytes, start=start) <= found * (1 + 1e-12)
        assert np.isfinite(found)
        # Two fused collectives pay at least both floors, if their starts are parts of one start.
        if kind != "all_to_all":
            more = rng.randint(1, 10**6)
            both = network.choices(kind, nbytes + more, src, dst, start=1.0)[0].seconds
            one, other = (
                network.floor_s(kind, b, start=s) for b, s in ((nbytes, start), (more, 1 - start))
            )
            assert one + other <= both * (1 + 1e-12)


def test_alike_devices_with_even_shares_leave_no_gap() -> None:
    """Where no rank waits for others or for links, only rounding separates bound and program."""
    device = Device(
        name="m:0", kind="x", node="m", memory_bytes=2**30, launch_s=0.0,
        flops_per_s={"float32": 1e9}, memory_bytes_per_s=1e9,
    )  # fmt: skip
    devices = (device, replace(device, name="m:1"))
    link = Link(1e18, 0.0)
    space = SPACES["one layer"]
    synthesizer = Synthesizer(space, Cluster("even", devices, {"m": link}, link), 2)
    shares = {name: (axis.units // 2,) * 2 for name, axis in space.axes.axes.items()}
    best = synthesizer.cheapest(shares)
    assert synthesizer.fixed(shares).bound_s == pytest.approx(best.timeline.step_s, rel=1e-4)


def test_one_device_leaves_no_gap() -> None:
    rng = random.Random(1)
    synthesizer = Synthesizer(SPACES["two layers"], random_cluster(rng, 1), 2)
    best = synthesizer.best()
    assert synthesizer.relaxed.bound_s == pytest.approx(best.timeline.step_s, rel=1e-4)


def test_no_random_weights_beat_the_best_ones() -> None:
    rng = random.Random(2)
    for _ in range(20):
        space = random_space(SPACES["one layer"], rng)
        cluster = random_cluster(rng)
        prices = AnyShares(space, HardwareModel(cluster), 2)
        relaxation = Relaxation(space, prices)
        classes = len(prices.overlap_price.lost)
        for _ in range(4):
            relaxation.search(
                np.random.default_rng(rng.randrange(99)).dirichlet(np.ones(classes + 1))
            )
        overlap_price = OverlapPrice(
            rng.choice((1.0, 0.8, 0.3)), np.array([rng.random() for _ in range(classes)])
        )
        weights = best_weights(relaxation.found, overlap_price)
        reached = min(f.at(weights) for f in relaxation.found)
        tried = np.random.default_rng(0).dirichlet(np.ones(2 * classes), 200)
        for parts in tried:
            others = overlap_price.mean(*np.split(parts, 2))
            assert min(f.at(others) for f in relaxation.found) <= reached * (1 + 1e-5)


def test_weights_average_the_lower_bounds_of_a_step() -> None:
    """These are a rank's computing plus interference, and communication that nothing can hide."""
    rng = np.random.default_rng(0)
    for pace in (1.0, 0.5, 0.1):
        for _ in range(50):
            lost, computed_s, communicated_s = rng.random(3), rng.random(3), rng.random()
            computing, communicating = (rng.random(3) for _ in range(2))
            weights = OverlapPrice(pace, lost).mean(computing, communicating)
            steps_s = [
                *(computed_s + lost * communicated_s),
                *((1 - pace) * computed_s + communicated_s),
            ]
            mean_s = np.average(steps_s, weights=[*computing, *communicating])
            assert weights @ [*computed_s, communicated_s] == pytest.approx(mean_s)
    alone, nothing = np.array([2.0, 0.0]), np.zeros(2)
    overlap_price = OverlapPrice(0.25, np.array([0.1, 0.2]))
    assert overlap_price.mean(alone, nothing).tolist() == pytest.approx([1.0, 0.0, 0.1])
    assert overlap_price.mean(nothing, alone).tolist() == pytest.approx([0.75, 0.0, 1.0])


def test_unread_results_cost_nothing() -> None:
    """A result that nobody reads may be partial, and no program converts it."""
    space = SPACES["one layer"]
    hardware = HardwareModel(random_cluster(random.Random(3), 3))
    prices = AnyShares(space, hardware, 2)
    unread = replace(space.graph.tensors["y"], name="nobody")
    prices._starts["nobody"] = 1.0
    assert prices.convert(unread, P, R)[0].seconds == 0
    assert prices.convert(space.graph.tensors["y"], P, R)[0].seconds > 0


def test_every_parameter_has_its_own_update_price() -> None:
    """Prices are kept by the identity of an array, which must not be that of a freed one."""
    space = benchmark_case("bert", "tiny").space
    hardware = space.hardware(random_cluster(random.Random(0), 3))
    prices = AnyShares(space, hardware, 2)
    first = [ranks[0] for ranks in hardware.types]
    for given in space.graph.role("parameter"):
        parameter = space.graph.tensors[given.tensor]
        whole = machine_update(space, hardware, parameter)[first]
        assert prices.update(parameter, R).tolist() == whole.tolist()


def machine_update(space: Space, hardware: HardwareModel, parameter: Tensor) -> PerRank:
    """Return the seconds of the update of a whole parameter on every rank."""
    shares = all_shares(space, hardware.cluster.world_size, random.Random(0), 1)[0]
    return CostModel(space.graph, space.axes, hardware, shares, 2).update(parameter, R)
