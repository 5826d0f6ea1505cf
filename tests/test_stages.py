"""Pipelines of stages: what they compute, what they send, how long they take."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.errors import HapError, InfeasibleError, PlanError
from hap.ir.microbatch import Phase, phases
from hap.ir.microbatch_sizes import _in_proportion, size_of
from hap.ir.pipeline_order import Turn, turns
from hap.ir.plan import Plan
from hap.ir.stage_messages import messages
from hap.ir.stages import crossing, cut_stages
from hap.runtime.collectives import Waiting
from hap.runtime.emulate import EmulatedComm, run_ranks
from hap.runtime.hap_module import HapModule
from hap.synthesizer.schedule.pipeline_simulator import (
    OnceTransfer,
    StageSeconds,
    TurnTimes,
    simulate_pipeline,
)
from hap.synthesizer.stages.flights import chosen_delays
from hap.synthesizer.stages.time_axis import over_time
from tests.random_plans import Case, adamw, benchmark_case, make_case, two_machines, verdict
from tests.random_stages import FAMILIES, divided, random_staged_plan, uneven_count
from tests.test_verify import on_gloo, story

GROUPS = ((1, 1), (2, 1), (1, 3), (2, 2), (1, 2, 1), (2, 1, 2), (1, 1, 1, 1))


# --- what they compute -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_pipelines_compute_what_one_device_does(family: str) -> None:
    """``python -m benchmarks.random_pipelines`` draws more."""
    case = benchmark_case(family, "tiny")
    plan = random_staged_plan(case, GROUPS[FAMILIES.index(family) % len(GROUPS)], 0)
    found = verdict(case, plan)
    assert found.ok, story(found)
    assert len(found.rows) > len(plan.graph.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "bert_moe", "wide_mlp"])
def test_unequal_microbatches_compute_what_one_device_does(family: str) -> None:
    case = benchmark_case(family, "tiny")
    plan = random_staged_plan(case, (1, 2, 2), 7, uneven_count(case))
    assert len({size_of(plan.shares, k) for k in range(plan.microbatches)}) > 1
    found = verdict(case, plan)
    assert found.ok, story(found)
    assert Plan.from_json(plan.to_json()) == plan
    backwards = {name: units[::-1] for name, units in plan.shares.items()}
    with pytest.raises(ValueError, match="smaller ones come first"):
        Plan.from_json(replace(plan, shares=backwards).to_json())


def test_a_smaller_microbatch_keeps_each_ranks_part() -> None:
    rng = random.Random(0)
    for _ in range(300):
        given = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        for units in range(1, sum(given) + 1):
            found = _in_proportion(units, given)
            assert sum(found) == units
            for share, before in zip(found, given, strict=True):
                assert abs(share - units * before / sum(given)) < 1
                assert share <= before


@pytest.mark.slow
@pytest.mark.parametrize(("family", "uneven"), [("bert", True), ("bert", False), ("gpt2", True)])
def test_masks_of_microbatches_are_those_of_one_device(family: str, uneven: bool) -> None:
    case = benchmark_case(family, "tiny_dropout")
    found = verdict(case, random_staged_plan(case, (2, 1), 1, uneven_count(case) if uneven else 0))
    assert found.ok, story(found)
    assert "drawn" in {row.what for row in found.rows}, found.random


@pytest.mark.slow
@pytest.mark.gloo
def test_real_processes_compute_what_one_device_does() -> None:
    case = benchmark_case("gpt2", "tiny")
    plan = random_staged_plan(case, (2, 1, 1), 4, uneven_count(case))
    assert plan.stages is not None
    stages = (replace(s, delay=2, recompute=not k) for k, s in enumerate(plan.stages.stages))
    plan = replace(plan, stages=replace(plan.stages, stages=tuple(stages)))
    found = verdict(case, plan, run=on_gloo)
    assert found.ok, story(found)


def test_the_loss_needs_no_gradients() -> None:
    case = benchmark_case("vit", "tiny")
    plan = random_staged_plan(case, (2, 1), 3)

    def step(comm: hap.Comm) -> tuple[float, float]:
        module = HapModule(plan, case.model, comm, torch.device("cpu"))
        batch = plan.local_batch(case.batch, comm.rank)
        with torch.no_grad():
            alone = module(*batch).item()
        return alone, module(*batch).item()

    for alone, trained in run_ranks(plan.world_size, step):
        assert alone == trained == pytest.approx(case.loss_of(case.model).item(), rel=1e-5)


@pytest.mark.slow
def test_whole_state_dict_of_a_pipeline() -> None:
    case = benchmark_case("bert", "tiny")
    plan = random_staged_plan(case, (2, 2), 1)

    def gathered(comm: hap.Comm) -> dict[str, torch.Tensor]:
        return HapModule(plan, case.model, comm, torch.device("cpu")).full_state_dict()

    expected = case.model.state_dict()
    for found in run_ranks(plan.world_size, gathered):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], whole) for name, whole in expected.items())


# --- microbatches ------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_statistics_of_the_whole_batch_forbid_microbatches() -> None:
    case = make_case(Normed(), (torch.randn(8, 6),), optimizer=adamw)
    with pytest.raises(HapError, match=r"whole in the middle of the step|whole batch"):
        over_time(case.space, two_machines(2), 2)


def test_a_count_of_labels_is_known_before_the_microbatches() -> None:
    graph = divided(benchmark_case("bert", "tiny")).part(2)
    found = Counter(phases(graph).values())
    assert found[Phase.COUNT]
    assert found[Phase.COUNTED]
    assert found[Phase.END] >= len(graph.gradients)


@pytest.mark.slow
def test_stages_cover_every_operator_once() -> None:
    for family in FAMILIES:
        graph = divided(benchmark_case(family, "tiny")).part(2)
        plan = random_staged_plan(benchmark_case(family, "tiny"), (1, 1, 1), 5)
        graphs, transfers = plan.cut
        names = [n.name for g in graphs for n in g.nodes]
        twice = {name for name, count in Counter(names).items() if count > 1}
        reads = {i.tensor for i in graph.role("parameter")}
        for name in twice:
            assert not reads & set(graph.by_name[name].inputs)
        assert {n.name for n in graph.nodes} >= set(names)
        assert {o.target for g in graphs for o in g.outputs if o.role == "gradient"} == set(
            plan.graph.gradients
        )
        assert all(t.src != t.dst for t in transfers)


# --- what they send ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_sent_once(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randrange(1, 9)

    def parts(first: int, split: bool) -> dict[int, tuple[int, int]]:
        count = rng.randrange(1, 4)
        if not split:
            return {first + k: (0, rows) for k in range(count)}
        ends = sorted(rng.randrange(rows + 1) for _ in range(count - 1))
        return {first + k: span for k, span in enumerate(itertools.pairwise([0, *ends, rows]))}

    split = rng.random() < 0.5
    held, needed = parts(0, split), parts(10, rng.random() < 0.5)
    found = messages(held, needed, split=split)
    for rank, (start, stop) in needed.items():
        arrived = Counter(row for m in found if m.dst == rank for row in range(m.start, m.stop))
        assert arrived == Counter(range(start, stop))
    for m in found:
        assert held[m.src][0] <= m.start < m.stop <= held[m.src][1]


@pytest.mark.parametrize("groups", [(1, 1), (1, 1, 1), (2, 1, 2)])
def test_no_message_waits_behind_a_receive(
    groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL runs a communicator's messages in order: a send behind a receive could wait for ever."""
    case = benchmark_case("bert", "tiny")
    plan = random_staged_plan(case, groups, 3)
    ways: dict[tuple[int, int], list[str]] = {}
    send, receive = EmulatedComm.send, EmulatedComm.receive

    def noted(way: str, comm: EmulatedComm) -> None:
        ways.setdefault((id(comm._world), comm.rank), []).append(way)

    def sending(comm: EmulatedComm, x: torch.Tensor, rank: int) -> Waiting:
        noted("send", comm)
        return send(comm, x, rank)

    def receiving(comm: EmulatedComm, into: torch.Tensor, rank: int) -> Waiting:
        noted("receive", comm)
        return receive(comm, into, rank)

    monkeypatch.setattr(EmulatedComm, "send", sending)
    monkeypatch.setattr(EmulatedComm, "receive", receiving)

    def step(comm: hap.Comm) -> HapModule:
        module = HapModule(plan, case.model, comm, torch.device("cpu"))
        batch: Any = plan.local_batch(case.batch, comm.rank)
        (module(**batch) if isinstance(batch, Mapping) else module(*batch)).backward()
        return module  # its communicators must live, for their ids to differ

    kept = run_ranks(plan.world_size, step)
    assert len(kept) == plan.world_size
    assert sum(map(len, ways.values())) > 2 * plan.microbatches
    assert all(len(set(found)) == 1 for found in ways.values())


