"""Every contender of the race has the losses of one device, step by step.

Also tests their parts: rows by speed, and weights of means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.contenders import (
    CONTENDERS,
    EVEN,
    FASTER_KINDS,
    ON_FASTEST,
    ONE,
    OURS,
    OURS_HALF,
    OURS_STAGED,
    PAPER,
    PIPELINE_BY_HAND,
    PIPELINE_EVEN,
    PIPELINE_FASTEST,
    PIPELINE_SPEED,
    PROPORTIONAL,
    ROUNDED,
    make,
)
from benchmarks.contenders.base import Setting, even, proportional, rows_of, terms
from benchmarks.contenders.chains import chain, cut
from benchmarks.racing import plans
from benchmarks.racing.cell import global_batches
from benchmarks.racing.run import reference
from hap import api
from hap.capture.model_file import ModelFile, load_model_file
from hap.cluster.cluster_file import load_cluster
from hap.runtime.launch import spawn
from hap.synthesizer.plan_options import PlanOptions

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
STEPS = 4
PIPELINES = (PIPELINE_EVEN, PIPELINE_SPEED, PIPELINE_FASTEST, PIPELINE_BY_HAND)
UNLIKE = load_cluster("""
links: {between: 10 Gbit/s}
nodes:
  - {name: fast, gpus: 1, type: A100-40}
  - {name: slow, gpus: 1, type: P100}
""")

HALF = PlanOptions(all_devices=True, allow=("bf16-gradients",))

Losses = dict[str, list[float]]


def losses(names: tuple[str, ...], setting: Setting, planned: Mapping[str, Path]) -> Losses:
    """Return the losses of one rank, by contender."""
    found: Losses = {}
    for name in names:
        contender = make(name, replace(setting, plan=planned.get(name)))
        steps = [contender.step(batch) for batch in global_batches(setting.file, STEPS)]
        found[name] = [loss for loss in steps if loss is not None]
    return found


def on_two_ranks(file: ModelFile, folder: Path, names: list[str]) -> Losses:
    spec = f"{file.path}:{file.function}"
    makers = {
        OURS: lambda: api.plan_file(spec, UNLIKE, options=PlanOptions(all_devices=True)),
        OURS_HALF: lambda: api.plan_file(spec, UNLIKE, options=HALF),
        PAPER: lambda: plans.baseline(spec, UNLIKE, plans.PAPER_METHOD),
    }
    planned = {name: folder / f"{name}.json" for name in names if name in makers}
    for name, path in planned.items():
        makers[name]().save(path)
    setting = Setting(file=file, speeds=(2.0, 1.0), devices=tuple(d.name for d in UNLIKE.devices))
    return spawn(losses, 2, args=(tuple(names), setting, planned))[0]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("model", ["vgg19", "bert", "bert_moe", "wide_mlp"])
def test_losses_are_those_of_one_device(model: str, tmp_path: Path) -> None:
    file = load_model_file(f"{MODELS / model}.py:race_tiny")
    want = reference(file, STEPS)
    assert want[0] != pytest.approx(want[-1], rel=1e-4)  # the model learns
    apart = (*ON_FASTEST, *PIPELINES, OURS_STAGED, FASTER_KINDS)
    apart += (OURS_HALF, PAPER) if model != "wide_mlp" else ()  # they take long to plan
    names = [name for name in CONTENDERS if name not in apart]
    for name, got in on_two_ranks(file, tmp_path, names).items():
        exact = pytest.approx(want, rel=1e-4)
        if name in ROUNDED:
            assert got == pytest.approx(want, rel=1e-2), name
            assert name == OURS_HALF or got != pytest.approx(want, rel=1e-6), name
        else:
            assert got == exact, name


@pytest.mark.slow
@pytest.mark.gloo
def test_means_are_weighted_by_their_numbers_of_terms(tmp_path: Path) -> None:
    """Masks are random, so the mean of the ranks' means is not the global mean."""
    file = load_model_file(f"{MODELS / 'bert'}.py:tiny")
    want = reference(file, STEPS)
    got = on_two_ranks(file, tmp_path, [EVEN, PROPORTIONAL])
    assert got[PROPORTIONAL] == pytest.approx(want, rel=1e-5)
    assert got[EVEN] != pytest.approx(want, rel=1e-4)


