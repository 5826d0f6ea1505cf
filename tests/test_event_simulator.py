"""The two streams of each rank, by hand and on random plans, and their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from hap.ir.axes import Axes, Axis
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.placement import Placement, R, S
from hap.ir.plan import Plan
from hap.ir.program import Convert
from hap.plan_simulation import plan_costs
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.contention import Streams
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.parts import AxisParts, vectors_of
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.cost.serial_cost import memory, simulate, supersteps
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.schedule.event_simulator import (
    COMMUNICATION,
    COMPUTE,
    Schedule,
    schedule,
    usage,
)
from hap.synthesizer.schedule.memory_timeline import Curve, memory_over_time
from tests.random_plans import benchmark_case, random_plan
from tests.small_plan import small_cluster, small_graph, small_program

PLANS = [
    ("mlp", 2, 0), ("mlp", 5, 2), ("vit", 3, 1), ("gpt2", 5, 2), ("bert_moe", 2, 0), ("bert_moe", 3, 1)
]  # fmt: skip


@pytest.fixture(params=PLANS, ids=str, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    file, world, seed = request.param
    return random_plan(benchmark_case(file, "tiny"), world, seed)


def both(plan: Plan) -> tuple[Schedule, Schedule]:
    cost = plan_costs(plan)
    plain, overlapped = (
        schedule(plan.graph, plan.program, cost, overlap=overlap) for overlap in (False, True)
    )
    return plain, overlapped


# --- by hand -------------------------------------------------------------------------------


class Seconds(Prices):
    """Kernels take 1 s on rank 0 and 2 s on rank 1; every collective takes 3 s."""

    together: frozenset[str] = frozenset()

    def __init__(self, graph: Graph) -> None:
        names = {"x": 0, "xt": 1, "y0": 0, "y1": 0, "g0": 0, "g1": 0}
        axes = Axes(axes={"batch": Axis(name="batch", units=8)}, of=dict.fromkeys(names.items(), "batch"))  # fmt: skip
        hardware = HardwareModel(small_cluster(1, 1))
        parts = AxisParts(axes, 2, vectors_of({"batch": (4, 4)}, hardware))
        super().__init__(graph, hardware, parts, 0)

    def compute(self, node: Node, row: Row) -> PerRank:
        view = node.op in ("aten.t.default", "aten.expand.default")
        return np.array([0.0, 0.0] if view else [1.0, 2.0])

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        return [Quote("one shot", 3.0)]

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        return [Quote(group[0].implementation, 3.0)]

    def update(self, parameter: Tensor, stored: Placement) -> PerRank:
        return np.array([1.0, 2.0])

    def cross(self, group: Sequence[tuple[Node, Row]]) -> tuple[float, int] | None:
        return (3.0, 1) if group[0][0].name in self.together else None


def spans(run: Schedule, stream: str, rank: int) -> list[tuple[float, float]]:
    found = [
        (float(s.start_s[rank]), float(s.end_s[rank])) for s in run.spans if s.stream == stream
    ]
    return [(start, end) for start, end in found if end > start]


def test_without_overlap_by_hand() -> None:
    """The order: y0 s0 y1 s1 loss, reduce, d0, reduce, d1, reduce, two updates."""
    graph = small_graph()
    run = schedule(graph, small_program(), Seconds(graph), overlap=False)
    assert spans(run, COMMUNICATION, 0) == [(10, 13), (15, 18), (20, 23)]
    assert spans(run, COMPUTE, 0) == [*((k, k + 1) for k in range(5)), (13, 14), (18, 19), (23, 24), (24, 25)]  # fmt: skip
    assert spans(run, COMPUTE, 1)[-4:] == [(13, 15), (18, 20), (23, 25), (25, 27)]
    assert run.step_s == 27
    used = usage(run)
    assert used.compute_s.tolist() == [9, 18]
    assert used.waiting_s.tolist() == [7, 0]
    assert used.idle_s.tolist() == [2, 0], "rank 0 ends its updates before rank 1"
    assert used.communicate_s.tolist() == [9, 9]
    assert used.overlapped_s.tolist() == [0, 0]


def test_with_overlap_by_hand() -> None:
    """The backward's second product overlaps the first reduction; the forward ends before."""
    graph = small_graph()
    run = schedule(graph, small_program(), Seconds(graph))
    assert spans(run, COMMUNICATION, 1) == [(10, 13), (15, 18), (18, 21)]
    assert spans(run, COMPUTE, 0)[-4:] == [(13, 14), (14, 15), (21, 22), (22, 23)]
    assert spans(run, COMPUTE, 1)[-4:] == [(13, 15), (15, 17), (21, 23), (23, 25)]
    assert run.step_s == 25
    used = usage(run)
    assert used.compute_s.tolist() == [9, 18]
    assert used.overlapped_s.tolist() == [0, 2]
    assert used.waiting_s.tolist() == [5, 0], "rank 0 computes d1 while rank 1 computes d0"
    assert used.idle_s.tolist() == [2, 0]


