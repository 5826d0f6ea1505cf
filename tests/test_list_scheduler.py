"""The order of collectives: by hand, on random programs, and on real lanes."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import fx

from hap.ir.graph import Graph
from hap.ir.placement import S
from hap.ir.plan import Plan
from hap.ir.program import Convert, Instruction, Program
from hap.plan_simulation import plan_costs
from hap.runtime.hap_module import emit
from hap.runtime.lanes import InlineLane, Lane, ThreadLane
from hap.runtime.timed_lane import TimedLane
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.cost.serial_cost import Timeline, simulate
from hap.synthesizer.schedule.event_simulator import COMMUNICATION, schedule
from hap.synthesizer.schedule.list_scheduler import orders
from hap.synthesizer.two_axes import best_on_mesh
from tests.random_plans import benchmark_case, random_plan
from tests.small_plan import small_cluster, small_graph, small_plan, small_program
from tests.test_event_simulator import Seconds
from tests.test_two_axes import machines

PLANS = [("mlp", 2, 0), ("vit", 3, 1), ("gpt2", 5, 2), ("bert_moe", 3, 3)]


def listed(graph: Graph, program: Program, cost: Prices) -> Iterator[Timeline]:
    return orders(graph, simulate(graph, program, cost), cost)


@pytest.fixture(params=PLANS, ids=str, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    file, world, seed = request.param
    return random_plan(benchmark_case(file, "tiny"), world, seed)


@pytest.fixture(scope="module")
def found(plan: Plan) -> list[Timeline]:
    return list(listed(plan.graph, plan.program, plan_costs(plan)))


def plain(step: Instruction) -> Instruction:
    """Return the step without its bucket and implementation, which scheduling may choose."""
    if not isinstance(step, Convert):
        return step
    return dataclasses.replace(step, bucket=0, implementation="")


# --- the orders ----------------------------------------------------------------------------


def test_an_order_is_the_same_program(plan: Plan, found: list[Timeline]) -> None:
    wanted = Counter(map(plain, plan.program.instructions))
    for order in found:
        order.program.check(plan.graph)
        assert Counter(map(plain, order.program.instructions)) == wanted
        halves = [step.backward for step in order.program.instructions]
        assert halves == sorted(halves)


def test_the_time_of_an_order_is_the_simulated_one(plan: Plan, found: list[Timeline]) -> None:
    """The scheduler keeps its own clocks; the simulator must agree with them."""
    cost = plan_costs(plan)
    for order in found:
        run = schedule(plan.graph, order.program, cost)
        assert order.step_s == pytest.approx(run.step_s, rel=1e-9)
        together = sum(
            float((s.end_s - s.start_s)[0]) for s in run.spans if s.stream == COMMUNICATION
        )
        assert order.communicate_s == pytest.approx(together, rel=1e-9)


def test_no_order_is_faster_than_a_stream(plan: Plan, found: list[Timeline]) -> None:
    computing_s = simulate(plan.graph, plan.program, plan_costs(plan)).compute_s.max()
    for order in found:
        assert order.step_s >= max(computing_s, order.communicate_s) * (1 - 1e-9)


def test_the_same_arguments_give_the_same_orders(plan: Plan, found: list[Timeline]) -> None:
    again = listed(plan.graph, plan.program, plan_costs(plan))
    assert [(t.program, t.step_s, t.until) for t in again] == [
        (t.program, t.step_s, t.until) for t in found
    ]


@pytest.mark.slow
def test_orders_of_a_program_over_two_axes() -> None:
    case, cluster = benchmark_case("gpt2", "tiny"), machines((2.0, 1.0), (2.0, 1.0))
    candidate = best_on_mesh(case.space, cluster, 2)
    assert candidate is not None
    graph, cost = candidate.cost.graph, candidate.cost
    for order in orders(graph, candidate.pair.serial, cost):
        order.program.check(graph)
        run = schedule(graph, order.program, cost)
        assert order.step_s == pytest.approx(run.step_s, rel=1e-9)


def test_three_orders_by_hand() -> None:
    """w0 is gathered for y0 and w1 for y1; y0 s0 run while w1 is gathered.

    Gathers take 3 each, kernels 2 on the slow rank, the reduction of the loss 3, updates 2.
    Together: w0 w1 at 3 (one start), y0 .. loss until 13, reduced at 16, d0 18, d1 20, reduced
    together at 23, updated at 27. In two buckets: w0 at 3, w1 at 6; y0 5, s0 7, the rest again
    until 13, 16; d0 18, reduced at 21, d1 20, reduced at 24, 28. In program order, each collective
    is awaited where it is read.
    """
    graph, program, cost = small_graph(), gathered(small_program()), seconds()
    ordered = list(listed(graph, program, cost))
    assert [order.step_s for order in ordered] == [27, 27, 28]
    buckets = [
        [s.bucket for s in order.program.instructions if isinstance(s, Convert) and s.tensor[0] in "wd"]
        for order in ordered
    ]  # fmt: skip
    assert [len(set(numbers)) for numbers in buckets] == [1, 2, 4]


class Gathers(Seconds):
    """A group of collectives takes 3 s however many it fuses; two groups in one half take 6 s."""

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        return [Quote("one shot", 3.0)]


def seconds() -> Seconds:
    cost = Gathers(small_graph())
    for name in ("w0", "w1"):
        cost.axes.of[name, 0] = "batch"  # type: ignore[index]
    return cost


def gathered(program: Program) -> Program:
    """Return the small program with both weights stored in shards and gathered at the start."""
    gathers = [
        Convert(
            tensor=w, src=S(0), dst=program.inputs[w], implementation="one shot", backward=False
        )
        for w in ("w0", "w1")
    ]
    steps = [s for s in program.instructions if not (isinstance(s, Convert) and s.backward)]
    reduces = [s for s in program.instructions if isinstance(s, Convert) and s.backward]
    return dataclasses.replace(
        program,
        inputs={**program.inputs, "w0": S(0), "w1": S(0)},
        instructions=(*gathers, *steps, *reduces),
        axes={**program.axes, "w0:0": ("width", 2), "w1:0": ("width", 2)},
    )


# --- emitted ranks -----------------------------------------------------------------------------


def issued(graph: fx.Graph) -> list[str]:
    return [str(n.args[1]) for n in graph.nodes if n.target == "issue"]


@pytest.mark.slow
def test_all_ranks_issue_alike_and_wait_late(plan: Plan, found: list[Timeline]) -> None:
    """Ranks with an empty share do so too; every wait stands right before its first reader."""
    # A mask reads its tensor and leaves no trace in the code of rank 0.
    converts = [s for s in plan.program.instructions if isinstance(s, Convert)]
    masked = {s.tensor for s in converts if s.kind == "mask"}
    for order in found:
        ordered = dataclasses.replace(plan, program=order.program)
        ranks = [emit(ordered, rank, torch.device("cpu")) for rank in range(plan.world_size)]
        for half in ("forward", "backward"):
            first, *others = (issued(getattr(emitted, half)) for emitted in ranks)
            assert all(other == first for other in others)
            for emitted in ranks:
                listed = list(getattr(emitted, half).nodes)
                place = {node: k for k, node in enumerate(listed)}
                for node in listed:
                    if node.target == "wait" and node.meta["value"].tensor not in masked:
                        reader = min((place[user] for user in node.users), default=place[node])
                        between = listed[place[node] + 1 : reader]
                        assert all(n.target == "wait" or "value" not in n.meta for n in between)


def test_arguments_are_not_renamed(plan: Plan) -> None:
    """A renamed argument would live until its function returns, even after its last use."""
    for rank in range(plan.world_size):
        emitted = emit(plan, rank, torch.device("cpu"))
        for graph in (emitted.forward, emitted.backward):
            arguments = [n for n in graph.nodes if n.op == "placeholder"]
            assert all(n.name == n.target for n in arguments)


GOLDEN = """\
issue all_gather
issue all_gather
wait w0
aten.mm.default y0_S0
aten.sum.default s0_P
wait w1
aten.mm.default y1_S0
aten.sum.default s1_P
aten.add.Tensor loss_P
issue all_reduce
wait loss
aten.t.default xt_S1
aten.expand.default g0_S0
aten.mm.default d0_P
issue all_reduce
aten.expand.default g1_S0
aten.mm.default d1_P
issue all_reduce
wait d0
wait d1"""


def test_golden_schedule() -> None:
    """The schedule of a small plan in two buckets, exact and equal on all ranks."""
    graph, program = small_graph(), gathered(small_program())
    two = list(listed(graph, program, seconds()))[-1].program
    shares = {"batch": (5, 3), "width": (1, 1)}
    plan = small_plan((5, 3), small_cluster(1, 1))
    plan = dataclasses.replace(plan, program=two, shares=shares)
    for rank in range(plan.world_size):
        emitted = emit(plan, rank, torch.device("cpu"))
        lines = [
            f"{n.target} {n.args[1]}" if n.target == "issue" else f"{n.target} {n.name}"
            for graph in (emitted.forward, emitted.backward) for n in graph.nodes
            if n.op in ("call_method", "call_function")
        ]  # fmt: skip
        assert "\n".join(lines) == GOLDEN


# --- lanes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [InlineLane, ThreadLane])
def test_a_lane_keeps_the_order_and_passes_results_on(lane: type[Lane]) -> None:
    made, log = lane(), []

    def run(name: str, *xs: object) -> torch.Tensor:
        log.append(name)
        flat = [x for arg in xs for x in (arg if isinstance(arg, list) else [arg])]
        return torch.stack(flat).sum(0) if flat else torch.ones(2)

    first = made.issue(run, "first")
    many = made.issue(lambda x: [x, 2 * x], first)
    last = made.issue(run, "last", [many[1], torch.ones(2)], first)
    assert made.wait(last).tolist() == [4.0, 4.0]
    assert made.wait(many[0]).tolist() == [1.0, 1.0]
    assert log == ["first", "last"]


def test_the_thread_computes_no_gradients() -> None:
    lane, x = ThreadLane(), torch.ones(2, requires_grad=True)
    assert not lane.wait(lane.issue(lambda: x * 2)).requires_grad


def test_issuing_does_not_block() -> None:
    lane, go = ThreadLane(), threading.Event()

    def slow() -> torch.Tensor:
        assert go.wait(60)
        return torch.ones(1)

    pending = lane.issue(slow)
    go.set()  # reached only if ``issue`` did not block
    assert lane.wait(pending).item() == 1


def test_a_failure_reaches_its_reader_and_all_later_ones() -> None:
    lane, ran = ThreadLane(), []

    def fail() -> torch.Tensor:
        raise RuntimeError("connection closed by rank 3")

    first = lane.issue(fail)
    second = lane.issue(lambda: ran.append(1))
    for pending in (first, second):
        with pytest.raises(RuntimeError, match="rank 3"):
            lane.wait(pending)
    assert not ran


@pytest.mark.slow
def test_the_thread_ends_with_its_lane() -> None:
    others = set(threading.enumerate())  # of earlier tests, which may end meanwhile
    lane = ThreadLane()
    lane.wait(lane.issue(lambda: torch.ones(1)))
    (thread,) = set(threading.enumerate()) - others
    del lane
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_waiting_for_another_stage_is_timed() -> None:
    lane = TimedLane(InlineLane())
    lane.idle(lambda: time.sleep(0.01))
    assert lane.idle(lambda: "arrived") == "arrived"
    assert lane.waited_s >= 0.01
    before = lane.waited_s
    assert lane.wait(lane.issue(lambda: torch.ones(2))).tolist() == [1.0, 1.0]
    assert lane.waited_s > before and len(lane.collectives) == 1
    lane.clear()
    assert lane.waited_s == 0