@pytest.mark.slow
@pytest.mark.gloo
def test_contenders_on_the_fastest_devices_leave_the_others_out() -> None:
    file = load_model_file(f"{MODELS / 'wide_mlp'}.py:race_tiny")
    want = reference(file, STEPS)
    setting = Setting(file=file, speeds=(2.0, 1.0, 2.05))
    ranks = spawn(losses, 3, args=((ONE, *ON_FASTEST), setting, {}))
    assert [found[ONE] for found in ranks] == [[], [], pytest.approx(want, rel=1e-5)]
    for name in ON_FASTEST:
        like = pytest.approx(want, rel=1e-2 if name in ROUNDED else 1e-4)
        assert [found[name] for found in ranks] == [like, [], like], name


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("model", ["vgg19", "vit", "bert", "gpt2", "wide_mlp"])
def test_pipelines_have_the_losses_of_one_device(model: str) -> None:
    """``bert`` and ``gpt2`` have a tied weight in the first stage and the last."""
    file = load_model_file(f"{MODELS / model}.py:race_tiny")
    want = reference(file, STEPS)
    setting = Setting(file=file, speeds=(2.0, 1.0, 2.05))
    ranks = spawn(losses, 3, args=(PIPELINES, setting, {}))
    for name in PIPELINES:
        left_out = [1] if name in ON_FASTEST else []
        for rank, found in enumerate(ranks):
            got = [] if rank in left_out else pytest.approx(want, rel=1e-4)
            assert found[name] == got, (name, rank)


def test_a_mixture_of_experts_is_no_chain() -> None:
    file = load_model_file(f"{MODELS / 'bert_moe'}.py:race_tiny")
    with pytest.raises(ValueError, match="no chain"):
        chain(file.model())


def test_cuts_follow_the_speeds() -> None:
    assert cut([1.0] * 6, (1.0, 1.0)) == (3,)
    assert cut([1.0] * 6, (2.0, 1.0)) == (4,)
    assert cut([1.0, 0.0, 5.0, 1.0, 1.0], (1.0, 1.0, 1.0)) == (1, 3)
    with pytest.raises(ValueError, match="fewer than 3"):
        cut([1.0, 1.0], (1.0, 1.0, 1.0))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_plan_may_leave_devices_out(tmp_path: Path) -> None:
    """A rank that is left out reports no loss, and the others do not wait for it."""
    file = load_model_file(f"{MODELS / 'wide_mlp'}.py:race_tiny")
    plan = api.plan_file(f"{file.path}:{file.function}", UNLIKE.without(0))
    plan.save(tmp_path / "one.json")
    devices = tuple(d.name for d in UNLIKE.devices)
    setting = Setting(file=file, devices=devices)
    first, second = spawn(losses, 2, args=((OURS,), setting, {OURS: tmp_path / "one.json"}))
    assert first[OURS] == []
    assert second[OURS] == pytest.approx(reference(file, STEPS), rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "speeds", "want"),
    [
        (12, (2.0, 1.0), (8, 4)),
        (32, (4.0, 4.0, 1.0, 1.0), (13, 13, 3, 3)),
        (32, (20.0, 20.0, 20.0, 1.0), (11, 10, 10, 1)),  # the slowest gets a row as well
        (4, (100.0, 1.0, 1.0, 1.0), (1, 1, 1, 1)),
    ],
)
def test_rows_by_speed(rows: int, speeds: tuple[float, ...], want: tuple[int, ...]) -> None:
    assert proportional(rows, speeds) == want


def test_rows_by_speed_are_refused_where_a_rank_would_have_none() -> None:
    with pytest.raises(ValueError, match="fewer than the 3 ranks"):
        proportional(2, (1.0, 1.0, 1.0))


def test_rows_are_cut_without_a_gap() -> None:
    batch = {"x": torch.arange(7), "y": torch.arange(14).view(7, 2)}
    counts = even(7, 3)
    assert counts == (3, 2, 2)
    parts = [rows_of(batch, counts, rank) for rank in range(3)]
    for key, whole in batch.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), whole)


def test_terms_of_a_mean() -> None:
    assert terms({"labels": torch.tensor([[1, -100], [-100, -100]])}) == 1
    assert terms((torch.zeros(5, 2), torch.zeros(5))) == 5


@pytest.mark.slow
@pytest.mark.gloo
def test_contenders_on_all_kinds_but_the_slowest() -> None:
    file = load_model_file(f"{MODELS / 'wide_mlp'}.py:race_tiny")
    setting = Setting(file=file, speeds=(2.0, 1.0, 4.0))
    ranks = spawn(losses, 3, args=((FASTER_KINDS,), setting, {}))
    like = pytest.approx(reference(file, STEPS), rel=1e-4)
    assert [found[FASTER_KINDS] for found in ranks] == [like, [], like]