def test_a_collective_slows_computing_beside_it_by_hand() -> None:
    """d1 loses half of the 3 s of d0's reduction; a rank that waits loses nothing."""
    graph, cost = small_graph(), Seconds(small_graph())
    cost.hardware.interference = np.array([0.0, 0.5])
    run = schedule(graph, small_program(), cost)
    assert spans(run, COMMUNICATION, 1) == [(10, 13), (15, 18), (18.5, 21.5)]
    assert spans(run, COMPUTE, 1)[-4:] == [(13, 15), (15, 18.5), (21.5, 23.5), (23.5, 25.5)]
    assert run.step_s == 25.5


@pytest.mark.parametrize(("figure", "per_rank"), [("drag", [1.5, 3.0]), ("delay_s", [0.5, 3.0])])
def test_computing_slows_the_collective_beside_it_by_hand(
    figure: str, per_rank: list[float]
) -> None:
    """While rank 1 computes d1 for 2 s, the reduction runs at a third of its rate.

    A drag of 3 has this effect; so does a delay of 3 s for each of two messages in 3 s.
    """
    graph, cost = small_graph(), Seconds(small_graph())
    setattr(cost.hardware, figure, np.array(per_rank))
    run = schedule(graph, small_program(), cost)
    first, second, third = spans(run, COMMUNICATION, 1)
    assert first == (10, 13), "nothing is computed meanwhile"
    assert second == pytest.approx((15, 17 + 3 - 2 / 3))
    assert third == pytest.approx((second[1], second[1] + 3))
    assert run.step_s == pytest.approx(third[1] + 4)


def test_computing_and_communicating_slow_each_other_while_both_run() -> None:
    """Contention ends when the computing or the collective ends."""
    hardware = HardwareModel(small_cluster(1, 1))
    hardware.interference, hardware.drag = np.array([0.0, 0.5]), np.array([1.0, 2.0])
    streams = Streams(hardware)
    number = streams.issue(1.0, 1)  # takes 2 s beside rank 1, which loses a quarter meanwhile
    _, end = streams.compute(np.array([0.1, 1.0]))
    assert end == pytest.approx([0.1, 1 / 0.75])
    assert not streams.ended(number)
    _, end = streams.compute(np.array([0.0, 1.0]))
    assert end == pytest.approx([0.1, 2.5]), "half a second is lost in all"
    assert streams.ended(number)
    assert streams.jobs[number].end_s == pytest.approx(2.0)
    streams.wait(number)
    assert streams.clock_s == pytest.approx([2.0, 2.5])


def test_no_rank_ends_before_its_computing_and_the_interference() -> None:
    """Rank 0 lags: the collective, which has ended on rank 1, still takes half a second of it."""
    hardware = HardwareModel(small_cluster(1, 1))
    hardware.interference = np.array([0.5, 0.0])
    streams = Streams(hardware)
    streams.issue(1.0, 1)
    streams.compute(np.array([0.2, 2.0]))
    _, end = streams.compute(np.array([2.0, 0.0]))
    assert end == pytest.approx([2.4, 2.0]), "0.2 of it was charged"
    assert streams.least_s == pytest.approx([2.7, 2.0])


def test_the_device_waits_for_its_host() -> None:
    """Rank 0 is issued an operator each 2 s, rank 1 each half second; long ones let the host run ahead."""
    hardware = HardwareModel(small_cluster(1, 1))
    hardware.host_s = np.array([2.0, 0.5])
    streams = Streams(hardware)
    _, end = streams.compute(np.array([1.0, 1.0]))
    assert end == pytest.approx([3.0, 1.5])
    _, end = streams.compute(np.array([7.0, 1.0]))
    assert end == pytest.approx([11.0, 2.5]), "issued at 4 s and at 1 s"
    _, end = streams.compute(np.array([1.0, 0.0]))  # rank 1 has no share and is issued nothing
    assert end == pytest.approx([12.0, 2.5])
    number = streams.issue(1.0, 1)
    streams.wait(number)
    assert streams.jobs[number].end_s == pytest.approx(13.0)
    _, end = streams.compute(np.array([1.0, 1.0]))
    assert end == pytest.approx([14.0, 14.0]), "issued long ago"


