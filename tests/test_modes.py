"""The mode of a model, train() or eval(), when it is planned and when it is compiled."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import hap
from hap.capture.checks import warn_of_eval
from hap.errors import PlanError
from hap.ir.plan import Plan
from tests.random_plans import two_machines


def net(*parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *parts)


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def planned(model: nn.Module) -> Plan:
    return hap.plan(model, torch.randn(8, 6), two_machines(1), loss=loss_of)


class Functional(nn.Module):
    """Dropout as in the attention of ``transformers``."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.attention_dropout = SimpleNamespace(hidden_dropout=0.1), 0.1


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([nn.Dropout(0.1)], "'1'"), ([nn.BatchNorm1d(6)], "'1'"), ([nn.Identity(), Functional()], "'2'"),
        ([nn.LSTM(6, 6, 2, dropout=0.5)], "'1'"), ([nn.Dropout(0.0), nn.LayerNorm(6)], ""),
        ([nn.BatchNorm1d(6, track_running_stats=False)], ""), ([nn.Linear(6, 6)], ""),
    ],
)  # fmt: skip
def test_a_model_in_eval_that_would_train_otherwise_is_warned_of(
    parts: list[nn.Module], found: str
) -> None:
    model = net(*parts)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_eval(model)
        assert not told
        warn_of_eval(model.eval())
    assert [f"as of {found}" in str(w.message) for w in told] == [True] * bool(found)


def test_planning_warns_of_eval_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="call model.train") as told:
        plan = planned(net(nn.Dropout(0.1)).eval())
    assert told[0].filename == __file__ and not plan.recipe.training


def test_a_plan_keeps_the_mode(tmp_path: Path) -> None:
    """One without it, of an older version, was in train() as far as is known."""
    for mode in (True, False):
        plan = planned(net().train(mode))
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").recipe.training is mode
        data = json.loads((tmp_path / "plan.json").read_text())
        assert data["recipe"].get("training") is (None if mode else False)
    data["recipe"]["training"] = "no"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="training of the recipe has 'no'"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("mode", [True, False])
def test_another_mode_than_the_planned_one_is_named(mode: bool) -> None:
    model = net(nn.Dropout(0.1)).train(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planned(model)
    now, then = ("eval", "train") if mode else ("train", "eval")
    with pytest.raises(
        PlanError, match=rf"the model is in {now}\(\), and was in {then}\(\)"
    ) as error:
        hap.compile(model.train(not mode), plan, loss=loss_of)
    assert f"call model.{then}()" in error.value.hint
    hap.compile(model.train(mode), plan, loss=loss_of)


def test_a_model_that_computes_the_same_in_both_modes_may_be_in_either() -> None:
    plan = planned(net())
    module = hap.compile(net().eval(), plan, loss=loss_of)
    assert not module.training
    module(torch.randn(8, 6))
    module.train()(torch.randn(8, 6)).backward()


def test_a_model_planned_in_train_may_be_compiled_in_eval_without_the_check() -> None:
    plan = planned(net(nn.Dropout(0.5)))
    module = hap.compile(net(nn.Dropout(0.5)).eval(), plan, loss=loss_of, check=False)
    x = torch.randn(8, 6)
    assert module(x).item() == module(x).item()
    module.train()
    assert module(x).item() != module(x).item()
    in_eval = replace(plan, recipe=replace(plan.recipe, training=False))
    module = hap.compile(net(nn.Dropout(0.5)).eval(), in_eval, loss=loss_of, check=False)
    with pytest.raises(PlanError, match="in eval"):
        module.train()
