"""Models in any floating dtype, with data or on the meta device, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hap
from hap.cli.commands import main
from hap.ir.plan import Plan
from tests.random_plans import two_machines

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        scores = self.head(self.layer(self.embed(x)) * self.scale)
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), x.flatten())

def model():
    return Net().to(torch.{dtype})

def meta():
    with torch.device("meta"):
        return Net().to(dtype=torch.{dtype})

def moved():
    return Net().to("meta", torch.{dtype})

def batch():
    return torch.randint(50, (8, 6))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        ("model", "bfloat16"), ("model", "float16"), ("model", "float64"),
        ("meta", "bfloat16"), ("moved", "float64"),
    ],
)  # fmt: skip
def test_a_model_file_of_any_dtype_is_planned_as_from_python(
    function: str, dtype: str, tmp_path: Path
) -> None:
    file, made = tmp_path / "model.py", tmp_path / "plan.json"
    file.write_text(MODEL.replace("{dtype}", dtype))
    words = ["plan", f"{file}:{function}", "--cluster", "local:2", "-o", str(made)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    plan = Plan.load(made)
    held = {plan.graph.tensors[i.tensor].dtype for i in plan.graph.role("parameter")}
    assert held == {dtype}
    assert "head.weight" not in {i.target for i in plan.graph.role("parameter")}, "it is tied"
    result = CliRunner().invoke(main, ["verify", str(made)])
    if function == "model":
        assert "as on one device" in result.output
    else:
        assert result.exit_code == 2
        assert "on the meta device, which has no weights" in result.output


@pytest.mark.slow
def test_the_python_api_plans_the_same_graph() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    batch = (torch.randn(4, 6, dtype=torch.bfloat16),)

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.square().mean()

    real = hap.plan(net().bfloat16(), batch, two_machines(2), loss=loss)
    with torch.device("meta"):
        bare = net().bfloat16()
    assert hap.plan(bare, batch, two_machines(2), loss=loss).graph.digest == real.graph.digest