# --- how long they take ----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "ahead"), [(1, 1), (4, 2), (5, 9), (6, 6)])
def test_turns_run_each_microbatch_forward_then_backward(count: int, ahead: int) -> None:
    order = list(turns(count, ahead))
    assert sorted(order) == sorted(Turn(k, b) for k in range(count) for b in (False, True))
    held = 0
    for turn in order:
        held += -1 if turn.backward else 1
        assert 0 <= held <= ahead
        assert not turn.backward or order.index(Turn(turn.microbatch, False)) < order.index(turn)


@pytest.mark.parametrize(("count", "ahead", "delay"), [(1, 1, 1), (4, 2, 1), (5, 9, 3), (6, 6, 9)])
def test_gradients_of_weights_follow_their_backward(count: int, ahead: int, delay: int) -> None:
    order = list(turns(count, ahead, delay))
    assert [t for t in order if not t.weights] == list(turns(count, ahead))
    assert sorted(t.microbatch for t in order if t.weights) == list(range(count))
    for turn in (t for t in order if t.weights):
        before = order[: order.index(turn)]
        assert Turn(turn.microbatch, True) in before
        behind = sum(t.backward and not t.weights for t in before) - turn.microbatch
        assert behind <= delay


def test_delayed_gradients_of_weights_shorten_a_pipeline() -> None:
    each = [
        StageSeconds(forward_s=1.0, backward_s=2.0, weights_s=1.0 if k else 0.0, in_flight=4 - k)
        for k in range(4)
    ]
    together = simulate_pipeline(each, 8).step_s
    delayed = [replace(s, delay=1 if s.weights_s else 0) for s in each]
    assert simulate_pipeline(delayed, 8).step_s < together
    assert chosen_delays(each, 8, (8, 8, 8, 8))[0] == 0
    assert max(chosen_delays(each, 8, (8, 8, 8, 8))) > 0
    assert chosen_delays(each, 8, (0, 0, 0, 0)) == (0, 0, 0, 0)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_even_stages_take_the_time_of_the_closed_form(stages: int, parts: int) -> None:
    each = [
        StageSeconds(forward_s=1.0, backward_s=2.0, in_flight=stages - k) for k in range(stages)
    ]
    assert simulate_pipeline(each, parts).step_s == pytest.approx(3.0 * (parts + stages - 1))