def test_a_step_takes_at_least_the_time_of_its_host(plan: Plan) -> None:
    host_s = 1e-3
    devices = tuple(dataclasses.replace(d, host_s=host_s) for d in plan.cluster.devices)
    slow = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, devices=devices))
    _, fast_run = both(plan)
    _, run = both(slow)
    issued = np.zeros(plan.world_size)
    for span in run.spans:
        issued += (span.end_s > span.start_s) if span.stream == COMPUTE else 1
    assert run.step_s >= max(fast_run.step_s, host_s * issued.max()) - 1e-9
    assert run.step_s <= fast_run.step_s + host_s * len(run.spans) + 1e-9


def test_only_readers_of_a_collective_wait_for_it() -> None:
    """y1 reads a gathered weight and waits; y0, which is issued after the gather, does not."""
    graph, program = small_graph(), small_program()
    gather = Convert(tensor="w1", src=S(0), dst=R, implementation="one shot", backward=False)
    program = dataclasses.replace(
        program,
        inputs={**program.inputs, "w1": S(0)},
        instructions=(gather, *program.instructions),
        axes={**program.axes, "w1:0": ("width", 2)},
    )
    cost = Seconds(graph)
    cost.axes.of["w1", 0] = "batch"  # type: ignore[index]
    run = schedule(graph, program, cost, overlap=True)
    assert spans(run, COMMUNICATION, 0)[0] == (0, 3)
    assert spans(run, COMPUTE, 0)[:4] == [(0, 1), (1, 2), (3, 4), (4, 5)], "y0 s0 | y1 s1"
    assert spans(run, COMPUTE, 1)[:4] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_node_that_is_a_collective_joins_all_ranks() -> None:
    graph, program = small_graph(), small_program()
    cost = Seconds(graph)
    cost.together = frozenset({"s0"})
    run = schedule(graph, program, cost, overlap=False)
    assert spans(run, COMMUNICATION, 0)[0] == (2, 5)
    assert spans(run, COMPUTE, 0)[:2] == [(0, 1), (5, 6)]
    assert run.step_s == simulate(graph, program, cost).step_s == 27 - 2 + 3
    assert len(supersteps(graph, program, cost)) == 5


# --- on random plans -----------------------------------------------------------------------


