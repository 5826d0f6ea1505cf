"""Batch entries that are the same in every batch: their numbers decide shapes of the program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import hap
from hap.capture import torch_private
from hap.capture.fixed_entries import NoData, fix_entries
from hap.capture.tracing import capture
from hap.cli.commands import main
from hap.errors import HapError, ModelError, PlanError
from hap.ir.batch import Fixed, flatten, form_of, leaves, other_entries, rebuild
from hap.ir.plan import Plan
from tests.random_plans import make_case, random_plan, verdict

SIZES = torch.tensor([[1, 2], [1, 4], [2, 3]])


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), forward

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.run(self, x, sizes)


def lengths(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    """12 rows, cut into parts of 2, 4, 3 and 3 rows."""
    per_part = torch.repeat_interleave(sizes[:, 1], sizes[:, 0])
    parts = torch.split(net.layer(x), per_part.tolist())
    return torch.stack([part.mean(0) for part in parts]).square().mean()


def positions(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    at = torch.cat([torch.arange(n).repeat(times) for times, n in sizes.tolist()])
    return (net.layer(x) * at.unsqueeze(1)).square().mean()


def unique(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    kinds = torch.unique_consecutive(sizes[:, 0])
    return (net.layer(x)[kinds] * kinds.unsqueeze(1)).square().mean() + x.sum() * 0


def index_by_mask(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    index = torch.arange(12).reshape(3, 4)
    index = index[index % 3 != sizes[0, 0]]
    return net.layer(x)[index].square().mean()


def where(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    (rows,) = torch.where(sizes[:, 1] > 2)
    rows += 1
    return net.layer(x)[rows].square().mean() * len(rows)


def inside_of_a_checkpoint(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    def body(x: Tensor, sizes: Tensor) -> Tensor:
        return net.layer(x)[sizes[sizes > 1]]

    out = torch.utils.checkpoint.checkpoint(body, x, sizes, use_reentrant=False)
    return out.square().mean()  # type: ignore[no-any-return]


def branch(net: Net, x: Tensor, sizes: Tensor) -> Tensor:
    if sizes.max() > 3:
        x = x * 2
    return net.layer(x).square().mean() / sizes.sum().item()


@pytest.mark.parametrize(
    "forward",
    [lengths, positions, unique, index_by_mask, where, inside_of_a_checkpoint, branch],
    ids=lambda f: f.__name__,
)
def test_shapes_may_depend_on_fixed_entries(
    forward: Callable[[Net, Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, batch = Net(forward), (torch.randn(12, 4), SIZES)
    case = make_case(model, batch, graph=capture(model, fix_entries(batch, ["1"])))
    for world in (2, 3):
        seen = verdict(case, random_plan(case, world, world))
        assert seen.ok, seen.first_bad


def test_without_fixed_the_error_names_it() -> None:
    with pytest.raises(ModelError, match="can't be captured") as error:
        capture(Net(lengths), (torch.randn(12, 4), SIZES))
    assert "may be named in `fixed`" in (error.value.hint or "")


def test_a_fixed_entry_is_no_tensor_of_the_batch() -> None:
    batch = {"x": torch.ones(2), "at": {"sizes": SIZES}}
    fixed = fix_entries(batch, ["at.sizes"])
    assert list(flatten(fixed)) == ["x"]
    assert fixed["at"]["sizes"] == Fixed("int64", SIZES.tolist())
    form = json.loads(json.dumps(form_of(fixed)))
    assert leaves(form)["at.sizes"] == fixed["at"]["sizes"]
    assert rebuild(form, {"x": batch["x"]}) == fixed
    again = fix_entries(fixed, ["at.sizes"])
    assert again == fixed
    assert other_entries(form, (), batch) == []
    (other,) = other_entries(form, (), {"x": batch["x"], "at": {"sizes": SIZES + 1}})
    assert other.startswith("at.sizes ([[2, 3], ") and "planned: [[1, 2], " in other


@pytest.mark.parametrize(
    ("names", "batch", "said"),
    [
        (["size"], {"sizes": SIZES}, "names 'size', which is no tensor of the batch"),
        (["x"], {"x": torch.ones(2), "sizes": SIZES}, "which is of float32"),
        (["x"], {"x": torch.ones(1 << 17, dtype=torch.int8)}, "which has 131072 elements"),
    ],
)
def test_what_cannot_be_fixed_is_refused(names: list[str], batch: Any, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        fix_entries(batch, names)


def test_an_entry_without_data_cannot_be_fixed() -> None:
    with torch_private.fake_mode():
        batch = {"sizes": torch.empty(3, 2, dtype=torch.int64)}
    with pytest.raises(NoData, match="has no data"):
        fix_entries(batch, ["sizes"])
    with torch_private.fake_mode(), torch_private.known_numbers():
        batch = {"sizes": torch.tensor([[1, 2]] * 3).repeat(2, 1)}
    assert fix_entries(batch, ["sizes"])["sizes"] == Fixed("int64", [[1, 2]] * 6)


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x, sizes):
        return torch.stack([p.mean(0) for p in torch.split(self.layer(x), sizes.tolist())]).square().mean()

def model(): return Net()
def batch(): return {"x": torch.randn(64, 64), "sizes": SIZES}
fixed = ["sizes"]
"""
CLUSTER = "benchmarks/clusters/demo4.yaml"


