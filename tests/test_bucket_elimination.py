"""Bucket elimination finds the minimum of exhaustive search; its programs are the cheapest."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.graph import Graph, Input, Output, Ref
from hap.ir.placement import P, Placement, R, S
from hap.ir.program import Compute
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search import bucket_elimination, reduction, table_pool
from hap.synthesizer.search import elimination_order as orders
from hap.synthesizer.search.bucket_elimination import (
    FORBIDDEN,
    HUBS,
    LARGEST_TABLE,
    Costs,
    TooWide,
    minimise,
)
from hap.synthesizer.search.cost_tables import PICOSECONDS, Problem
from hap.synthesizer.search.elimination_order import best_order, elimination_order, fill, table_size
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.search.table_pool import Pool
from tests.small_plan import node, tensor


@pytest.fixture
def no_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is replaced before the elimination."""
    monkeypatch.setattr(reduction, "MOST_NEIGHBOURS", -1)


@pytest.fixture(params=[-1, 1, 2])
def some_reduction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables are replaced before the elimination, or those with one neighbour or two."""
    monkeypatch.setattr(reduction, "MOST_NEIGHBOURS", request.param)


# --- tables --------------------------------------------------------------------------------

Tables = tuple[list[Costs], dict[tuple[int, int], Costs]]


def table(rng: random.Random, shape: tuple[int, ...], forbidden: float, largest: int) -> Costs:
    entries = [
        FORBIDDEN if rng.random() < forbidden else rng.randint(0, largest)
        for _ in range(int(np.prod(shape)))
    ]
    return np.array(entries, dtype=np.int64).reshape(shape)


def random_tables(kind: str, seed: int) -> Tables:
    """Return 2 to 7 variables of 1 to 4 labels. Some have small costs, so that ties are common."""
    rng = random.Random(f"{kind}/{seed}")
    n = rng.randint(2, 7)
    density = {"sparse": 0.4, "clique": 1.0, "forbidden": 0.6, "disconnected": 0.0}[kind]
    forbidden = rng.choice((0.1, 0.4, 0.6)) if kind == "forbidden" else 0.0
    largest = rng.choice((3, 1000, 10**12))
    sizes = [rng.randint(1, 4) for _ in range(n)]
    edges = [e for e in itertools.combinations(range(n), 2) if rng.random() < density]
    if kind == "disconnected":
        edges = [
            (u, v) for u, v in itertools.combinations(range(n), 2) if (u < n // 2) == (v < n // 2)
        ]
    unary = [table(rng, (size,), forbidden / 3, largest) for size in sizes]
    pairs = {(u, v): table(rng, (sizes[u], sizes[v]), forbidden, largest) for u, v in edges}
    return unary, pairs


def cost_of(
    labels: Sequence[int], unary: Sequence[Costs], pairs: Mapping[tuple[int, int], Costs]
) -> int:
    """Return the cost of a labelling in Python's integers, which do not overflow."""
    own = sum(int(costs[x]) for costs, x in zip(unary, labels, strict=True))
    return own + sum(int(costs[labels[u], labels[v]]) for (u, v), costs in pairs.items())


def everything(unary: Sequence[Costs]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(costs)) for costs in unary))


@pytest.mark.usefixtures("some_reduction")
@pytest.mark.parametrize("kind", ["sparse", "clique", "disconnected", "forbidden"])
def test_elimination_finds_the_minimum(kind: str) -> None:
    infeasible = 0
    for seed in range(100):
        unary, pairs = random_tables(kind, seed)
        best = min(cost_of(labels, unary, pairs) for labels in everything(unary))
        found = minimise(unary, pairs)
        if best >= FORBIDDEN:
            infeasible += 1
            assert found is None, seed
            continue
        assert found is not None, seed
        assert found.cost == best == cost_of(found.labels, unary, pairs), seed
    assert (infeasible >= 10) == (kind == "forbidden")
    assert infeasible <= 80


@pytest.mark.usefixtures("some_reduction")
def test_ties_are_broken_alike_every_time() -> None:
    for seed in range(30):
        unary, pairs = random_tables("sparse", seed)
        unary = [costs % 2 for costs in unary]
        pairs = {edge: costs % 2 for edge, costs in pairs.items()}
        first = minimise(unary, pairs)
        assert first == minimise(unary, dict(reversed(pairs.items())))
    zeros = minimise([np.zeros(3, np.int64)] * 4, {(0, 2): np.zeros((3, 3), np.int64)})
    assert zeros is not None
    assert (zeros.cost, zeros.labels) == (0, (0, 0, 0, 0))