def uneven_stages(rng: random.Random, count: int) -> list[StageSeconds]:
    return [
        StageSeconds(
            forward_s=rng.random(), backward_s=1 + rng.random(), send_s=rng.random(),
            weights_s=rng.random(), delay=rng.choice((0, 1, 2, 7)), return_s=rng.random(),
            before_s=rng.random(), after_s=rng.random(),
            in_flight=(count - k) * rng.choice([1, 2]) if k == 0 else count - k,
        )
        for k in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_turns_and_transfers_begin_as_soon_as_they_can(seed: int) -> None:
    """A certificate: nothing overlaps on a stage or a link, and nothing waits without a reason."""
    rng = random.Random(seed)
    count, parts = rng.randrange(2, 6), rng.randrange(1, 8)
    stages = uneven_stages(rng, count)
    record: list[TurnTimes] = []
    step_s = simulate_pipeline(stages, parts, record=record).step_s
    transfers = [t for t in record if t.transfer]
    to = {t: t.stage + (-1 if t.turn.backward else 1) for t in transfers}
    arrived = {(to[t], t.turn): t.end_s for t in transfers}
    ended, ends = dict[tuple[int, Turn], float](), list[float]()
    for k, stage in enumerate(stages):
        own = [t for t in record if t.stage == k and not t.transfer]
        assert [t.turn for t in own] == list(turns(parts, stage.in_flight, stage.delay))
        free = stage.before_s
        for t in own:
            first = t.turn.weights or k == (count - 1 if t.turn.backward else 0)
            came = 0.0 if first else arrived[k, t.turn]
            assert t.start_s == pytest.approx(max(free, came))
            assert t.end_s - t.start_s == pytest.approx(stage.turn_s(t.turn))
            free = ended[k, t.turn] = t.end_s
        ends.append(free + stage.after_s)
    assert step_s == pytest.approx(max(ends))
    for t in transfers:
        took = stages[to[t]].return_s if t.turn.backward else stages[t.stage].send_s
        assert t.end_s - t.start_s == pytest.approx(took)
        ready = ended[t.stage, t.turn]
        beside = [o for o in transfers if o != t and (o.stage == t.stage or to[o] == to[t])]
        assert all(o.end_s <= t.start_s + 1e-9 or t.end_s <= o.start_s + 1e-9 for o in beside)
        earlier = [o for o in beside if ended[o.stage, o.turn] <= ready]
        assert t.start_s == pytest.approx(max([ready, *(o.end_s for o in earlier)]))


def test_a_middle_stage_sends_both_ways_over_one_link() -> None:
    def step_s(*in_flight: int) -> float:
        each = StageSeconds(forward_s=0.01, backward_s=0.01, send_s=1.0, return_s=1.0, in_flight=1)
        return simulate_pipeline([replace(each, in_flight=n) for n in in_flight], 16).step_s

    assert step_s(5, 1) < 22
    assert step_s(9, 5, 1) > 31


@pytest.mark.parametrize("seed", range(10))
def test_two_uneven_stages_take_the_longest_chain_of_dependences(seed: int) -> None:
    rng = random.Random(seed)
    count, parts = 2, rng.randrange(1, 6)
    stages = uneven_stages(rng, count)
    orders = [list(turns(parts, s.in_flight, s.delay)) for s in stages]

    @cache
    def done(k: int, turn: Turn) -> float:
        at = orders[k].index(turn)
        ready = done(k, orders[k][at - 1]) if at else stages[k].before_s
        late_s = stages[k].weights_s if stages[k].delay else 0.0
        if turn.weights:
            return ready + late_s
        ready = max(ready, arrived(k, turn))
        return ready + (stages[k].backward_s - late_s if turn.backward else stages[k].forward_s)

    @cache
    def arrived(k: int, turn: Turn) -> float:
        src = k + 1 if turn.backward else k - 1
        if not 0 <= src < count:
            return 0.0
        own = [t for t in orders[src] if t.backward == turn.backward and not t.weights]
        at = own.index(turn)
        free = arrived(k, own[at - 1]) if at else 0.0
        seconds = stages[k].return_s if turn.backward else stages[src].send_s
        return max(free, done(src, turn)) + seconds

    ends = [done(k, orders[k][-1]) + stages[k].after_s for k in range(count)]
    assert simulate_pipeline(stages, parts).step_s == pytest.approx(max(ends))


def test_computing_beside_a_transfer_takes_longer_at_both_ends() -> None:
    def ends(interference: float) -> tuple[float, ...]:
        stages = [
            StageSeconds(forward_s=1.0, backward_s=1.0, send_s=2.0, return_s=2.0, in_flight=2,
                         interference=interference),
            StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1, interference=interference),
        ]  # fmt: skip
        return simulate_pipeline(stages, 2).end_s

    # The second stage begins its two microbatches at 3 and 5, and ends each after 2.
    assert ends(0.0) == (10.0, 7.0)
    # It sends back the first gradient, and receives the second input, beside computing: 1 s each.
    assert ends(0.5) == (12.0, 10.0)