def hap_command(*args: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, args)])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done.output + (done.stderr if done.stderr_bytes else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", ["torch.tensor([16] * 4)", "torch.from_numpy(__import__('numpy').array([16] * 4))"]
)
def test_a_model_file_names_its_fixed_entries(tmp_path: Path, made: str) -> None:
    model, plan = tmp_path / "net.py", tmp_path / "plan.json"
    model.write_text(FILE.replace("SIZES", made))
    hap_command("plan", model, "--cluster", CLUSTER, "-o", plan, "--all-devices")
    assert "all 7 tensors as on one device" in hap_command("verify", plan)
    data = json.loads(plan.read_text())
    found = data["recipe"]["batch"]["dict"]["sizes"]
    assert found == {"fixed": {"dtype": "int64", "numbers": [16, 16, 16, 16]}}
    model.write_text(FILE.replace("SIZES", "torch.tensor([32] * 2)"))
    said = hap_command("verify", plan)
    assert "sizes = [32, 32], and the plan is for [16, 16, 16, 16]" in said
    said = hap_command("what-if", model, "--cluster", CLUSTER, "--rows", "32")
    assert "whose numbers belong to its batch" in said


@pytest.mark.parametrize("value", ['"sizes"', "[1]", "3"])
def test_fixed_of_a_model_file_is_a_list_of_names(tmp_path: Path, value: str) -> None:
    model = tmp_path / "net.py"
    model.write_text(FILE.replace('["sizes"]', value).replace("SIZES", "torch.tensor([16] * 4)"))
    assert "it must be a list of names" in hap_command("plan", model, "--cluster", CLUSTER)


@pytest.fixture(scope="module")
def plan_of_lengths() -> Plan:
    batch = (torch.randn(12, 4), SIZES)
    return hap.plan(Net(lengths), batch, hap.load_cluster(CLUSTER), fixed=["1"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        {"dtype": "float32", "numbers": [1]}, {"dtype": "int64"}, {"numbers": [1]}, [1],
        {"dtype": "int64", "numbers": [[1], [1, 2]]}, {"dtype": "int64", "numbers": [[1], 2]},
        {"dtype": "int64", "numbers": [1.5]}, {"dtype": "bool", "numbers": [1]},
        {"dtype": "int64", "numbers": "x"}, {"dtype": ["int64"], "numbers": [1]},
        {"dtype": "int64", "numbers": [2**70]}, {"dtype": "uint8", "numbers": [-1]},
    ],
)  # fmt: skip
def test_a_plan_with_a_wrong_fixed_entry_is_refused(
    content: Any, plan_of_lengths: Plan, tmp_path: Path
) -> None:
    plan = plan_of_lengths
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").recipe == plan.recipe
    data = plan.to_json()
    data["recipe"]["batch"]["tuple"][1] = {"fixed": content}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="fixed tensor"):
        Plan.load(tmp_path / "plan.json")


def test_a_call_with_other_numbers_is_refused() -> None:
    model, batch = Net(lengths), (torch.randn(12, 4), SIZES)
    plan = hap.plan(model, batch, "local:1", fixed=["1"])
    module = hap.compile(model, plan)
    assert module(*batch).item() == pytest.approx(model(*batch).item(), rel=1e-5)
    with pytest.raises(HapError, match=r"another batch: 1 \(\[\[2, 4\]"):
        module(batch[0], SIZES * 2)
