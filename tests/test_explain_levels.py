"""Alternatives to choices of plans over two mesh axes and of plans with pipeline stages."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import hap
from hap import api
from hap.cli.commands import main
from hap.cli.explain_screen import alternatives, axes_of
from hap.errors import InputError
from hap.explanation import mesh_choices, stage_choices
from hap.explanation.forced_choices import explain_left_out, the_plan
from hap.explanation.mesh_choices import BETWEEN_MACHINES, INSIDE_MACHINES
from hap.explanation.stage_choices import OVER_TIME
from hap.ir.plan import Plan
from hap.ir.prediction import Alternative
from hap.synthesizer.pins import options_of, pinned
from hap.synthesizer.search.engines import eliminate_or_bound
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.two_axes import InsideSynthesizer, best_on_mesh
from tests.random_plans import benchmark_case
from tests.random_stages import random_staged_plan
from tests.test_stages import slow_pair
from tests.test_synthesize import Classifier, cluster, device
from tests.test_two_axes import machines


@cache
def on_mesh() -> Plan:
    torch.manual_seed(0)
    model, batch = Classifier(64, 32), (torch.randn(48, 64), torch.randint(32, (48,)))
    options = hap.PlanOptions(mesh=True, all_devices=True)
    return api.plan(model, batch, machines((1.0, 2.0), (3.0, 1.0)), options=options)


@cache
def in_stages() -> Plan:
    return slow_pair(benchmark_case("vit", "tiny"))


# --- two mesh axes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plans_own_placements_give_the_plans_step() -> None:
    """Force what the plan has, at each level: the search then finds the plan again."""
    plan = on_mesh()
    between = mesh_choices._between(plan)
    space, states = build_space(plan.graph), plan.optimizer.states
    inner = build_space(plan.whole[0])
    for i in plan.graph.role("parameter"):
        pins = pinned(space, {i.tensor: plan.program.inputs[i.tensor]})
        two = best_on_mesh(space, plan.cluster, states, eliminate_or_bound, allowed=pins)
        assert two is not None
        assert two.pair.timeline.step_s == plan.prediction.step_s
    for i in inner.graph.role("parameter"):
        assert plan.inside is not None
        pins_inside = {i.tensor: plan.inside.program.inputs[i.tensor]}
        search = InsideSynthesizer(between, plan.cluster, states, pins=pins_inside)
        pair = search.search(next(search.starts()))
        assert pair.timeline.step_s == plan.prediction.step_s


def test_a_tensor_on_a_mesh_has_its_placements_of_both_levels() -> None:
    plan = on_mesh()
    i = plan.graph.role("parameter")[0]
    rows = alternatives(plan, i.target)
    for level, graph in ((BETWEEN_MACHINES, plan.graph), (INSIDE_MACHINES, plan.whole[0])):
        own = [row for row in rows if row.level == level]
        name = next(j.tensor for j in graph.inputs if j.target == i.target)
        assert {row.choice for row in own} == {*map(str, options_of(build_space(graph), name))}
        (mine,) = (row for row in own if row.chosen)
        for row in own:
            assert row.step_s >= mine.step_s * (1 - 1e-9)
            changed = [c for c in row.changes if c.startswith(f"{i.target} ")]
            assert row.chosen or changed == [f"{i.target} {mine.choice} -> {row.choice}"]


@pytest.mark.slow
def test_axes_and_devices_of_a_mesh_have_alternatives() -> None:
    plan = on_mesh()
    assert plan.inside is not None
    (axis, *_) = plan.inside.shares
    rows = alternatives(plan, axis)
    assert [row.level for row in rows if row.chosen] == [INSIDE_MACHINES]
    mine = plan.inside.shares[axis]
    totals = [sum(mine[r] for r in ranks) for ranks in plan.groups]
    for row in rows:
        shares = [int(n) for n in row.choice.rpartition(": ")[2].split()]
        assert [sum(shares[r] for r in ranks) for ranks in plan.groups] == totals
    found = alternatives(plan, "m0:0")
    assert {row.choice for row in found} == {
        "with m0:0, two mesh axes", "without m0:0", "without m0",
    }  # fmt: skip
    assert {row.changes for row in found if not row.chosen} == {None}, "placements on one axis"
    assert {row.choice for row in alternatives(plan, "m1")} == {"with m1", "without m1"}


def test_shares_between_machines_have_alternatives() -> None:
    torch.manual_seed(0)
    options = hap.PlanOptions(mesh=True, all_devices=True, pins=())
    unlike = machines((1.0, 1.0), (3.0, 3.0), between=1e10)
    plan = api.plan(torch.nn.Linear(512, 8), torch.randn(4096, 512), unlike,
                    loss=lambda y, batch: y.square().mean(), options=options)  # fmt: skip
    (axis, *_) = plan.shares
    rows = [row for row in alternatives(plan, axis) if row.level == BETWEEN_MACHINES]
    assert len(rows) > 1
    (mine,) = (row for row in rows if row.chosen)
    even = next(row for row in rows if row.choice.startswith("even"))
    assert even.step_s > mine.step_s


# --- stages ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stage_searched_anew_is_the_stage_of_the_plan() -> None:
    plan = in_stages()
    variant = stage_choices._Variant.of(plan)
    assert variant.measured() == (plan.prediction.step_s, 0.0)
    for number in range(len(variant.stages)):
        again = variant.searched(number, {})
        assert again is not None
        assert again.measured()[0] == plan.prediction.step_s
    same = variant.in_microbatches(plan.microbatches)
    assert same is not None
    assert same.measured()[0] == plan.prediction.step_s


def test_other_microbatches_are_rows() -> None:
    plan = in_stages()
    rows = [row for row in alternatives(plan, "batch") if row.level == OVER_TIME]
    mine = next(row for row in rows if row.chosen)
    assert mine.choice == f"{plan.microbatches} microbatches"
    assert len(rows) == 3
    assert all(row.chosen or not row.step_s or row.step_s > mine.step_s for row in rows)


@pytest.mark.slow
def test_tensors_of_stages_have_the_placements_of_their_group() -> None:
    plan = random_staged_plan(benchmark_case("vit", "tiny"), (2, 1), 3)
    owner = plan.owners
    for i in plan.graph.role("parameter")[:3]:
        rows = alternatives(plan, i.target)
        number = owner[i.tensor]
        assert {row.level for row in rows} == {f"stage {number}"}
        assert [row.chosen for row in rows].count(True) == 1
        single = len(plan.groups[number]) == 1
        assert (len(rows) == 1) == single
        for row in rows:
            changed = [c for c in row.changes if c.startswith(f"{i.target} ")]
            assert row.chosen or not row.step_s or changed[0].endswith(f"-> {row.choice}")
    for axis in axes_of(plan):
        assert any(row.chosen for row in alternatives(plan, axis))


def test_a_device_of_a_stage_may_be_left_out() -> None:
    rows = alternatives(in_stages(), in_stages().cluster.devices[0].name)
    assert [row.step_s > 0 for row in rows] == [True, True, False]  # its stage has no other device
    assert "no stages" in rows[1].choice
    assert rows[1].changes is None, "parameters of stages have other placements"
    assert rows[2].unknown == "its stage has no other device"


# --- devices that are left out -----------------------------------------------------------------------

SLOW = cluster(device(0, speed=1e12), device(1, speed=1e9), bandwidth=1e8)


@cache
def without_slow() -> Plan:
    return api.plan(Classifier(64, 32), (torch.randn(16, 64), torch.randint(32, (16,))), SLOW)


@pytest.mark.slow
def test_a_device_that_is_left_out_has_the_step_with_it(tmp_path: Path) -> None:
    plan = without_slow()
    assert plan.left_out == ("m:1",)
    assert not plan.program.collectives and the_plan(plan, "").collectives == 0
    known = alternatives(plan, "m:1")
    assert [row.chosen for row in known] == [True, False]
    searched = alternatives(plan, "m:1", SLOW)
    assert searched[1].choice == "with m:1"
    assert searched[1].step_s > searched[0].step_s == plan.prediction.step_s
    other = replace(plan, prediction=replace(plan.prediction, alternatives=()))
    with pytest.raises(InputError, match="does not say what that gains"):
        alternatives(other, "m:1")
    with pytest.raises(InputError, match="no device m:7"):
        explain_left_out(plan, "m:7", SLOW)


def test_all_devices_lack_the_memory_that_their_row_says() -> None:
    row = Alternative(name="all devices, one mesh axis", step_s=1.0, fits=False, lacking_bytes=7)
    plan = without_slow()
    plan = replace(plan, prediction=replace(plan.prediction, alternatives=(row,)))
    (known,) = (row for row in alternatives(plan, "m:1") if not row.chosen)
    assert known.choice == "with all devices, one mesh axis"
    assert known.lacking_bytes == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m", "gpu"])
def test_a_machine_of_which_the_plan_uses_a_part(name: str) -> None:
    """Only the search with the other devices of the name, from the cluster file, tells their gain."""
    plan = without_slow()
    choices = {row.choice: row.chosen for row in alternatives(plan, name, SLOW)}
    assert choices == {f"with the 1 of {name} in use": True, f"with all of {name}": False}


def test_levels_are_on_the_screen_and_in_json(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    on_mesh().save(file)
    run = CliRunner().invoke
    shown = run(main, ["explain", file, "up.weight"])
    assert shown.exit_code == 0, shown.output
    assert BETWEEN_MACHINES in shown.output and INSIDE_MACHINES in shown.output
    rows = json.loads(run(main, ["explain", file, "up.weight", "--json"]).stdout)
    assert {row["level"] for row in rows} == {BETWEEN_MACHINES, INSIDE_MACHINES}