def test_without_overlap_it_is_the_sum_of_the_stages(plan: Plan) -> None:
    cost = plan_costs(plan)
    run = schedule(plan.graph, plan.program, cost, overlap=False)
    line = simulate(plan.graph, plan.program, cost)
    assert run.step_s == pytest.approx(line.step_s, rel=1e-12)
    used = usage(run)
    np.testing.assert_allclose(used.compute_s, line.compute_s, rtol=1e-9)
    wait_s = line.step_s - line.compute_s - line.communicate_s
    np.testing.assert_allclose(used.waiting_s + used.idle_s, wait_s, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(used.communicate_s, line.communicate_s, rtol=1e-9)
    assert used.overlapped_s == pytest.approx(0, abs=1e-15)


def test_overlap_delays_nothing(plan: Plan) -> None:
    plain, overlapped = both(plan)
    assert overlapped.step_s <= plain.step_s * (1 + 1e-12)
    for late, soon in zip(plain.spans, overlapped.spans, strict=True):
        assert (late.at, late.what) == (soon.at, soon.what)
        # Sums of seconds in another order round otherwise.
        assert (soon.start_s <= late.start_s * (1 + 1e-12)).all()
        assert (soon.end_s <= late.end_s * (1 + 1e-12)).all()


def test_a_step_is_at_least_each_streams_work(plan: Plan) -> None:
    for run in both(plan):
        used = usage(run)
        assert (used.compute_s <= run.step_s * (1 + 1e-12)).all()
        assert (used.communicate_s <= run.step_s * (1 + 1e-12)).all()
        for part in (used.waiting_s, used.overlapped_s, used.idle_s):
            assert (part >= 0).all()
        whole = used.compute_s + used.waiting_s + used.communicate_s - used.overlapped_s
        np.testing.assert_allclose(whole + used.idle_s, run.step_s)


def test_streams_do_one_thing_at_a_time_and_nothing_starts_too_soon(plan: Plan) -> None:
    """Every value that a span reads comes from a span that has ended."""
    for run in both(plan):
        for stream in (COMPUTE, COMMUNICATION):
            for rank in range(plan.world_size):
                times = [t for span in spans(run, stream, rank) for t in span]
                assert times == sorted(times)
        assert run.step_s == max(float(s.end_s.max()) for s in run.spans)
        made: dict[object, PerRank] = {}
        for s in run.spans:
            if s.stream == COMMUNICATION:
                assert len(set(s.start_s.tolist())) == len(set(s.end_s.tolist())) == 1
            if not isinstance(s.what, tuple):
                continue
            for step in s.what:
                if isinstance(step, Convert):
                    reads, makes = [(step.tensor, step.src)], [(step.tensor, step.dst)]
                else:
                    node = plan.graph.by_name[step.node]
                    reads = list(zip(node.inputs, step.ins, strict=True))
                    makes = list(zip(node.outputs, step.outs, strict=True))
                for value in reads:
                    assert (s.start_s >= made.get(value, s.start_s)).all()
                made.update((value, s.end_s) for value in makes)


def test_the_same_arguments_give_the_same_schedule(plan: Plan) -> None:
    for first, second in zip(both(plan), both(plan), strict=True):
        assert first.step_s == second.step_s
        for a, b in zip(first.spans, second.spans, strict=True):
            assert a.what == b.what and a.start_s.tolist() == b.start_s.tolist()


# --- memory --------------------------------------------------------------------------------


def curves(plan: Plan, run: Schedule) -> tuple[Curve, ...]:
    return memory_over_time(plan.graph, plan.program, plan_costs(plan), run)


def test_the_curve_of_memory_has_the_peak_of_the_simulator(plan: Plan) -> None:
    plain, overlapped = both(plan)
    _, peak = memory(plan.graph, plan.program, plan_costs(plan))
    found = [curve.bytes[curve.peak] for curve in curves(plan, plain)]
    assert found == pytest.approx(peak.tolist(), rel=1e-12)
    # Overlap may raise the peak, because computing runs ahead of communication.
    more = [curve.bytes[curve.peak] for curve in curves(plan, overlapped)]
    assert all(b >= a * (1 - 1e-12) for a, b in zip(found, more, strict=True))


def test_memory_never_falls_below_its_initial_value(plan: Plan) -> None:
    for run in both(plan):
        for curve in curves(plan, run):
            assert (np.diff(curve.times_s) >= 0).all() and curve.times_s[-1] <= run.step_s
            assert curve.bytes.min() == curve.bytes[0] and curve.at[0] == -1
            assert curve.times_s[-1] <= float(run.backward_done_s.max())


def test_memory_by_hand() -> None:
    """Bytes per rank, with 4 of 8 rows: x 64 and its view xt, w 96 each, y 96, scalars 4, d 96."""
    graph, program = small_graph(), small_program()
    cost = Seconds(graph)
    held = 64 + 2 * 96 + 4
    run = schedule(graph, program, cost, overlap=False)
    (curve, _) = memory_over_time(graph, program, cost, run)
    assert list(zip(curve.times_s.tolist(), (curve.bytes - held).tolist(), strict=True)) == [
        (0, 0), (0, 96), (1, 100), (2, 4), (2, 100), (3, 104), (4, 8), (4, 12), (5, 8), (5, 4),
        (5, 8), (13, 4), (13, 100), (14, 196), (18, 100), (18, 196), (19, 292), (23, 196),
    ]  # fmt: skip
    assert curve.at[curve.peak] == program.instructions.index(program.instructions[-1])


def test_an_overlapped_collective_keeps_what_it_reads() -> None:
    """d0@P stays until 18, long after d1 is computed; without overlap, it is freed before."""
    graph, program = small_graph(), small_program()
    cost = Seconds(graph)
    (curve, _) = memory_over_time(
        graph, program, cost, schedule(graph, program, cost, overlap=True)
    )
    at = float(curve.times_s[curve.peak])
    held = 64 + 2 * 96 + 4
    assert at <= 18 and curve.bytes[curve.peak] - held == 4 * 96 + 4
