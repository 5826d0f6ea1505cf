"""Seconds and bytes of the cost model, against formulas worked out by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from hap.cluster.device import Contention, Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.cluster.work import Work
from hap.ir.axes import Axes, Axis
from hap.ir.graph import FREE, ITEM_BYTES, Graph, Input, Output, Ref, Tensor
from hap.ir.placement import L, P, Placement, R, S, conversion, convertible
from hap.ir.program import Compute, Convert, Program
from hap.synthesizer.cost.collective_cost import NetworkModel
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.cost.peak_memory import memory
from hap.synthesizer.cost.serial_cost import simulate, supersteps
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.cost_tables import Problem
from hap.synthesizer.search.program_space import build_space
from tests.small_plan import node, small_graph


def cluster(nodes: str, *, intra: Link, inter: Link) -> Cluster:
    """Return a device per letter, on the node of that name, each twice as fast as the last."""
    devices = tuple(
        Device(
            name=f"{name}:{k}", kind="x", node=name, memory_bytes=2**30, launch_s=k * 1e-6,
            flops_per_s={"float32": 1e12 * 2**k, "float16": 5e12 * 2**k},
            memory_bytes_per_s=1e11 * (k + 1), efficiency={"conv": 0.5, "attention": 0.25},
        )
        for k, name in enumerate(nodes)
    )  # fmt: skip
    return Cluster("test", devices, dict.fromkeys(nodes, intra), inter)


FAST, SLOW = Link(1e10, 1e-6), Link(1e9, 1e-5)


def test_speed_is_that_of_the_products_dtypes() -> None:
    world = cluster("ab", intra=FAST, inter=SLOW)
    slow, fast = world.devices
    half = replace(slow, flops_per_s={"float32": 3e12, "float16": 5e12})
    here = replace(world, devices=(half, fast))
    assert HardwareModel(here).speed == pytest.approx([0.6, 0.4])
    assert HardwareModel(here, {"float16": 7.0}).speed == pytest.approx([1 / 3, 2 / 3])
    # As many operations of either: 1/3 + 1/5 and 1/2 + 1/10 units of time.
    mixed = HardwareModel(here, {"float32": 1.0, "float16": 1.0}).speed
    assert mixed[0] / mixed[1] == pytest.approx((1 / 2 + 1 / 10) / (1 / 3 + 1 / 5))


# --- computing -----------------------------------------------------------------------------


def test_the_machine_is_its_devices() -> None:
    there = cluster("aabb", intra=FAST, inter=SLOW)
    hardware, rng = HardwareModel(there), random.Random(0)
    dtypes = ("float64", "float32", "bfloat16", "float16", "int64", "bool")
    for kind, dtype in itertools.product(("matmul", "conv", "attention", "memory"), dtypes):
        for _ in range(5):
            flops = np.array([rng.choice((0.0, rng.random() * 10**9)) for _ in range(4)])
            nbytes = np.array([rng.choice((0.0, rng.random() * 10**8)) for _ in range(4)])
            found = hardware.seconds(Work(kind, dtype, 0.0, 0.0), flops, nbytes)
            expected = [
                device.seconds(Work(kind, dtype, f, b))
                for device, f, b in zip(there.devices, flops, nbytes, strict=True)
            ]
            assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert hardware.speed.tolist() == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15])


def model(
    dtype: str = "float32", world: str = "aab", shares: tuple[int, ...] = (3, 2, 1)
) -> CostModel:
    """Return a cost model of two tensors ``t`` and ``u`` of (6, 4), with axes ``a`` and ``b``."""
    tensors = [Tensor(name=name, shape=(6, 4), dtype=dtype) for name in ("t", "u")]
    graph = Graph(
        inputs=(Input(tensor="t", role="input", target="0"),),
        nodes=(node("u", "aten.relu.default", Ref("t")),),
        outputs=(Output(tensor="u", role="loss", target="loss"),),
        tensors={t.name: t for t in tensors},
    )
    axes = Axes(
        axes={"a": Axis(name="a", units=6), "b": Axis(name="b", units=4)},
        of={("t", 0): "a", ("u", 0): "a", ("t", 1): "b", ("u", 1): "b"},
    )
    even = (*(1 for _ in world[1:]), 4 - len(world[1:]))
    hardware = HardwareModel(cluster(world, intra=FAST, inter=SLOW))
    return CostModel(graph, axes, hardware, {"a": shares, "b": even}, optimizer_states=2)


def test_prices_do_not_depend_on_what_a_machine_priced_before() -> None:
    first = model()
    graph, axes, used = first.graph, first.axes, first.hardware
    rng = random.Random(0)
    rows = [Row((p,), (p,)) for p in (S(0), S(1), R)]
    for _ in range(40):
        cut = sorted(rng.randint(0, 6) for _ in range(2))
        shares = {
            "a": (cut[0], cut[1] - cut[0], 6 - cut[1]),
            "b": rng.choice([(1, 1, 2), (4, 0, 0)]),
        }
        again = CostModel(graph, axes, used, shares, 2)
        fresh = CostModel(graph, axes, HardwareModel(used.cluster), shares, 2)
        for row in rows:
            seconds = [cost.compute(graph.nodes[0], row).tolist() for cost in (again, fresh)]
            assert seconds[0] == seconds[1]
        t = graph.tensors["t"]
        for src, dst in ((S(0), R), (S(0), S(1)), (P, S(1)), (P, R)):
            assert again.convert(t, src, dst) == fresh.convert(t, src, dst)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_bytes_are_bytes(dtype: str) -> None:
    cost = model(dtype)
    t, size = cost.graph.tensors["t"], ITEM_BYTES[dtype]
    assert cost.local_bytes(t, R).tolist() == [24 * size] * 3
    assert cost.local_bytes(t, P).tolist() == [24 * size] * 3
    assert cost.local_bytes(t, S(0)).tolist() == pytest.approx([12 * size, 8 * size, 4 * size])
    assert cost.local_bytes(t, S(1)).tolist() == pytest.approx([6 * size, 6 * size, 12 * size])
    # A trained parameter has a gradient and two optimizer states in addition.
    assert cost.stored_bytes(t, R, trained=True).tolist() == [4 * 24 * size] * 3
    assert cost.stored_bytes(t, R, trained=False).tolist() == [24 * size] * 3
    # Seconds are proportional to the bytes of an element.
    gather = [c.seconds for c in cost.convert(t, S(0), R)]
    floats = model("float32")
    of_floats = floats.hardware.network.choices("all_gather", 24 * size, floats.parts.of(t.name, S(0)), floats.parts.of(t.name, R))  # fmt: skip
    assert gather == [c.seconds for c in of_floats]


def test_an_operator_costs_each_rank_its_part() -> None:
    cost = model(shares=(4, 2, 0))
    relu, size = cost.graph.nodes[0], 24 * 4
    devices = cost.hardware.cluster.devices

    def expected(parts: list[float]) -> list[float]:
        return [
            device.seconds(Work("memory", "float32", 24 * part, 2 * size * part))
            for device, part in zip(devices, parts, strict=True)
        ]

    split = cost.compute(relu, Row((S(0),), (S(0),), 6))
    assert split.tolist() == pytest.approx(expected([4 / 6, 2 / 6, 0]))
    assert split[2] == 0, "no share, no launch"
    assert cost.compute(relu, Row((R,), (R,))).tolist() == pytest.approx(expected([1, 1, 1]))


@pytest.mark.parametrize(("elements", "part"), [(2**15, 0.25), (2**15 + 1, 1.0)])
def test_a_small_operator_starts_sooner(elements: int, part: float) -> None:
    """By the size of its undivided tensors: a share of a large operator is no small one."""
    nodes = (
        node("a", "aten.relu.default", Ref("x")),
        node("b", "aten.view.default", Ref("a")),
        node("c", "aten.relu.default", Ref("b")),
    )
    graph = Graph(
        inputs=(Input(tensor="x", role="input", target="0"),),
        nodes=nodes,
        outputs=(Output(tensor="c", role="loss", target="loss"),),
        tensors={name: Tensor(name=name, shape=(elements,), dtype="float32") for name in "xabc"},
    )
    world = cluster("ab", intra=FAST, inter=SLOW)
    axes = Axes(axes={"r": Axis(name="r", units=elements)}, of={(name, 0): "r" for name in "xabc"})

    def seconds(launch_s: float) -> list[list[float]]:
        devices = tuple(replace(d, launch_s=launch_s, relaunch=0.25) for d in world.devices)
        hardware = HardwareModel(replace(world, devices=devices))
        cost = CostModel(graph, axes, hardware, {"r": (1, elements - 1)}, 0)
        whole, view = (cost.compute(each, Row((R,), (R,))) for each in nodes[:2])
        assert not view.any()
        return [whole.tolist(), cost.compute(nodes[2], Row((S(0),), (S(0),))).tolist()]

    added = np.array(seconds(1e-3)) - np.array(seconds(0.0))
    assert added == pytest.approx(np.full((2, 2), part * 1e-3))


def test_a_rank_without_a_share_does_not_read_the_weights() -> None:
    graph = small_graph(8)
    cost = costs(graph, "ab", (8, 0))
    product = cost.compute(graph.by_name["y0"], Row((S(0),), (S(0), R), 8))
    alone = cost.compute(graph.by_name["y0"], Row((R,), (R, R)))
    assert product.tolist() == [alone[0], 0]


def test_a_product_counts_two_operations_per_multiplication() -> None:
    graph = small_graph(8)  # y = x (8, 4) @ w (4, 6)
    work = node_work(graph.by_name["y0"], graph)
    assert (work.kind, work.dtype, work.flops) == ("matmul", "float32", 2 * 8 * 4 * 6)
    assert work.bytes == 4 * (8 * 4 + 4 * 6 + 8 * 6)
    for name in ("xt", "g0"):  # a transpose, an expand
        assert graph.by_name[name].op in FREE
        assert node_work(graph.by_name[name], graph)[2:4] == (0, 0)


def test_the_update_reads_and_writes_the_states() -> None:
    cost = model()
    t = cost.graph.tensors["t"]
    expected = [
        device.seconds(Work("update", "float32", 9 * 24, 7 * 24 * 4))  # p, g, 2 in; p, 2 out
        for device in cost.hardware.cluster.devices
    ]
    assert cost.update(t, R).tolist() == pytest.approx(expected)
    assert (cost.update(t, S(0)) <= cost.update(t, R)).all()


# --- communicating -------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["ab", "aab", "aaaa", "aabbc"])
def test_every_conversion_has_a_price(world: str) -> None:
    n = len(world)
    shares = {2: (6, 0), 3: (3, 2, 1), 4: (0, 5, 1, 0), 5: (1, 1, 1, 1, 2)}[n]
    cost = model(world=world, shares=shares)
    t = cost.graph.tensors["t"]
    placements = (R, P, L, S(0), S(1))
    for src, dst in itertools.product(placements, placements):
        if not convertible(src, dst):
            assert {src.kind, dst.kind} & {"P", "L"}
            with pytest.raises(ValueError, match="no instruction"):
                conversion(src, dst)
            continue
        choices = cost.convert(t, src, dst)
        seconds = [c.seconds for c in choices]
        assert seconds == sorted(seconds)
        assert len({c.implementation for c in choices}) == len(choices)
        if src == dst or conversion(src, dst) == "slice":
            assert seconds == [0.0]
        else:
            assert all(0 < s < 1 for s in seconds), (src, dst)


def seconds_of(
    network: NetworkModel, kind: str, nbytes: int, src: list[float], dst: list[float]
) -> dict[str, float]:
    return dict(network.choices(kind, nbytes, np.array(src), np.array(dst)))


def test_collectives_on_one_machine_by_hand() -> None:
    a, bw, size = 1e-6, 1e10, 4000
    network = NetworkModel(cluster("aaaa", intra=FAST, inter=SLOW))
    whole, parts = [1.0] * 4, [0.5, 0.25, 0.25, 0.0]
    expected = {"padded": 2 * a + 3 * size * 0.5 / bw, "grouped": 3 * a + size / bw}
    assert seconds_of(network, "all_gather", size, parts, whole) == pytest.approx(expected)
    assert seconds_of(network, "reduce_scatter", size, whole, parts) == pytest.approx(expected)
    assert seconds_of(network, "all_reduce", size, whole, whole) == pytest.approx(
        {
            "one shot": min(4 * a + 1.5 * size / bw, 2 * (a + 2 * size / bw)),
            "two step": 6 * a + 1.5 * size / bw,
        }
    )
    lse = seconds_of(network, "all_reduce_lse", size, whole, whole)
    reduction = min(4 * a + 1.5 * size / bw, 2 * (a + 2 * size / bw))
    assert lse == pytest.approx(
        {"terms gathered": 2 * a + 3 * size / bw, "two reductions": 2 * reduction}
    )
    # Rank 0 sends most: of its half of the tensor, it keeps a quarter.
    even = [0.25] * 4
    assert seconds_of(network, "all_to_all", size, parts, even) == pytest.approx(
        {"exact": 3 * a + size * 0.5 * 0.75 / bw, "gathered": min(expected.values())}
    )


def test_the_slowest_link_bounds_the_ring_and_the_adapter_an_exchange() -> None:
    size = 10**6
    network = NetworkModel(cluster("aabb", intra=FAST, inter=SLOW))
    assert (network.latency_s, network.bytes_per_s) == (1e-5, 1e9)
    even, whole = [0.25] * 4, [1.0] * 4
    padded = seconds_of(network, "all_gather", size, even, whole)["padded"]
    # One of the two steps of recursive doubling stays inside the machines.
    assert padded == pytest.approx(1.1e-5 + 3 * size * 0.25 / 1e9)
    # Each node holds half of the tensor, and half of that crosses its adapter.
    exact = seconds_of(network, "all_to_all", size, even, even)["exact"]
    assert exact == pytest.approx(1e-6 + 2e-5 + size * 0.5 * 0.5 / 1e9)


def test_padded_gives_way_to_grouped_where_it_should() -> None:
    """padded = 2a + 3 B m / bw, grouped = 4a + B / bw; with a bw / B = 1/3, equal at m = 5/9."""
    link = Link(1e9, 1e-5)
    network, size = NetworkModel(cluster("aaaa", intra=link, inter=link)), 30_000

    def best(*units: int) -> str:
        parts = np.array(units) / 18
        return network.choices("all_gather", size, parts, np.ones(4))[0].implementation

    assert best(9, 3, 3, 3) == "padded"
    assert best(11, 3, 2, 2) == "grouped"
    equal = seconds_of(network, "all_gather", size, [10 / 18, 3 / 18, 3 / 18, 2 / 18], [1] * 4)
    assert equal["padded"] == pytest.approx(equal["grouped"])
    # An empty shard needs no sender: 3a + B / bw, equal at m = 4/9.
    assert best(9, 5, 4, 0) == "grouped"
    assert best(7, 7, 4, 0) == "padded"


# --- a whole step --------------------------------------------------------------------------


def data_parallel(rows: int = 8) -> Program:
    """Return a program that splits the batch of ``small_graph`` and all-reduces both gradients."""
    steps: list[Compute | Convert] = []

    def compute(name: str, ins: list[Placement], out: Placement, backward: bool = False) -> None:
        steps.append(Compute(node=name, ins=tuple(ins), outs=(out,), backward=backward))

    def reduce(name: str, backward: bool = False) -> None:
        steps.append(
            Convert(tensor=name, src=P, dst=R, implementation="one shot", backward=backward)
        )

    for k in range(2):
        compute(f"y{k}", [S(0), R], S(0))
        compute(f"s{k}", [S(0)], P)
    compute("loss", [P, P], P)
    reduce("loss")
    compute("xt", [S(0)], S(1), True)
    for k in range(2):
        compute(f"g{k}", [R], S(0), True)
        compute(f"d{k}", [S(1), S(0)], P, True)
        reduce(f"d{k}", True)
    sharded = ["x:0", "xt:1", "y0:0", "y1:0", "g0:0", "g1:0"]
    return Program(
        inputs={"x": S(0), "w0": R, "w1": R, "tangent": R},
        instructions=tuple(steps),
        outputs=(R, R, R),
        axes=dict.fromkeys(sharded, ("batch", rows)),
    )


def costs(graph: Graph, world: str, shares: tuple[int, ...], states: int = 2) -> CostModel:
    """Return the costs of :func:`data_parallel`, whose only axis is the batch."""
    of = {(name, 0): "batch" for name in ("x", "y0", "y1", "g0", "g1")} | {("xt", 1): "batch"}
    axes = Axes(axes={"batch": Axis(name="batch", units=sum(shares))}, of=of)
    hardware = HardwareModel(cluster(world, intra=FAST, inter=SLOW))
    return CostModel(graph, axes, hardware, {"batch": shares}, optimizer_states=states)


def test_memory_by_hand() -> None:
    """Rank 0 has 6 of 8 rows. Bytes: 16 a row of x and xt, 24 a row of y and g, 96 of w and d.

    Stored: 2 weights of 96 bytes with 2 states each. Alive before the first operator: those 576,
    the rows of x (16 bytes each) and the tangent (4). Then

        y0 +24 rows   s0 +4, y0 -   y1 +24 rows   s1 +4, y1 -   loss@P +4, s0 s1 -
        loss@R +4, loss@P -   (xt is a view of x, g of the tangent)
        d0@P +96   d0@R +96, d0@P -   d1@P +96   d1@R +96

    The last instruction holds loss 4, d0 96, d1 twice 96. The optimizer's step is the peak: loss 4,
    d0 and d1 96 each, and 192 that Adam holds on GPUs. With many rows and no states, s1 is the
    peak, with y1 and s0 alive.
    """
    graph, program = small_graph(8), data_parallel(8)
    program.check(graph)
    stored, peak = memory(graph, program, costs(graph, "ab", (6, 2)))
    assert stored.tolist() == [576, 576]
    fixed = 576 + 4
    assert peak.tolist() == [fixed + 16 * n + 4 + 4 * 96 for n in (6, 2)]
    *_, alone = memory(graph, program, costs(graph, "ab", (6, 2)), updating=False)
    assert alone.tolist() == [fixed + 16 * n + 4 + 3 * 96 for n in (6, 2)]
    many = 80
    graph, program = small_graph(many), data_parallel(many)
    stored, peak = memory(graph, program, costs(graph, "ab", (60, 20), states=0))
    assert stored.tolist() == [192, 192]
    assert peak.tolist() == [192 + 4 + 16 * n + 24 * n + 8 for n in (60, 20)]


def test_a_step_by_hand() -> None:
    graph, program = small_graph(8), data_parallel(8)
    cost = costs(graph, "ab", (6, 2))
    product = [  # rank 0 has the larger part and the slower device
        device.seconds(Work("matmul", "float32", 2 * n * 24, 4 * (n * 4 + 24 + n * 6)))
        for device, n in zip(cost.hardware.cluster.devices, (6, 2), strict=True)
    ]
    found = supersteps(graph, program, cost)
    assert len(found) == 4  # loss | d0 | d1 | the optimizer
    first = cost.compute(graph.by_name["y0"], Row((S(0),), (S(0), R), 8))
    assert first.tolist() == pytest.approx(product)
    assert found[2].compute_s.tolist() == pytest.approx(product), "d1 alone: its views are free"
    reduced = cost.convert(graph.tensors["d1"], P, R)[0].seconds
    assert [stage.communicate_s for stage in found[1:]] == [reduced, reduced, 0.0]
    timeline = simulate(graph, program, cost)
    by_hand = sum(float(stage.compute_s.max()) + stage.communicate_s for stage in found)
    assert timeline.step_s == pytest.approx(by_hand)


@pytest.mark.parametrize("world", ["ab", "aab", "aabb"])
def test_every_rank_ends_at_the_same_time(world: str) -> None:
    """Computing, waiting and communicating add up to the step on each rank."""
    graph = small_graph(12)
    space = build_space(graph)
    n = len(world)
    for seed in range(10):
        rng = random.Random(seed)
        shares = {}
        for name, axis in space.axes.axes.items():
            cuts = sorted(rng.randint(0, axis.units) for _ in range(n - 1))
            edges = [0, *cuts, axis.units]
            shares[name] = tuple(b - a for a, b in itertools.pairwise(edges))
        hardware = HardwareModel(cluster(world, intra=FAST, inter=SLOW))
        cost = CostModel(graph, space.axes, hardware, shares, 2)
        # Random prices choose the program; the simulator uses the real ones.
        problem = Problem(space, cost, time=lambda v, rng=rng: rng.random() * 1e-4)
        labelling = problem.solve()
        assert labelling is not None
        timeline = simulate(graph, problem.program(labelling), cost)
        busy = timeline.compute_s + timeline.communicate_s
        assert (busy <= timeline.step_s * (1 + 1e-9)).all(), "nothing overlaps"
        assert (timeline.peak_bytes >= timeline.stored_bytes).all()


def test_contention_of_a_fast_device_is_capped_by_slower_ones() -> None:
    """Its figures are of collectives among itself and faster devices, which take less time."""
    base = cluster("ab", intra=Link(1e9, 0.0), inter=Link(1e9, 0.0))
    given = zip(base.devices, (4e9, 1e9), (0.9, 0.6), (3.0, 1.5), strict=True)
    fast, slow = (
        replace(
            d, flops_per_s={"float32": rate}, contention=Contention(interference=lost, drag=drag)
        )
        for d, rate, lost, drag in given
    )
    both = HardwareModel(replace(base, devices=(fast, slow)))
    assert both.interference == pytest.approx([0.15, 0.6])
    assert both.drag.tolist() == [1.5, 1.5]
    milder = HardwareModel(
        replace(
            base, devices=(replace(fast, contention=Contention(interference=0.1, drag=1.2)), slow)
        )
    )
    assert milder.interference == pytest.approx([0.1, 0.6])
    assert milder.drag.tolist() == [1.2, 1.5]
    alone = HardwareModel(both.cluster.keep([0]))
    assert (alone.interference.tolist(), alone.drag.tolist()) == ([0.9], [3.0])