@pytest.mark.usefixtures("some_reduction")
def test_many_forbidden_entries_do_not_overflow() -> None:
    """Cases: components without a solution, a star of 127 forbidden pairs, a forbidden chain."""
    bad = np.full(2, FORBIDDEN, dtype=np.int64)
    assert minimise([bad] * 100, {}) is None
    star = {(0, v): np.full((2, 2), FORBIDDEN, dtype=np.int64) for v in range(1, 128)}
    assert minimise([np.zeros(2, np.int64)] * 128, star) is None
    chain = {(v, v + 1): np.full((2, 2), FORBIDDEN, dtype=np.int64) for v in range(299)}
    assert minimise([np.zeros(2, np.int64)] * 300, chain) is None


@pytest.mark.usefixtures("some_reduction")
def test_allowed_labellings_may_cost_more_than_forbidden_ones() -> None:
    """High prices on many variables add up to more than ``FORBIDDEN`` and forbid nothing."""
    high = np.array([1 << 51, (1 << 51) + 1], dtype=np.int64)
    pairs = {(v, v + 1): np.array([[FORBIDDEN, 0], [0, 1]]) for v in range(99)}
    found = minimise([high] * 100, pairs)
    assert found is not None
    assert found.cost == (100 << 51) + 50 > FORBIDDEN


@pytest.mark.usefixtures("no_reduction")
def test_long_chains_stay_narrow() -> None:
    n = 300
    rng = random.Random(0)
    unary = [table(rng, (3,), 0, 9) for _ in range(n)]
    pairs = {(v, v + 1): table(rng, (3, 3), 0, 9) for v in range(n - 1)}
    found = minimise(unary, pairs)
    assert found is not None
    assert found.entries <= 27 * n
    best = unary[0]  # Viterbi
    for v in range(n - 1):
        best = (best[:, None] + pairs[v, v + 1]).min(0) + unary[v + 1]
    assert found.cost == best.min()


def test_a_table_too_large_is_refused_before_it_is_made() -> None:
    labels, n = 4, 14 + HUBS
    assert labels**14 > LARGEST_TABLE
    rng = random.Random(0)
    edges = itertools.combinations(range(n), 2)
    pairs = {e: table(rng, (labels, labels), 0, 1000) for e in edges}
    with pytest.raises(TooWide) as error:
        minimise([np.zeros(labels, np.int64)] * n, pairs)
    assert str(labels**n) in str(error.value)


