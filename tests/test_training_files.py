"""Training through model files, over two mesh axes, and in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hap
from hap.api import plan_file
from hap.capture.model_file import load_model_file
from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.optim import Lamb
from hap.runtime.launch import spawn
from hap.training import Trainer, _underflows
from tests.random_plans import Case, make_case, two_machines, verdict
from tests.test_two_axes import random_mesh_plan

FILE = '''
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hap.optim import Lamb


class Net(nn.Module):
    """Batch norm, a checkpoint, tied and frozen weights, a counter; takes nested keywords."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 6))
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.mix.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs, targets, smooth=0.0):
        self.steps += 1
        h = self.mix(self.embed(inputs["words"])) * inputs["pair"][1]
        h = self.norm(h + checkpoint(self.block, h, use_reentrant=False))
        out = self.head(h)
        return nn.functional.cross_entropy(out, targets, label_smoothing=smooth), {"out": out}


def model():
    return Net()


def batch():
    words = torch.randint(11, (9,))
    return {"inputs": {"words": words, "pair": (words, torch.rand(9, 1))}, "targets": words,
            "smooth": 0.1}


def optimizer(named_parameters):
    flat, rest = [], []
    for name, parameter in named_parameters:
        (flat if "norm" in name or name.endswith("bias") else rest).append(parameter)
    return Lamb([{"params": flat, "weight_decay": 0.0}, {"params": rest}], lr=1e-2)
'''


def planned(tmp_path: Path) -> Plan:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    plan = hap.api.plan_file(str(path), two_machines(3), options=hap.PlanOptions(all_devices=True))
    plan.save(tmp_path / "plan.json")
    return Plan.load(tmp_path / "plan.json")


@pytest.mark.slow
def test_a_model_file_with_all_of_it(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert str(plan.optimizer) == "Lamb (2 states per parameter)"
    assert hap.verify(plan).ok


@pytest.mark.slow
@pytest.mark.gloo
def test_real_processes_verify_and_train_it(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert hap.verify(plan, processes=True).ok
    first, *others = spawn(train, 3, args=(str(tmp_path / "plan.json"),), timeout_s=240)
    assert first[-1] < first[0]
    assert all(losses == pytest.approx(first, rel=1e-5) for losses in others)


def train(path: str) -> list[float]:
    torch.manual_seed(0)
    plan = Plan.load(path)
    file = load_model_file(plan.source.path)
    batch = file.batch()
    trainer = Trainer(plan, file)
    return [trainer.step(batch) for _ in range(10)]


@pytest.mark.slow
def test_a_model_file_with_an_optimizer_that_shards_mislead(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(FILE.replace("return Lamb(", "return torch.optim.Adafactor("))
    plan = hap.api.plan_file(str(path), two_machines(2))
    assert plan.optimizer.whole_parameters
    assert not any(plan.program.inputs[i.tensor].sharded for i in plan.graph.role("parameter"))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.block = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().mean((2, 3))
        h = h + checkpoint(self.block, h, use_reentrant=False)
        return F.cross_entropy(h + torch.randn_like(h), y)


@cache
def deep_case() -> Case:
    torch.manual_seed(0)
    base = make_case(Deep(), (torch.randn(13, 3, 6, 6), torch.randint(6, (13,))))
    return replace(base, optimizer=lambda params: Lamb(params, lr=1e-2))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "seed"), [((2, 2), 0), ((3, 2), 1), ((2, 3), 2)])
def test_over_two_mesh_axes(shape: tuple[int, int], seed: int) -> None:
    case = deep_case()
    found = verdict(case, random_mesh_plan(case, *shape, seed))
    wrong = [(row.what, row.tensor, row.error) for row in found.rows if not row.ok]
    assert found.ok, (found.first_bad, wrong[:4])


HALF = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.{stored})

    def forward(self, x):
        with torch.autocast("cpu", torch.{computed}, enabled="{stored}" == "float32"):
            y = self.layer(x.to(self.layer.weight.dtype))
        return y.float().square().mean()


def model():
    return Net()


def batch():
    return (torch.randn(8, 8),)
"""


@pytest.mark.parametrize(
    ("stored", "computed", "scaled"),
    [
        ("float32", "float16", True),
        ("float16", "float16", False),
        ("float32", "bfloat16", False),
        ("bfloat16", "bfloat16", False),
    ],
)
def test_gradients_are_scaled_where_float16_underflows(
    tmp_path: Path, stored: str, computed: str, scaled: bool
) -> None:
    """Autocast is in the forward, so the recipe does not tell."""
    (tmp_path / "model.py").write_text(HALF.format(stored=stored, computed=computed))
    plan = plan_file(str(tmp_path / "model.py"), two_machines(1))
    assert not plan.recipe.autocast
    assert _underflows(plan) is scaled
    assert Trainer(plan)._scaler.is_enabled() is scaled


SETTINGS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.bias.no_decay = True

    def forward(self, x):
        return self.layer(x).square().mean()


def model():
    return Net()


def batch():
    return (torch.randn(8, 8),)


def optimizer(params):
    plain, decayed = [], []
    for p in params:
        (plain if getattr(p, "no_decay", False) else decayed).append(p)
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decayed}])


autocast = "bfloat16"
float32_matmul_precision = "high"
"""


@pytest.fixture(scope="module")
def settings_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("settings") / "model.py"
    path.write_text(SETTINGS)
    return plan_file(str(path), two_machines(1))


@pytest.fixture
def of_settings(settings_plan: Plan) -> Iterator[tuple[Path, Plan]]:
    """A model file that the test may change, and its plan."""
    path = Path(settings_plan.source.path)
    yield path, settings_plan
    path.write_text(SETTINGS)


def test_a_trainer_has_the_settings_of_the_plan(of_settings: tuple[Path, Plan]) -> None:
    """Shards have the attributes of the model's parameters, which the optimizer reads."""
    groups = Trainer(of_settings[1])._optimizer.param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.0), (1, 0.01)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("optim.AdamW", "optim.SGD", r"`optimizer` .* SGD \(0 .* the plan AdamW \(2 states"),
        ("optim.AdamW([", "optim.AdamW(amsgrad=True, params=[", r"AdamW \(3 .* AdamW \(2 states"),
        ('"bfloat16"', "None", "`autocast` of the model file is None, that of the plan bfloat16"),
        ('"high"', '"highest"', "`float32_matmul_precision` .* is highest, that of the plan high"),
    ],
)
def test_settings_of_the_file_are_those_of_the_plan(
    of_settings: tuple[Path, Plan], old: str, new: str, message: str
) -> None:
    path, plan = of_settings
    path.write_text(SETTINGS.replace(old, new))
    with pytest.raises(PlanError, match=message) as error:
        Trainer(plan)
    assert "plan anew" in error.value.hint
    Trainer(plan, check=False)


def test_an_optimizer_that_shards_mislead_is_refused_after_planning(
    of_settings: tuple[Path, Plan],
) -> None:
    path, plan = of_settings
    path.write_text(SETTINGS.replace("optim.AdamW", "optim.Adafactor"))
    with pytest.raises(PlanError, match="`optimizer` of the model file is Adafactor"):
        Trainer(plan)
