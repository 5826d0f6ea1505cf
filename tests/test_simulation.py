"""The printed simulation of a step, and its trace: valid, complete, and with the same times."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import RenderableType

from hap.cli.chrome_trace import COLOURS, THREADS, trace_text
from hap.cli.simulation import longest, rank_uses, simulation_json, simulation_screen, write_trace
from hap.cli.terminal import emit
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert
from hap.plan_simulation import Simulation, simulate_plan
from hap.synthesizer.schedule.event_simulator import COMPUTE
from tests.random_plans import benchmark_case, random_plan
from tests.small_plan import small_cluster, small_plan

GRID = 0.125
"""Microseconds to which times in a trace are rounded."""


def real(plan: Plan) -> Plan:
    """Return a plan written by hand, with an implementation that exists."""
    steps = tuple(
        replace(s, implementation="one shot") if isinstance(s, Convert) else s
        for s in plan.program.instructions
    )
    return replace(plan, program=replace(plan.program, instructions=steps))


@pytest.fixture(
    params=[(f, w, o) for f in ("mlp", "vit") for w in (2, 3) for o in (False, True)], ids=str
)
def made(request: pytest.FixtureRequest) -> Simulation:
    file, world, overlap = request.param
    return simulate_plan(random_plan(benchmark_case(file, "tiny"), world, 1), overlap=overlap)


def events(made: Simulation, phase: str) -> list[dict[str, Any]]:
    data = json.loads("".join(trace_text(made.plan, made.run, made.memory)))
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"}
    return [event for event in data["traceEvents"] if event["ph"] == phase]


def test_the_trace_has_the_fields_of_the_format(made: Simulation) -> None:
    ranks = set(range(made.plan.world_size))
    for phase in "XCM":
        for event in events(made, phase):
            assert isinstance(event["name"], str) and event["name"]
            assert event["pid"] in ranks and event["tid"] in THREADS.values()
            assert event["ts"] >= 0 and isinstance(event["args"], dict)
    for event in events(made, "X"):
        assert event["dur"] >= 0 and event["cname"] == COLOURS[event["cat"]]
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events(made, "M")}
    for rank, device in enumerate(made.plan.cluster.devices):
        called = names[rank, 0, "process_name"]["name"]
        assert str(rank) in called and device.name in called and device.kind in called
        assert names[rank, 0, "thread_name"] == {"name": "compute"}
        assert names[rank, 1, "thread_name"] == {"name": "communication"}


def test_events_of_a_stream_touch_and_never_overlap(made: Simulation) -> None:
    """Compare exactly: viewers nest events that overlap by any amount."""
    streams: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(made, "X"):
        streams.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    assert len(streams) == 2 * made.plan.world_size
    for found in streams.values():
        for (ts, dur), (following, _) in itertools.pairwise(found):
            assert ts + dur <= following
    last = max(ts + dur for found in streams.values() for ts, dur in found)
    assert last == pytest.approx(made.run.step_s * 1e6, abs=GRID)


def test_the_trace_shows_all_work_and_its_side(made: Simulation) -> None:
    """Every event is an instruction, of the forward or the backward, or an update."""
    program, graph = made.plan.program, made.plan.graph
    seen: Counter[tuple[int, int]] = Counter()
    updates = set()
    for event in events(made, "X"):
        args = event["args"]
        if event["cat"] == "update":
            updates.add(args["module"])
            continue
        step = program.instructions[args["instruction"]]
        assert event["cat"] == ("backward" if step.backward else "forward")
        if isinstance(step, Compute):
            node = graph.by_name[step.node]
            assert (args["op"], args["module"], args["source"]) == (node.op, node.module, node.source)  # fmt: skip
            assert event["cat"] == ("backward" if step.node in graph.backward else "forward")
        else:
            assert args["op"] == step.kind
            assert args.get("implementation", "") == step.implementation
        assert args["result_bytes"] >= 0 and args["reads"] and args["results"]
        seen[event["pid"], event["tid"]] += 1
    assert updates <= graph.gradients.keys()
    collectives = sum(1 for group in program.groups(graph) if isinstance(group[0], Convert) and not group[0].local)  # fmt: skip
    assert {seen[rank, 1] for rank in range(made.plan.world_size)} == {collectives}
    for rank, use in enumerate(rank_uses(made)):
        busy: Counter[int] = Counter()
        for event in events(made, "X"):
            if event["pid"] == rank:
                busy[event["tid"]] += event["dur"]
        slack = GRID * len(made.run.spans)
        assert busy[0] == pytest.approx(use.compute_s * 1e6, abs=slack)
        assert busy[1] == pytest.approx(use.communicate_s * 1e6, abs=slack)


def test_shapes_and_bytes_are_those_of_the_rank() -> None:
    plan = real(small_plan())
    found = {
        (e["pid"], e["args"]["results"][0]): e["args"]["result_bytes"]
        for e in events(simulate_plan(plan), "X")
    }
    assert found[0, "y0@S0 float32[3, 6]"] == 3 * 6 * 4
    assert found[3, "y0@S0 float32[1, 6]"] == 6 * 4
    assert found[3, "d0@R float32[4, 6]"] == 96


def test_the_counter_of_memory_has_the_curve(made: Simulation) -> None:
    counters: dict[int, list[tuple[float, int]]] = {}
    for event in events(made, "C"):
        counters.setdefault(event["pid"], []).append((event["ts"], event["args"]["bytes"]))
    for rank, curve in enumerate(made.memory):
        times = [ts for ts, _ in counters[rank]]
        assert times == sorted(times) and times[0] == 0
        assert max(value for _, value in counters[rank]) == round(curve.bytes.max())
        assert counters[rank][-1][1] == round(curve.bytes[-1])


def test_the_trace_is_the_same_each_time_and_replaces_the_file(made: Simulation, tmp_path: Any) -> None:  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_trace(made, str(path))
    first = path.read_text()
    write_trace(made, str(path))
    assert path.read_text() == first == "".join(trace_text(made.plan, made.run, made.memory))
    assert list(tmp_path.iterdir()) == [path]


# --- the screen ----------------------------------------------------------------------------


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[RenderableType], list[str]]:
    def show(screen: RenderableType) -> list[str]:
        emit(screen)
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return show


def test_times_of_a_rank_add_up_to_the_step(made: Simulation) -> None:
    data = json.loads(json.dumps(simulation_json(made)))
    for use in data["ranks"]:
        own = use["compute_s"] + use["waiting_s"] + use["communicate_s"]
        assert own - use["overlapped_s"] + use["idle_s"] == pytest.approx(data["step_s"])
        assert 0 <= use["peak_s"] <= data["step_s"]


def test_the_longest_work_is_found_and_alike_layers_are_one(made: Simulation) -> None:
    rows = longest(made)
    assert rows == sorted(rows, key=lambda row: -row.total_s) and len(rows) <= 10
    slowest = max(made.run.spans, key=lambda s: float((s.end_s - s.start_s).max()))
    assert rows[0].total_s >= float((slowest.end_s - slowest.start_s).max())
    by_hand = simulate_plan(real(small_plan()))
    assert {(r.of, r.op, r.part, r.times) for r in longest(by_hand)} == {
        ("layers.*.weight (2x)", "update", "update", 2),
        ("grad layers.*.weight (2x)", "all_reduce", "backward", 2),
        ("layers.* (2x)", "mm.default", "forward", 2),
        ("layers.* (2x)", "sum.default", "forward", 2),
        ("d0", "mm.default", "backward", 1),
        ("d1", "mm.default", "backward", 1),
        ("loss", "add.Tensor", "forward", 1),
        ("loss", "all_reduce", "forward", 1),
    }


def test_the_screen(shown: Callable[[RenderableType], list[str]]) -> None:
    plan = real(small_plan())
    lines = shown(simulation_screen(simulate_plan(plan)))
    assert any("communication beside computing" in line for line in lines)
    assert sum(line.startswith("3 P100 old:1 ") for line in lines) == 2, "time and memory"
    assert any("all_reduce, grad layers.1.weight, backward" in line for line in lines)
    lines = shown(simulation_screen(simulate_plan(plan, overlap=False)))
    assert any("in turn, which the runtime does not do" in line for line in lines)


def test_the_screen_says_which_host_is_the_limit(
    shown: Callable[[RenderableType], list[str]],
) -> None:
    plan = real(small_plan())
    first, *others = plan.cluster.devices
    made = simulate_plan(
        replace(plan, cluster=replace(plan.cluster, devices=(replace(first, host_s=1.0), *others)))
    )
    spans = [s for s in made.run.spans if s.stream != COMPUTE or s.end_s[0] > s.start_s[0]]
    assert made.issuing_s == (len(spans), *(0.0 for _ in others))
    assert made.run.step_s >= len(spans)
    (line,) = (line for line in shown(simulation_screen(made)) if "the host is the limit" in line)
    assert line.startswith("rank 0: ")
    assert not any("the host" in line for line in shown(simulation_screen(simulate_plan(plan))))


def test_many_alike_ranks_share_a_line(shown: Callable[[RenderableType], list[str]]) -> None:
    plan = real(small_plan((3,) * 9 + (2,) * 11, small_cluster(9, 11)))
    lines = shown(simulation_screen(simulate_plan(plan)))
    assert sum(line.startswith("0-8 A100 ") for line in lines) == 2
    assert sum(line.startswith("9-19 P100 ") for line in lines) == 2
