"""Some random modules, clusters and shares, planned and compared with one device.

``python -m tests.fuzz --minutes 30 --seed 1`` searches longer, for other modules each time.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hap.runtime import emulate
from tests.fuzz.check import Outcome, check
from tests.fuzz.grammar import recipes
from tests.fuzz.recipe import Machine, Recipe

SMALL = Recipe(
    params={"p0": (3, 4), "p1": (3,)},
    inputs={"x0": ((5, 4), "float"), "x1": ((5,), 3)},
    lines=(
        "v0 = F.linear(x0, self.p0, self.p1)",
        "v0.mul_(0.5)",
        "loss = F.cross_entropy(v0, x1)",
        "return loss",
    ),
    devices=(Machine("a", 1e9), Machine("b", 3e9)),
)


@pytest.mark.slow
@settings(
    max_examples=10, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
)  # fmt: skip
@given(recipes())
def test_random_modules_compute_what_one_device_computes(recipe: Recipe) -> None:
    check(recipe)  # Hypothesis shows the smallest recipe that fails


@settings(
    max_examples=10, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=[Phase.generate],
)  # fmt: skip
@given(recipes(), st.booleans())
def test_a_recipe_is_data_and_a_script(recipe: Recipe, written: bool) -> None:
    scope: dict[str, object] = {"__name__": "a script"}
    if written:
        exec(recipe.script(), scope)
    again = (
        scope["recipe"] if written else Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    )
    assert again == recipe


@pytest.mark.slow
def test_a_right_program_is_clean_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(SMALL) is Outcome.CLEAN
    monkeypatch.setattr(
        emulate, "_total", lambda terms: terms[0].clone()
    )  # drops the others' terms
    with pytest.raises(AssertionError, match="computes something else"):
        for seed in range(8):
            check(Recipe.from_json({**SMALL.to_json(), "seed": seed}))


@pytest.mark.slow
def test_an_ill_conditioned_module_is_no_failure() -> None:
    """Rounding decides the sign of the gradient here."""
    cancelled = Recipe.from_json({
        **SMALL.to_json(),
        "lines": [
            "v0 = F.linear(x0, self.p0, self.p1)",
            "v1 = v0.sum() - v0.flip(0).cumsum(0)[-1].cumsum(0)[-1]",
            "loss = (v1 * 1e15).tanh() + v0.mean()",
            "return loss",
        ],
    })  # fmt: skip
    found = (check(Recipe.from_json({**cancelled.to_json(), "seed": seed})) for seed in range(4))
    assert Outcome.ROUNDING in found  # until the first one
