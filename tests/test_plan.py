"""A plan file is complete and canonical, and a plan refuses uses that it is not made for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hap.capture.tracing import capture
from hap.cli.plan_screen import program_lines
from hap.errors import PlanError
from hap.ir.graph import Graph, Ref
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plan import FORMAT, Plan
from hap.ir.program import Program
from hap.plan_simulation import simulate_plan
from tests.random_plans import Case, benchmark_case, make_case, random_plan
from tests.small_plan import node, small_cluster, small_graph, small_plan

# --- the file ------------------------------------------------------------------------------


def plans() -> list[Plan]:
    return [small_plan(), random_plan(benchmark_case("vit", "tiny"), 3, 0)]


def test_a_saved_plan_comes_back_the_same(tmp_path: Path) -> None:
    for plan in plans():
        one, two = tmp_path / "one.json", tmp_path / "two.json"
        plan.save(one)
        loaded = Plan.load(one)
        loaded.save(two)
        assert one.read_bytes() == two.read_bytes()
        assert loaded.graph.digest == plan.graph.digest
        assert loaded.program.schedule_digest == plan.program.schedule_digest
        assert loaded.program.instructions == plan.program.instructions
        assert loaded.graph.nodes == plan.graph.nodes
        assert (loaded.shares, loaded.idle) == (plan.shares, plan.idle)
        assert (loaded.prediction, loaded.source) == (plan.prediction, plan.source)
        assert loaded.cluster == plan.cluster


def test_saving_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    small_plan((4, 2, 1, 1)).save(path)
    assert Plan.load(path).shares == {"batch": (4, 2, 1, 1)}
    assert os.listdir(tmp_path) == ["plan.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        small_plan((4, 2, 1, 1)).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def saved(path: Path) -> dict[str, Any]:
    small_plan().save(path)
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, part: float) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(PlanError, match="damaged or cut off") as error:
        Plan.load(path)
    assert error.value.where == str(path)
    assert error.value.hint


def test_no_file_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such plan file"):
        Plan.load(tmp_path / "none.json")
    for text in ("[]", "{}", '{"format": "1"}', "3"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(PlanError, match="no plan file"):
            Plan.load(tmp_path / "other.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="damaged"):
        Plan.load(tmp_path / "binary.json")


def change(data: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for step in path:
        data = data[int(step)] if isinstance(data, list) else data[step]
    if isinstance(data, list):
        data[int(last)] = value
    else:
        data[last] = value


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "newer format": ("format", FORMAT + 1, f"reads up to {FORMAT}"),
    "shares that miss a row": ("shares.batch", [3, 3, 1, 0], "sum to 8"),
    "shares of fewer ranks": ("shares.batch", [4, 4], "4 counts"),
    "no shares": ("shares", {}, "shares of axis 'batch' are None"),
    "a rank without a share": ("shares.batch", [4, 3, 1, 0], r"rank 3 \(old:1\) has no share"),
    "another graph": ("graph.nodes.0.1", "aten.neg.default", "digests"),
    "another device": ("cluster.devices.0.memory_bytes", 1, "digests"),
    "a missing part": ("program", {}, "damaged"),
    "an unknown placement": ("program.inputs.x", "Q7", "damaged.*Q7"),
    "no instruction": ("program.instructions.0", ["jump"], "damaged"),
    "a lost instruction": ("program.instructions.0", ["compute", "s0", ["S0"], ["P"], False], "damaged"),
    "outputs missing": ("program.outputs", ["R"], "damaged"),
    "a number for a name": ("shares.batch", 3, "damaged"),
    "states that are text": ("optimizer", {"name": "SGD", "states": "x"}, "states of the optimizer"),
    "states that are a list": ("optimizer", {"name": "SGD", "states": [1]}, "states of the optimizer"),
    "a path that is a number": ("source.path", 3, "path of the source"),
    "a tensor that is missing": ("recipe", {"batch": {"tuple": [{"tensor": "9"}]}}, "tensor '9'"),
    "a batch of no kind": ("recipe", {"batch": {"set": []}}, "kind 'set'"),
    "a batch that is a list": ("recipe", {"batch": [1]}, "the batch has"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_tampered_plan_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plan.json"
    data = saved(path)
    key, value, message = DAMAGE[damage]
    change(data, key, value)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert error.value.where == str(path)
    assert error.value.hint


def test_a_number_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = saved(path)
    change(data, "prediction.step_s", "infinite")
    path.write_text(json.dumps(data).replace('"infinite"', "1e999"))
    with pytest.raises(PlanError, match="1e999 is no finite number"):
        Plan.load(path)


@pytest.mark.parametrize("shares", [(-1, 7, 1, 1), (9, -3, 1, 1)])
def test_negative_shares_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(PlanError):
        small_plan(shares)


def test_a_rank_without_a_share_must_be_listed_as_idle() -> None:
    with pytest.raises(PlanError, match=r"rank 1 \(new:1\) has no share") as error:
        small_plan((4, 0, 2, 2))
    assert "cluster file" in error.value.hint
    plan = small_plan((4, 0, 2, 2), idle=(1,))
    assert [plan.part_of(rank) for rank in range(4)] == [4, 0, 2, 2]


# --- the model -----------------------------------------------------------------------------


def test_check_model_says_what_differs() -> None:
    plan = small_plan()
    plan.check_model(small_graph(8))
    with pytest.raises(PlanError, match="not the one that was planned") as error:
        plan.check_model(small_graph(16))
    assert "-input 0 -> x: float32[8, 4]" in str(error.value)
    assert "+input 0 -> x: float32[16, 4]" in str(error.value)
    graph = small_graph(8)
    other = [
        node("y1", "aten.mul.Tensor", Ref("x"), Ref("w1")) if n.name == "y1" else n
        for n in graph.nodes
    ]
    with pytest.raises(PlanError) as error:
        plan.check_model(replace(graph, nodes=tuple(other)))
    assert "+y1 = aten.mul.Tensor(x, w1)" in str(error.value)
    assert "y0" not in str(error.value)


def test_check_model_ignores_where_the_code_stands() -> None:
    plan = small_plan()
    moved = [replace(n, source="elsewhere.py:7", module="other") for n in plan.graph.nodes]
    plan.check_model(replace(plan.graph, nodes=tuple(moved)))


def test_check_model_of_a_changed_module() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 0)
    plan.check_model(capture(case.model, case.batch, case.loss))
    other = torch.nn.Sequential(*case.model, torch.nn.Tanh())
    with pytest.raises(PlanError) as error:
        plan.check_model(capture(other, case.batch, case.loss))
    assert "aten.tanh.default" in str(error.value)


# --- the batch -----------------------------------------------------------------------------


class Difference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.linear(x)
        return (out if y is None else out - y).square().mean()


ROWS = (2, 7)


def sharded(batch: Any) -> Plan:
    """Return a plan that splits the rows of a batch 2 : 7."""
    case = make_case(Difference(), batch)
    for seed in range(200):
        plan = random_plan(case, 2, seed)
        names = [i.tensor for i in plan.graph.role("input")]
        if all(str(plan.program.inputs[name]) == "S0" for name in names):
            axis = plan.program.axis(names[0], 0)[0]
            return replace(plan, shares={**plan.shares, axis: ROWS}, idle=())
    raise AssertionError("no such plan")


X, Y = torch.arange(54.0).view(9, 6), -torch.arange(54.0).view(9, 6)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (X, lambda part: [part]),
        ((X, Y), list),
        ({"x": X, "y": Y}, lambda part: [part["x"], part["y"]]),
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_a_rank_reads_its_rows_in_the_batchs_own_form(
    batch: Any, parts: Callable[[Any], list[Tensor]]
) -> None:
    plan = sharded(batch)
    start = 0
    for rank, rows in enumerate(ROWS):
        local = plan.local_batch(batch, rank)
        assert type(local) is type(batch)
        for part, whole in zip(parts(local), parts(batch), strict=True):
            assert torch.equal(part, whole[start : start + rows])
        assert plan.batch_rows(rank) == (start, start + rows)
        start += rows


def test_unsplit_inputs_stay_whole() -> None:
    case: Case = benchmark_case("mlp", "tiny")
    for seed in range(50):
        plan = random_plan(case, 2, seed)
        if not plan.program.inputs[plan.graph.role("input")[0].tensor].sharded:
            break
    assert all(torch.equal(plan.local_batch(case.batch, r), case.batch) for r in range(2))
    assert plan.batch_rows(1) == (0, 12)
    entries = sharded({"x": X, "y": Y}).local_batch({"x": X, "y": Y, "note": "text"}, 0)
    assert entries["note"] == "text"


@pytest.mark.parametrize(
    ("batch", "name"), [({"x": X[:4], "y": Y}, "x"), ({"x": X, "y": Y[:, :3]}, "y")]
)
def test_a_batch_of_another_size_is_refused(batch: Any, name: str) -> None:
    with pytest.raises(PlanError, match=f"batch entry '{name}' has shape") as error:
        sharded({"x": X, "y": Y}).local_batch(batch, 0)
    assert "global batch" in error.value.hint


# --- plan files of every format --------------------------------------------------------------

STORED = sorted((Path(__file__).parent / "plans").glob("*.json"))
"""Plans of formats 1 to 3, written by the versions that had them, of one model and cluster."""


def test_every_format_is_stored() -> None:
    assert {json.loads(path.read_text())["format"] for path in STORED} == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_plan_of_any_format_loads_is_shown_and_can_be_saved(path: Path, tmp_path: Path) -> None:
    plan = Plan.load(path)
    assert plan.optimizer == OptimizerKind(name="AdamW", states=2)
    assert (plan.world_size, plan.batch_size) == (4, 12)
    assert list(program_lines(plan)) == list(program_lines(Plan.load(path)))
    assert simulate_plan(plan).run.step_s > 0
    plan.save(tmp_path / "again.json")
    again = Plan.load(tmp_path / "again.json")
    assert (again.program, again.shares, again.cluster) == (plan.program, plan.shares, plan.cluster)
    assert "Infinity" not in (tmp_path / "again.json").read_text()


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_changed_plan_of_any_format_is_refused(path: Path, tmp_path: Path) -> None:
    data = json.loads(path.read_text())
    data["cluster"]["devices"][1]["launch_s"] *= 2
    (tmp_path / "changed.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="digests"):
        Plan.load(tmp_path / "changed.json")


def test_a_plan_of_a_catalogue_gpu_holds_no_infinity(tmp_path: Path) -> None:
    stored = Plan.load(STORED[2])
    assert stored.cluster.devices[0].operand_bytes_per_s == float("inf")
    data = stored.to_json()
    json.dumps(data, allow_nan=False)
    data["cluster"]["devices"][0]["operand_bytes_per_s"] = float("inf")
    (tmp_path / "infinite.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="Infinity is no finite number"):
        Plan.load(tmp_path / "infinite.json")


def test_an_old_plan_without_a_number_of_states_says_so(tmp_path: Path) -> None:
    data = json.loads(STORED[0].read_text()) | {"optimizer": "Adam"}
    (tmp_path / "old.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="'Adam', has no number of states"):
        Plan.load(tmp_path / "old.json")


def test_fields_with_their_defaults_are_left_out() -> None:
    data = small_plan().to_json()
    assert not {"idle", "left_out", "recipe", "inside"} & data.keys()
    assert data["optimizer"] == {"name": "Adam", "states": 2}


# --- parts of a plan -----------------------------------------------------------------------


def test_programs_and_graphs_survive_json() -> None:
    for plan in plans():
        data = json.loads(json.dumps([plan.program.to_json(), plan.graph.to_json()]))
        assert Program.from_json(data[0]) == plan.program
        assert Graph.from_json(data[1]).digest == plan.graph.digest


def test_infinities_and_nested_constants_survive_json() -> None:
    graph = small_graph(8)
    value = (float("inf"), float("-inf"), -0.0, 1e-300, True, None, "text", (1, (2,)))
    odd = [replace(n, kwargs=(("value", value),)) if n.name == "y0" else n for n in graph.nodes]
    text = json.dumps(replace(graph, nodes=tuple(odd)).to_json(), allow_nan=False)
    assert Graph.from_json(json.loads(text)).by_name["y0"].kwargs == (("value", value),)


def test_the_shares_of_a_plan_cut_every_tensor_completely() -> None:
    plan = random_plan(benchmark_case("vit", "tiny"), 3, 1)
    for i in plan.graph.role("parameter"):
        shape = plan.graph.tensors[i.tensor].shape
        placement = plan.program.inputs[i.tensor]
        local = [plan.local_shape(i.tensor, rank) for rank in range(3)]
        if placement.sharded:
            assert sum(s[placement.dim] for s in local) == shape[placement.dim]
        else:
            assert local == [shape] * 3


def test_small_cluster_is_the_world() -> None:
    assert small_plan().world_size == small_cluster().world_size == 4