def test_a_weight_of_two_stages_crosses_beside_computing() -> None:
    def ends(*awaits: tuple[OnceTransfer, ...]) -> tuple[float, ...]:
        first, second = (*awaits, (), ())[:2]
        stages = [
            StageSeconds(forward_s=1.0, backward_s=1.0, send_s=1.0, return_s=1.0, in_flight=1,
                         awaits=first),
            StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1, awaits=second),
        ]  # fmt: skip
        return simulate_pipeline(stages, 1).end_s

    assert ends() == (6.0, 4.0)
    # The weight and the activations share the link: these take from 1 to 3, and the weight until 5.
    weight = (OnceTransfer(0, 4.0, backward=False),)
    assert ends((), weight) == (9.0, 7.0)
    # The sum of the weight's gradients leaves at 8, after the activations' gradient.
    assert ends((OnceTransfer(1, 4.0, backward=True),), weight) == (12.0, 7.0)
    assert ends((OnceTransfer(1, 0.5, backward=True),), weight) == (9.0, 7.0)


def test_what_waits_for_other_stages_and_what_does_not() -> None:
    def ends(early_s: float, hidden_s: float, shared_s: float) -> tuple[float, ...]:
        first, second = (
            StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1, after_s=3.0, early_s=early_s,
                         hidden_s=hidden_s, awaits=(OnceTransfer(1, 4.0, backward=True),)),
            StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1, shared_s=shared_s,
                         awaits=(OnceTransfer(0, 2.0, backward=False),)),
        )  # fmt: skip
        return simulate_pipeline([first, second], 1).end_s

    # The weight arrives at 2. The sum leaves at 4 and arrives at 8; turns of the first stage end at 5.
    assert ends(0.0, 0.0, 0.0) == (11.0, 4.0)
    assert ends(2.0, 0.0, 0.0) == (9.0, 4.0)
    assert ends(2.0, 1.5, 0.0) == (9.0, 4.0)
    assert ends(0.0, 0.0, 1.0) == (12.0, 5.0)