@pytest.mark.usefixtures("no_reduction")
@pytest.mark.parametrize("held", [1 << 28, 12, 0], ids=["all held", "some", "none"])
@pytest.mark.parametrize("kind", ["sparse", "clique", "forbidden"])
def test_fixing_hubs_changes_nothing(kind: str, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit on tables fixes up to three variables in turn. The pool releases tables beyond
    its limit after they are read."""
    refused = 0
    monkeypatch.setattr(table_pool, "COMPARED", 3)
    monkeypatch.setattr(table_pool, "HELD", held)
    for seed in range(60):
        unary, pairs = random_tables(kind, seed)
        expected = minimise(unary, pairs)
        with monkeypatch.context() as small:
            small.setattr(bucket_elimination, "LARGEST_TABLE", 12)
            try:
                found = minimise(unary, pairs)
            except TooWide:
                refused += 1
                continue
        assert (found and found.cost) == (expected and expected.cost), seed
        if found:
            assert found.cost == cost_of(found.labels, unary, pairs)
    assert refused < 30


@pytest.mark.usefixtures("some_reduction")
@pytest.mark.parametrize("kind", ["sparse", "clique", "forbidden"])
def test_large_tables_give_the_same_labels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [random_tables(kind, seed) for seed in range(30)]
    whole = [minimise(*problem) for problem in problems]
    monkeypatch.setattr(bucket_elimination, "SMALL", 0)
    for block in (1, 4):  # blocks of several dims, and of one
        monkeypatch.setattr(bucket_elimination, "BLOCK", block)
        for problem, expected in zip(problems, whole, strict=True):
            found = minimise(*problem)
            assert (found and found.cost) == (expected and expected.cost)
            assert found is None or cost_of(found.labels, *problem) == found.cost


def test_fill_counts_the_entries_between_neighbours_without_a_table() -> None:
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randint(3, 8)
        sizes = [rng.randint(1, 5) for _ in range(n)]
        near: list[set[int]] = [set() for _ in range(n)]
        for u, v in itertools.combinations(range(n), 2):
            if rng.random() < 0.5:
                near[u].add(v)
                near[v].add(u)
        expected = sum(
            sizes[a] * sizes[b] for a, b in itertools.combinations(near[0], 2) if b not in near[a]
        )
        assert fill(0, sizes, near) == expected


def test_every_order_eliminates_all_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill may change without a new table of the variable's own. Random orders are no longer."""
    rng = random.Random(0)
    shorter = 0
    for _ in range(60):
        n = rng.randint(5, 12)
        sizes = tuple(rng.randint(2, 5) for _ in range(n))
        edges = tuple(e for e in itertools.combinations(range(n), 2) if rng.random() < 0.4)
        for measure in (table_size, fill):
            order = elimination_order(sizes, edges, measure)
            assert {v for v, _ in order.steps} == {*range(n)}
            assert len(order.steps) == n
        monkeypatch.setattr(orders, "EASY", 0)
        best = best_order(sizes, edges, 1 << 26, lambda found: found.total)
        assert sorted(v for v, _ in best.steps) == [*range(n)]
        assert best.total <= order.total
        shorter += best.total < order.total
    assert shorter >= 10


def test_equal_tables_are_one() -> None:
    pool = Pool()
    a = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert pool.number(a) == pool.number(a.copy())
    assert pool.number(a) != pool.number(a.reshape(3, 2))
    assert pool.turned(pool.turned(pool.number(a))) == pool.number(a)
    assert pool.tables[pool.taken(pool.number(a), (1,))].tolist() == [[3, 4, 5]]


def eliminations(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of new eliminations for a ladder of equal layers."""
    rng = random.Random(1)
    along, across = table(rng, (3, 3), 0, 99), table(rng, (3, 3), 0, 99)
    pairs = {}
    for k in range(layers):
        pairs[2 * k, 2 * k + 1] = across
        if k:
            pairs[2 * k - 2, 2 * k] = pairs[2 * k - 1, 2 * k + 1] = along
    made = 0
    plain = bucket_elimination._minimum

    def counted(shape: tuple[int, ...], tables: Any) -> Any:
        nonlocal made
        made += 1
        return plain(shape, tables)

    with monkeypatch.context() as patch:
        patch.setattr(bucket_elimination, "_minimum", counted)
        assert minimise([np.array([0, 1, 2], np.int64)] * (2 * layers), pairs) is not None
    return made


@pytest.mark.usefixtures("no_reduction")
def test_layers_that_repeat_are_eliminated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (eliminations(layers, monkeypatch) for layers in (40, 160))
    assert 0 < many <= few + 8


@pytest.mark.usefixtures("some_reduction")
@pytest.mark.parametrize("kind", ["sparse", "clique"])
def test_entries_are_those_that_are_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a problem compute no more entries than it; tables that turn out equal, fewer."""
    computed = 0
    plain = bucket_elimination._minimum

    def counted(shape: tuple[int, ...], tables: Any) -> Any:
        nonlocal computed
        computed += math.prod(shape)
        return plain(shape, tables)

    monkeypatch.setattr(bucket_elimination, "_minimum", counted)
    for seed in range(20):
        unary, pairs = random_tables(kind, seed)
        once = minimise(unary, pairs)
        n = len(unary)
        copies = {(u + n * k, v + n * k): t for k in range(5) for (u, v), t in pairs.items()}
        computed = 0
        found = minimise([*unary] * 5, copies)
        assert once is not None and found is not None
        assert computed <= found.entries == once.entries
        assert found.cost == 5 * once.cost


# --- programs ------------------------------------------------------------------------------


def one_layer() -> Graph:
    """Return the graph of loss = sum(x @ w); the gradient of w is x.T @ ones."""
    tensors = [
        tensor("x", 6, 4), tensor("w", 4, 10), tensor("tangent"), tensor("xt", 4, 6),
        tensor("y", 6, 10), tensor("loss"), tensor("g", 6, 10), tensor("d", 4, 10),
    ]  # fmt: skip
    return Graph(
        inputs=(
            Input(tensor="x", role="input", target="0"),
            Input(tensor="w", role="parameter", target="weight"),
            Input(tensor="tangent", role="tangent", target="loss"),
        ),
        nodes=(
            node("y", "aten.mm.default", Ref("x"), Ref("w")),
            node("loss", "aten.sum.default", Ref("y")),
            node("xt", "aten.t.default", Ref("x")),
            node("g", "aten.expand.default", Ref("tangent"), (6, 10)),
            node("d", "aten.mm.default", Ref("xt"), Ref("g")),
        ),
        outputs=(
            Output(tensor="loss", role="loss", target="loss"),
            Output(tensor="d", role="gradient", target="weight"),
        ),
        tensors={t.name: t for t in tensors},
    )


def two_devices(flops: float, bandwidth: float, latency_s: float) -> Cluster:
    devices = tuple(
        Device(
            name=f"n{k}:0", kind="x", node=f"n{k}", memory_bytes=2**30, launch_s=1e-7,
            flops_per_s={"float32": flops * (1 + 2 * k)}, memory_bytes_per_s=flops / 4,
        )
        for k in range(2)
    )  # fmt: skip
    link = Link(bandwidth, latency_s)
    return Cluster("two", devices, {"n0": link, "n1": link}, link)


def problem_of(
    flops: float, bandwidth: float, latency_s: float, memory_price: float = 0.0
) -> Problem:
    graph = one_layer()
    space = build_space(graph)
    shares = {
        name: (axis.units // 3, axis.units - axis.units // 3)
        for name, axis in space.axes.axes.items()
    }
    hardware = HardwareModel(two_devices(flops, bandwidth, latency_s))
    price = np.full(2, memory_price) if memory_price else None
    return Problem(space, CostModel(graph, space.axes, hardware, shares, 2)).priced(price)


def cheapest_by_hand(problem: Problem) -> int:
    """Return the least cost over all rows and stored placements, which make tensors independent."""
    graph, cost = problem.space.graph, problem.cost

    def scaled(seconds: float) -> int:
        return round(seconds * PICOSECONDS)

    def holding(name: str, made: Placement, needs: frozenset[Placement]) -> float:
        """Return the least cost of holding a tensor so that every need can be met."""
        ways = []
        for held in problem.held[name]:
            if all(R in held or need in held for need in needs):
                seconds = problem.conversions(name, made, held)[0]
                own = problem.unary[problem._variable[name]][problem.held[name].index(held)]
                ways.append(int(own) + scaled(seconds) if seconds < np.inf else np.inf)
        return min(ways, default=np.inf)

    memo: dict[object, float] = {}

    def remembered(name: str, made: Placement, needs: frozenset[Placement]) -> float:
        key = (name, made, needs)
        if key not in memo:
            memo[key] = holding(name, made, needs)
        return memo[key]

    best = np.inf
    for rows in itertools.product(*(problem.rows[n.name] for n in graph.nodes)):
        computing = sum(
            scaled(float(cost.compute(n, row).max()))
            for n, row in zip(graph.nodes, rows, strict=True)
        )
        for stored in itertools.product(*(problem.stored[i.tensor] for i in graph.inputs)):
            made: dict[str, Placement] = {
                i.tensor: p for i, p in zip(graph.inputs, stored, strict=True)
            }
            needs: dict[str, set[Placement]] = {name: set() for name in graph.tensors}
            total: float = computing
            for n, row in zip(graph.nodes, rows, strict=True):
                made[n.name] = row.outs[0] or R
                for name, p in zip(n.inputs, row.ins, strict=True):
                    needs[name].add(p)
            weight = graph.tensors["w"]
            total += scaled(
                float(cost.update(weight, made["w"]).max())
                + memory(problem, cost.stored_bytes(weight, made["w"], trained=True))
            )
            needs["d"].add(made["w"])
            needs["loss"].add(R)
            total += sum(
                remembered(name, made[name], frozenset(needs[name])) for name in graph.tensors
            )
            best = min(best, total)
    return int(best)


def memory(problem: Problem, nbytes: np.ndarray) -> float:
    price = problem.memory_s_per_byte
    return 0.0 if price is None else float(price @ nbytes)


SETTINGS = {
    "free links": (1e9, 1e12, 0.0, 0.0),
    "slow links": (1e9, 1e6, 1e-3, 0.0),
    "balanced": (1e8, 1e9, 1e-7, 0.0),
    "dear memory": (1e9, 1e10, 1e-8, 1e-6),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_labelling_is_the_cheapest_program(setting: str) -> None:
    problem = problem_of(*SETTINGS[setting])
    found = problem.solve()
    assert found is not None
    assert found.cost == cheapest_by_hand(problem)


@pytest.mark.slow
def test_prices_of_memory_do_not_add_up() -> None:
    free = problem_of(*SETTINGS["dear memory"][:3])
    before = [costs.copy() for costs in free.unary], dict(free.pairs)
    for price in (1e-6, 1e-9, 1e-6):
        problem, alone = free.priced(np.full(2, price)), problem_of(1e9, 1e10, 1e-8, price)
        found = problem.solve()
        assert found is not None and found == alone.solve()
        assert found.cost == cheapest_by_hand(problem)
    assert free.memory_s_per_byte is None and free.priced(None) is free
    assert all(map(np.array_equal, free.unary, before[0]))
    assert free.pairs.keys() == before[1].keys()
    assert all(np.array_equal(free.pairs[pair], table) for pair, table in before[1].items())


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_written_program_costs_what_the_labelling_says(setting: str) -> None:
    problem = problem_of(*SETTINGS[setting])
    found = problem.solve()
    assert found is not None
    program = problem.program(found)
    program.check(problem.space.graph)
    graph, cost = problem.space.graph, problem.cost
    seconds = float(cost.update(graph.tensors["w"], program.inputs["w"]).max())
    for step in program.instructions:
        if isinstance(step, Compute):
            made = graph.by_name[step.node]
            seconds += float(cost.compute(made, Row(step.outs, step.ins)).max())
        elif step.kind != "slice":
            seconds += problem.conversions(step.tensor, step.src, (step.dst,))[0]
    stored = cost.stored_bytes(graph.tensors["w"], program.inputs["w"], trained=True)
    seconds += memory(problem, stored)
    assert found.cost == pytest.approx(seconds * PICOSECONDS, abs=20)  # each term is rounded


def test_prices_decide_between_splitting_and_repeating() -> None:
    """Slow links: every device does all the work. Free links: the product is split."""
    repeated, split = (
        problem.program(problem.solve())  # type: ignore[arg-type]
        for problem in (problem_of(*SETTINGS["slow links"]), problem_of(*SETTINGS["free links"]))
    )
    assert not repeated.collectives
    assert not repeated.used_axes()
    assert split.collectives
    product = next(s for s in split.instructions if isinstance(s, Compute) and s.node == "y")
    assert any(p.sharded for p in product.ins)


def test_a_memory_price_moves_the_weight_into_shards() -> None:
    """Without a memory price, the weight is replicated; with one, it is sharded."""
    whole, shard = (problem_of(1e9, 1e6, 1e-3, price) for price in (0.0, 1.0))
    placements = []
    for problem in (whole, shard):
        found = problem.solve()
        assert found is not None
        placements.append(problem.program(found).inputs["w"])
    assert placements[0] == R
    assert placements[1].sharded


def test_forbidden_placements_are_not_used() -> None:
    free = problem_of(*SETTINGS["free links"])
    bound = Problem(free.space, free.cost, lambda tensor, p, stored: not p.sharded)
    found = bound.solve()
    assert found is not None
    program = bound.program(found)
    assert not program.used_axes()
    best = free.solve()
    assert best is not None
    assert best.cost < found.cost


def test_the_chain_through_a_reduce_scatter_is_found() -> None:
    """A partial tensor held in two shards is reduce-scattered once, then exchanged."""
    problem = problem_of(*SETTINGS["balanced"])
    seconds, steps = problem.conversions("x", P, (S(0), S(1)))
    kinds = [step.kind for step in steps]
    assert kinds == ["reduce_scatter", "all_to_all"]
    t, convert = problem.space.graph.tensors["x"], problem.cost.convert
    orders = [
        convert(t, P, first)[0].seconds + convert(t, first, second)[0].seconds
        for first, second in ((S(0), S(1)), (S(1), S(0)))
    ]
    assert orders[0] != pytest.approx(orders[1])
    assert seconds == pytest.approx(min(orders))
