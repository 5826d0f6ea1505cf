"""The alternation: never worse than its start, within memory, with clear errors where it fails."""

from __future__ import annotations

import io
from functools import cache, partial

import pytest
import torch
from rich.console import Console
from torch import nn

from hap import api
from hap.cli.plan_screen import plan_screen
from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, InputError
from hap.ir.placement import R, S
from hap.ir.plan import Plan
from hap.ir.program import Compute
from hap.plan_simulation import simulate_plan
from hap.synthesizer.memory_price import lowest_fitting
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.synthesize import Synthesizer
from tests.random_plans import make_case, verdict
from tests.test_two_axes import machines


def device(rank: int, *, speed: float = 1e12, memory: int = 1 << 30) -> Device:
    return Device(
        name=f"m:{rank}", kind="gpu", node="m", memory_bytes=memory,
        flops_per_s={"float32": speed}, memory_bytes_per_s=speed / 10, launch_s=1e-6,
    )  # fmt: skip


def cluster(*devices: Device, bandwidth: float = 1e10) -> Cluster:
    link = Link(bandwidth, 1e-6)
    return Cluster("test", devices, {"m": link}, link)


class Classifier(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.up(x).relu()), y)


def planned_anew(rows: int, width: int, classes: int, on: Cluster, **options: bool) -> Plan:
    """Return a plan of a classifier that is captured for it."""
    with torch.device("meta"):
        model = Classifier(width, classes)
        batch = (torch.empty(rows, width), torch.empty(rows, dtype=torch.int64))
    return api.plan(model, batch, on, options=PlanOptions(**options))


@cache
def captured(rows: int, width: int, classes: int) -> Plan:
    """Return a plan that has the graph of a classifier."""
    return planned_anew(rows, width, classes, cluster(device(0)))


def planned(rows: int, width: int, classes: int, on: Cluster, **options: bool) -> Plan:
    """Return a plan of a classifier that is captured once per size; it must fit the memory."""
    return api.plan_again(captured(rows, width, classes), on, PlanOptions(**options))


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [1e8, 1e10, 1e13])
@pytest.mark.parametrize(
    "sizes, speeds",
    [((64, 256, 31), (4e12, 1e12, 1e12)), ((4096, 64, 8), (1e12, 1e12)),
     ((8, 512, 4096), (1e13, 1e11, 3e12, 3e12))],
)  # fmt: skip
def test_never_slower_than_a_baseline(
    sizes: tuple[int, int, int], speeds: tuple[float, ...], bandwidth: float
) -> None:
    on = cluster(*(device(r, speed=s) for r, s in enumerate(speeds)), bandwidth=bandwidth)
    plan = planned(*sizes, on)
    beside = [a for a in plan.prediction.alternatives if a.fits and a.name.startswith(("d", "Z"))]
    assert beside
    assert all(plan.prediction.step_s <= a.step_s * (1 + 1e-9) for a in beside)


@pytest.mark.slow
def test_much_compute_on_fast_links_is_shared_in_proportion_to_speed() -> None:
    on = cluster(device(0, speed=3e12), device(1, speed=1e12), bandwidth=1e13)
    plan = planned(4096, 256, 10, on)
    assert plan.shares["batch"] == pytest.approx((3072, 1024), rel=0.05)
    assert plan.prediction.ranks[0].work == pytest.approx(0.75, abs=0.02)


@pytest.mark.slow
def test_little_compute_on_a_slow_link_is_done_by_one_device_or_by_each() -> None:
    slow = cluster(device(0), device(1), bandwidth=1e6)
    assert planned(8, 64, 10, slow).world_size == 1
    plan = planned(8, 64, 10, slow, all_devices=True)
    assert plan.world_size == 2
    assert not plan.program.collectives
    assert plan.prediction.communicate_s == 0


@pytest.mark.slow
def test_gathering_the_factors_beats_reducing_their_product_where_it_is_smaller() -> None:
    """Sufficient-factor broadcasting: few rows, a wide layer; the crossover is in the rows."""
    few = planned(8, 2048, 10, cluster(device(0, speed=1e11), device(1, speed=1e11)))
    many = planned(8192, 64, 10, cluster(device(0, speed=1e11), device(1, speed=1e11)))

    def gradient_bytes(plan: Plan) -> int:
        ends = set(plan.graph.gradients.values())
        moved = [c for c in plan.program.collectives if c.tensor in ends]
        return sum(plan.graph.tensors[c.tensor].nbytes for c in moved)

    assert gradient_bytes(few) < 2048 * 2048 * 4  # the wide layer's gradient is not communicated
    assert gradient_bytes(many) >= 64 * 64 * 4


