"""Alternatives to a plan's choices, pins and devices that must stay."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import hap
from hap import api
from hap.cli.commands import main
from hap.errors import InputError, NoProgramError, SearchLimitError
from hap.explanation.forced_choices import explain_axis, explain_devices, explain_tensor, impossible
from hap.ir.placement import R, S
from hap.ir.plan import Plan
from hap.synthesizer.pins import options_of, tensor_named
from hap.synthesizer.search.program_space import build_space
from tests.random_plans import make_case, verdict
from tests.test_synthesize import Classifier, captured, cluster, device, planned

ON = cluster(device(0, speed=2e11), device(1, speed=1e11), device(2, speed=1e11), bandwidth=1e10)


@cache
def made(*pins: str, keep: tuple[str, ...] = (), all_devices: bool = True) -> Plan:
    """Return a plan of a classifier that is captured once."""
    options = hap.PlanOptions(pins=pins, keep=keep, all_devices=all_devices)
    return api.plan_again(captured(48, 64, 32), ON, options)


@pytest.mark.slow
def test_every_placement_of_every_parameter_is_a_row_and_the_plan_is_the_best() -> None:
    plan = made()
    space = build_space(plan.graph)
    for i in plan.graph.role("parameter"):
        rows = explain_tensor(plan, i.tensor)
        assert {row.choice for row in rows} == set(map(str, options_of(space, i.tensor)))
        (mine,) = (row for row in rows if row.chosen)
        assert mine.choice == str(plan.program.inputs[i.tensor])
        for row in rows:
            assert row.chosen or row.step_s >= mine.step_s * (1 - 1e-9)
            changed = [c for c in row.changes if c.startswith(f"{i.target} ")]
            assert row.chosen or changed == [f"{i.target} {mine.choice} -> {row.choice}"]


@pytest.mark.slow
@pytest.mark.parametrize("pin, placement", [("up.weight=S0", S(0)), ("up.weight=R", R)])
def test_a_pinned_plan_has_the_placement_and_computes_the_same(pin: str, placement: object) -> None:
    plan = made(pin)
    assert plan.program.inputs[tensor_named(plan.graph, "up.weight")] == placement
    assert plan.prediction.step_s >= made().prediction.step_s * (1 - 1e-3)
    torch.manual_seed(0)
    batch = torch.randn(48, 64), torch.randint(32, (48,))
    case = make_case(Classifier(64, 32), batch, graph=plan.graph)
    assert verdict(case, plan).ok


@pytest.mark.slow
def test_a_pin_holds_where_devices_may_be_left_out() -> None:
    plan = made("up.weight=S0", all_devices=False)
    assert plan.program.inputs[tensor_named(plan.graph, "up.weight")] == S(0)


@pytest.mark.slow
def test_axes_and_devices_have_alternatives() -> None:
    plan = made()
    for axis in plan.shares:
        rows = explain_axis(plan, axis)
        assert [row.chosen for row in rows].count(True) == 1
    without = explain_devices(plan, "m:0", [0])
    assert [row.choice for row in without] == ["with m:0", "without m:0"]
    assert without[0].step_s < without[1].step_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "speeds, bandwidth, rows",
    [((2e11, 1e11, 1e11), 1e11, 48), ((4e12, 4e12, 1e12), 3e9, 480)],
    ids=["from other starts", "by the plan's row"],
)
def test_a_device_that_is_missing_costs_no_more_than_by_the_plans_own_row(
    speeds: tuple[float, ...], bandwidth: float, rows: int
) -> None:
    on = cluster(*(device(k, speed=speed) for k, speed in enumerate(speeds)), bandwidth=bandwidth)
    plan = planned(rows, 64, 32, on, all_devices=True)
    own = next(a for a in plan.prediction.alternatives if a.note == "without m:2")
    missing = next(row for row in explain_devices(plan, "m:2", [2]) if not row.chosen)
    assert missing.step_s <= own.step_s


@pytest.mark.slow
def test_what_is_not_known_is_not_said_to_be_impossible() -> None:
    assert impossible("R").unknown == "no program has it"
    assert impossible("R", NoProgramError("there is none")).unknown == "no program has it"
    cut = impossible("R", SearchLimitError("the search found no program before its limit"))
    assert cut.unknown == "the search found no program before its limit"


def test_a_device_that_must_stay_is_not_left_out() -> None:
    slow = cluster(device(0, speed=1e12), device(1, speed=1e9), bandwidth=1e8)
    first = captured(16, 64, 32)
    free = api.plan_again(first, slow, hap.PlanOptions())
    kept = api.plan_again(first, slow, hap.PlanOptions(keep=("m:1",)))
    assert free.left_out == ("m:1",)
    assert kept.left_out == () and "m:1" in [d.name for d in kept.cluster.devices]


@pytest.mark.parametrize(
    "pin, words",
    [
        ("up.weight", "is no pin"),
        ("up.weigth=S0", "no tensor or operator 'up.weigth'"),
        ("up.weight=S7", "cannot be placed as S7"),
        ("up.weight=X", "write R, P, L or S"),
    ],
)
def test_pins_that_cannot_be(pin: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(pin)


def test_pins_that_no_program_has() -> None:
    with pytest.raises(InputError, match="no program has --pin") as raised:
        made("addmm_1=S1", "cross_entropy=S0")
    assert raised.value.hint == "leave out one of them"


def test_devices_that_are_not_there() -> None:
    with pytest.raises(InputError, match="no device 'm:9'"):
        made(keep=("m:9",), all_devices=False)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    made().save(file)
    run = CliRunner().invoke
    names = run(main, ["explain", file])
    assert names.exit_code == 0 and "up.weight" in names.output
    rows = json.loads(run(main, ["explain", file, "up.weight", "--json"]).stdout)
    assert [row["chosen"] for row in rows].count(True) == 1
    screen = run(main, ["explain", file, "up.weight"])
    assert screen.exit_code == 0 and "the plan" in screen.output
    wrong = run(main, ["explain", file, "nothing"])
    assert wrong.exit_code == 2 and "no tensor or operator 'nothing'" in wrong.output