def test_what_is_made_of_a_received_weight_leaves_after_it() -> None:
    def once(src: int) -> tuple[OnceTransfer, ...]:
        return (OnceTransfer(src, 4.0, backward=False),)

    stages = [
        StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1),
        StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1, shared_s=2.0, awaits=once(0)),
        StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1, shared_s=1.0, awaits=once(1)),
    ]
    # At the second stage from 4 to 6, at the last one at 10, whose turns are from 11 to 13.
    assert simulate_pipeline(stages, 1).end_s == (15.0, 14.0, 13.0)


@pytest.mark.parametrize("products", ["float32", "tf32"])
def test_stages_keep_the_precision_of_products(products: str) -> None:
    graph = replace(divided(benchmark_case("vit", "tiny")).part(2), products=products)
    graphs, _ = cut_stages(graph, tuple(crossing(graph))[5:6])
    assert {g.products for g in graphs} == {products}


def test_too_few_microbatches_in_flight_are_no_deadlock_of_the_simulator() -> None:
    stages = [
        StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=1),
        StageSeconds(forward_s=1.0, backward_s=1.0, in_flight=2),
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_pipeline(stages, 4)


# --- plans -------------------------------------------------------------------------------------------


def slow_pair(case: Case, *, stages: bool = True) -> Plan:
    """Return a plan for two devices behind a link on which data parallelism does not pay."""
    cluster = two_machines(3).keep((0, 2))
    rates = {"flops_per_s": {"float32": 1e7}, "memory_bytes_per_s": 1e8}
    cluster = replace(
        cluster, inter=replace(cluster.inter, bandwidth_bytes_per_s=4e4),
        devices=tuple(replace(d, **rates) for d in cluster.devices),
    )  # fmt: skip
    return hap.plan(
        case.model, case.batch, cluster, loss=case.loss,
        optimizer=case.optimizer, options=hap.PlanOptions(stages=stages, all_devices=not stages),
    )  # fmt: skip