class Reader(nn.Module):
    """Looks words up in a table that no product reads."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.norm(self.table(tokens))), y)


@pytest.mark.parametrize("words, columns", [(997, True), (7, False)])
def test_a_large_table_is_looked_up_in_columns_and_its_gradient_stays(
    words: int, columns: bool
) -> None:
    """Two all-to-alls of the rows replace an all-reduce of the table, if the table is larger."""
    torch.manual_seed(0)
    batch = torch.randint(words, (960,)), torch.randint(8, (960,))
    case = make_case(Reader(words, 64), batch)
    on = cluster(*(device(r, speed=1e9) for r in range(4)), bandwidth=1e8)
    plan = api.plan(case.model, batch, on)
    moved = [c.kind for c in plan.program.collectives if plan.graph.tensors[c.tensor].nbytes > 8192]
    assert moved == ["all_to_all"] * 2 * columns
    used = {(s.ins, s.outs) for s in plan.program.instructions
            if isinstance(s, Compute) and "embedding.default" in plan.graph.by_name[s.node].op}  # fmt: skip
    assert (((S(1), R), (S(1),)) in used) == columns
    found = verdict(case, plan)
    assert found.ok, found.first_bad


@pytest.mark.slow
def test_scarce_memory_changes_the_program_and_fits() -> None:
    free = planned(2048, 512, 10, cluster(*map(device, range(4))))
    peak = max(r.peak_bytes for r in free.prediction.ranks)
    tight = cluster(*(device(r, memory=int(peak * 0.8)) for r in range(4)))
    plan = planned(2048, 512, 10, tight)
    assert all(r.peak_bytes <= r.memory_bytes for r in plan.prediction.ranks)
    assert plan.prediction.step_s >= free.prediction.step_s


@pytest.mark.slow
def test_too_little_memory_names_the_devices_the_bytes_and_a_batch_that_fits() -> None:
    on = cluster(device(0, memory=3 << 20), device(1, memory=3 << 20))
    with pytest.raises(InfeasibleError) as caught:
        planned_anew(1 << 14, 256, 10, on)
    assert "m:0 (gpu) lacks" in str(caught.value)
    assert "bytes)" in str(caught.value)
    assert "reduce the global batch to about" in str(caught.value)
    rows = int(str(caught.value).split("global batch to about ")[1].split()[0])
    assert "at its fullest m:0 would hold " in str(caught.value)
    assert "saved activations" in str(caught.value)
    assert "fused" not in str(caught.value)
    assert 0 < rows < 1 << 14
    planned_anew(rows, 256, 10, on)  # it fits


def test_a_fused_optimizer_is_advised_where_its_step_alone_lacks_memory() -> None:
    model, batch = Classifier(512, 10), (torch.randn(4, 512), torch.zeros(4, dtype=torch.int64))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    on = cluster(device(0, memory=int(4.5 * weights)))  # with gradients and two states: 4
    with pytest.raises(InfeasibleError, match=r"AdamW\(params, fused=True\)"):
        api.plan(model, batch, on)
    plan = api.plan(model, batch, on, optimizer=partial(torch.optim.AdamW, fused=True))
    assert plan.prediction.ranks[0].peak_bytes < 4.5 * weights
    assert str(plan.optimizer) == "AdamW (2 states per parameter, fused)"
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.graph.fused_update
    with pytest.raises(InfeasibleError) as caught:
        api.plan(model, batch, cluster(device(0, memory=3 * weights)))
    assert "fused" not in str(caught.value)


def test_a_fused_optimizer_is_not_advised_where_activations_lack_memory() -> None:
    """They lack less than the optimizer's workspace has, which is held after them."""
    model = Classifier(512, 10)
    batch = (torch.randn(4096, 512), torch.zeros(4096, dtype=torch.int64))
    free = api.plan(model, batch, cluster(device(0)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    room = free.prediction.ranks[0].peak_bytes - weights // 2
    assert room > 5 * weights
    options = PlanOptions(recompute="", accumulate=False)
    with pytest.raises(InfeasibleError) as caught:
        api.plan(model, batch, cluster(device(0, memory=room)), options=options)
    assert "fused" not in str(caught.value)


def test_a_batch_smaller_than_the_cluster_needs_consent() -> None:
    on = cluster(device(0), device(1), device(2))
    with pytest.raises(InputError, match="2 rows, fewer than the 3 devices"):
        planned_anew(2, 64, 10, on)
    assert planned(2, 64, 10, on, allow_idle=True, all_devices=True).world_size == 3


@pytest.mark.slow
@pytest.mark.parametrize("crawl", [1e8, 1e6])
def test_devices_that_only_slow_the_step_down_are_left_out_and_named(crawl: float) -> None:
    fast = (device(0), device(1))
    on = cluster(*fast, device(2, speed=crawl), device(3, speed=crawl), bandwidth=1e12)
    plan = planned(4096, 256, 10, on)
    assert plan.left_out == ("m:2", "m:3")
    assert plan.cluster.devices == fast
    assert not plan.idle
    without = planned(4096, 256, 10, cluster(*fast, bandwidth=1e12))
    assert plan.prediction.step_s <= without.prediction.step_s * (1 + 1e-9)
    everyone = next(a for a in plan.prediction.alternatives if a.name.startswith("all devices"))
    assert everyone.step_s > plan.prediction.step_s
    assert "unused: m:* (2x)" in screen(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_all_devices_are_on_one_axis_where_two_are_searched() -> None:
    plan = planned(4096, 256, 10, machines((1.0, 1.0), (1e-4, 1e-4)))
    assert plan.left_out == ("m1:0", "m1:1")
    names = [a.name for a in plan.prediction.alternatives]
    assert "all devices, one mesh axis" in names and "all devices" not in names
    assert all(" on the devices in use" in bound.covers for bound in plan.prediction.bounds)


@pytest.mark.slow
def test_the_seconds_by_use_are_those_of_the_simulation() -> None:
    """Here the busiest rank waits, and the ranks overlap differently."""
    on = cluster(device(0), device(1, speed=5e11), device(2, speed=3e11))
    plan = planned(512, 64, 10, on, all_devices=True)
    told, used = plan.prediction, simulate_plan(plan).usage
    busiest = int(used.compute_s.argmax())
    assert used.overlapped_s[busiest] > 0 and told.ranks[busiest].wait_s > 0
    assert told.hidden_s == pytest.approx(used.overlapped_s[busiest])
    for rank, r in enumerate(told.ranks):
        assert r.compute_s == pytest.approx(used.compute_s[rank])
        assert r.wait_s == pytest.approx(used.waiting_s[rank] + used.idle_s[rank])
        beside_s = told.communicate_s - used.overlapped_s[rank]
        assert r.compute_s + r.wait_s + beside_s == pytest.approx(told.step_s)


@pytest.mark.slow
def test_one_device_moves_nothing() -> None:
    plan = planned(64, 64, 10, cluster(device(0)))
    assert not plan.program.collectives and not plan.prediction.collectives
    assert {a.communicate_bytes for a in plan.prediction.alternatives} == {0}


@pytest.mark.slow
def test_all_devices_take_part_where_that_is_asked_for() -> None:
    on = cluster(device(0), device(1), device(2, speed=1e8), bandwidth=1e12)
    plan = planned(4096, 256, 10, on, all_devices=True)
    assert plan.world_size == 3 and not plan.left_out
    assert plan.shares["batch"][2] < 4096 // 100


@pytest.mark.slow
def test_a_slow_device_that_helps_stays() -> None:
    on = cluster(device(0), device(1, speed=2e11), bandwidth=1e13)
    assert not planned(4096, 256, 10, on).left_out


@pytest.mark.slow
def test_a_device_too_small_for_any_part_is_left_out() -> None:
    on = cluster(device(0), device(1), device(2, memory=1 << 12), bandwidth=1e12)
    assert planned(4096, 256, 10, on).left_out == ("m:2",)


def screen(plan: Plan) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(plan_screen(plan))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("first", [None, *range(-12, 7)])
def test_the_lowest_price_that_fits_is_found_from_any_start(first: int | None) -> None:
    for least in range(-9, 7):  # nothing fits above 4
        asked: list[int] = []

        def fits(price: int, least: int = least, asked: list[int] = asked) -> bool:
            asked.append(price)
            return price >= least

        assert lowest_fitting(fits, -10, 4, first) == (least if least <= 4 else None)
        assert len(asked) == len(set(asked)) and len(asked) <= 9
        assert all(-10 < price <= 4 for price in asked)


def test_memory_has_no_price_where_a_program_without_one_is_too_slow() -> None:
    space = build_space(captured(256, 64, 8).graph)
    ample = cluster(*(device(r) for r in range(4)))
    peak = int(Synthesizer(space, ample, 2).first.serial.peak_bytes.max())
    tight = cluster(*(device(r, memory=peak * 3 // 4) for r in range(4)))
    limits = {
        "no plan": None,
        "slower": (0.0, 1.0),
        "lacks memory": (1.0, 0.0),
        "faster": (0.0, 0.0),
    }
    for name, beat in limits.items():
        synthesizer = Synthesizer(space, tight, 2)
        synthesizer.search(next(synthesizer.starts()), beat)
        assert (synthesizer.exponent is None) == (name == "faster")


def test_options_are_checked_before_the_model_is_made() -> None:
    def never() -> nn.Module:
        raise AssertionError("made")

    with pytest.raises(InputError, match="no device 'm:9'"):
        api.plan(never, torch.ones(2), cluster(device(0)), options=PlanOptions(keep=("m:9",)))
    with pytest.raises(InputError, match="'weight' is no pin"):
        PlanOptions(pins=("weight",))
