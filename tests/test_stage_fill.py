"""Pipelines that do not fit: how few are searched, and what estimates of memory learn from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hap.cluster.topology import Cluster
from hap.synthesizer.stages import stage_search
from hap.synthesizer.stages.sketch import Sketch
from hap.synthesizer.stages.stage_search import LACKING, Pipeline, StageSearch
from tests.random_plans import benchmark_case, two_machines


def with_memory(nbytes: float) -> Cluster:
    cluster = two_machines(4)
    devices = [replace(d, memory_bytes=round(nbytes)) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def searched(nbytes: float) -> StageSearch:
    return StageSearch(benchmark_case("vit", "tiny").space, with_memory(nbytes), 2)


def tried(search: StageSearch, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sketch, Pipeline | None]]:  # fmt: skip
    """Return the pipelines that are searched, with what was found."""
    found, one = [], StageSearch._tried

    def noted(self: StageSearch, sketch: Sketch, progress: object) -> Pipeline | None:
        found.append((sketch, one(self, sketch, lambda text: None)))
        return found[-1][1]

    monkeypatch.setattr(StageSearch, "_tried", noted)
    search.best(1e9)
    return found


@pytest.mark.slow
def test_few_pipelines_are_searched_where_all_lack_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(searched(1e4), monkeypatch)
    assert all(sketch.lacking and not made for sketch, made in found)
    assert len(found) == LACKING
    monkeypatch.setattr(stage_search, "LACKING", 5)
    assert len(tried(searched(1e4), monkeypatch)) > LACKING


@pytest.mark.slow
def test_pipelines_are_searched_where_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(searched(1e9), monkeypatch)
    assert len(found) > LACKING
    assert all(made and made.fits for _, made in found)


def test_estimates_learn_from_a_stage_that_does_not_fit() -> None:
    roomy = searched(1e9)
    sketch = next(s for s in roomy.estimates.sketches() if len(s.groups) == 2)
    assert not roomy.estimates.overfull(sketch)
    assert roomy.pipeline(sketch)
    assert not roomy.estimates.overfull(sketch)
    tight = searched(1e4)
    sketch = next(s for s in tight.estimates.sketches() if s.groups == sketch.groups)
    assert tight.pipeline(sketch) is None
    assert tight.estimates.overfull(sketch)
    others = [s for s in tight.estimates.sketches() if not {*s.indices} & {*sketch.indices}]
    assert others
    assert not any(map(tight.estimates.overfull, others))


def test_the_least_excess_of_a_group_counts() -> None:
    estimates = searched(1e9).estimates
    sketch = next(s for s in estimates.sketches() if len(s.groups) == 2)
    fill = sketch.fills[0]
    estimates.learn_fill(sketch, 0, 3.0)
    assert estimates.overfull(sketch)
    estimates.learn_fill(sketch, 0, 0.9)
    estimates.learn_fill(sketch, 0, 4.0)
    assert not estimates.overfull(sketch)
    assert estimates.overfull(replace(sketch, fills=(fill / 0.8, *sketch.fills[1:])))
