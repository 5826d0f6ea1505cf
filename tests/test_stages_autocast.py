"""Pipelines under autocast: what crosses, what is summed over the microbatches, and in which dtype."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch
from rich.console import Console

from hap.capture.tracing import capture
from hap.cli.plan_screen import plan_screen
from hap.ir.microbatch import is_sum
from hap.ir.plan import Plan
from hap.ir.stages import crossing, cut_stages
from hap.synthesizer.stages import time_axis
from tests.random_plans import Case, make_case, verdict
from tests.random_stages import divided, random_staged_plan
from tests.test_verify import story


@cache
def half_case(family: str) -> Case:
    """Return a tiny model under autocast."""
    module = import_module(f"benchmarks.models.{family}")
    torch.manual_seed(0)
    model, batch = module.tiny(), module.tiny_batch()
    loss = getattr(module, "loss", None)
    return make_case(model, batch, loss, graph=capture(model, batch, loss, autocast="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_sums_over_microbatches_are_in_the_dtype_of_the_parameter(family: str) -> None:
    case = half_case(family)
    time = divided(case)
    part = time.part(2)
    sums = [n for n in part.nodes if is_sum(n) and n.name in part.backward]
    assert len(sums) >= len(part.gradients) - 2  # a table's two terms are one sum
    assert {part.tensors[o].dtype for n in sums for o in n.outputs if o} == {"float32"}
    half = {n.name for n in part.nodes for x in n.inputs if part.tensors[x].dtype == "bfloat16"}
    assert len(half) > len(sums)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_shared_weight_crosses_as_it_is_read_and_its_gradient_as_it_is_summed(
    family: str,
) -> None:
    case = half_case(family)
    part = divided(case).part(2)
    seen = 0
    for cut in list(crossing(part))[1::3]:
        graphs, transfers = cut_stages(part, (cut,))
        once = {(t.backward, part.tensors[t.tensor]) for t in transfers if t.once}
        table = {(back, t.dtype) for back, t in once if t.shape == (101, 48)}
        if not table:  # the cut is behind the last reader
            continue
        seen += 1
        assert table == {(False, "bfloat16"), (True, "float32")}
        assert {t.dtype for back, t in once if back} == {"float32"}
        names = [{n.name for n in graph.nodes} for graph in graphs]
        for node in part.nodes:  # a cast of a gradient's term is where the term is made
            if is_sum(node) and node.name in part.backward:
                cast = part.producer[node.inputs[0]]
                if cast.op == "aten._to_copy.default":
                    maker = part.producer[cast.inputs[0]]
                    assert [cast.name in own for own in names] == [
                        maker.name in own for own in names
                    ]
    assert seen > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "groups", "seed"), [("bert", (1, 2), 1), ("gpt2", (2, 1, 1), 2)]
)
def test_pipelines_under_autocast_compute_what_one_device_does(
    family: str, groups: tuple[int, ...], seed: int
) -> None:
    case = half_case(family)
    found = verdict(case, random_staged_plan(case, groups, seed))
    assert found.ok, story(found)


def text_of(plan: Plan) -> str:
    out = io.StringIO()
    Console(file=out, width=500).print(plan_screen(plan))
    return out.getvalue()


@pytest.mark.slow
def test_screen_names_gradients_that_are_summed_before_their_casts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, says = half_case("bert"), "are summed over the microbatches in bfloat16"
    assert says not in text_of(random_staged_plan(case, (1, 1), 1, microbatches=2))
    monkeypatch.setattr(time_axis, "_wide_sums", lambda space, usual: usual)
    again = case.within(replace(case.space))  # its program over time is not searched yet
    assert says in text_of(random_staged_plan(again, (1, 1), 1, microbatches=2))