@pytest.mark.slow
def test_slow_links_are_worth_stages(tmp_path: Path) -> None:
    case = benchmark_case("vit", "tiny")
    plan = slow_pair(case)
    assert plan.stages is not None
    without = next(a for a in plan.prediction.alternatives if a.name == "without stages")
    assert plan.prediction.step_s < without.step_s
    assert sorted(r for s in plan.stages.stages for r in s.ranks) == [0, 1]
    assert verdict(case, plan).ok
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.cut == plan.cut


def test_damaged_stages_are_refused(tmp_path: Path) -> None:
    plan = random_staged_plan(benchmark_case("vit", "tiny"), (1, 1), 0)
    data = plan.to_json()
    for damage in (
        {"cuts": ["nothing"]}, {"cuts": []}, {"stages": data["stages"]["stages"][:1]},
        {"stages": [data["stages"]["stages"][0]] * 2}, {"stages": 7},
    ):  # fmt: skip
        with pytest.raises((PlanError, ValueError)):
            Plan.from_json(data | {"stages": data["stages"] | damage})


def test_cuts_must_follow_the_model() -> None:
    graph = divided(benchmark_case("vit", "tiny")).part(2)
    forward = [n.name for n in graph.nodes if n.name not in graph.backward]
    with pytest.raises(PlanError, match="order"):
        cut_stages(graph, (forward[-2], forward[9]))


def test_a_gradient_crosses_where_it_is_small() -> None:
    """The forward repeats a tensor after the cut, so its gradient is summed before the cut."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Linear(8, 4), nn.Linear(64, 2)

        def forward(self, x: Any) -> Any:
            return self.wide(self.narrow(x).relu().repeat(1, 16)).square().mean()

    graph = divided(make_case(Repeats(), torch.randn(12, 8))).part(2)
    cut = next(n.name for n in graph.nodes if n.op.startswith("aten.relu"))
    _, transfers = cut_stages(graph, (cut,))
    sizes = [(t.backward, graph.tensors[t.tensor].nbytes) for t in transfers]
    assert len(sizes) == 2 and sizes[0][1] == sizes[1][1], transfers


@pytest.mark.slow
def test_microbatches_without_stages_serve_memory() -> None:
    case = benchmark_case("vit", "tiny")
    cluster = two_machines(1)
    small = tuple(replace(d, memory_bytes=1_050_000) for d in cluster.devices)

    def planned(stages: bool) -> Plan:
        return hap.plan(
            case.model, case.batch, replace(cluster, devices=small), loss=case.loss,
            optimizer=case.optimizer, options=hap.PlanOptions(stages=stages, recompute="", accumulate=False),
        )  # fmt: skip

    with pytest.raises(InfeasibleError):
        planned(stages=False)
    plan = planned(stages=True)
    assert plan.stages is not None
    assert len(plan.stages.stages) == 1
    assert plan.microbatches > 1
    assert all(r.peak_bytes <= r.memory_bytes for r in plan.prediction.ranks)
    assert verdict(case, plan).ok
