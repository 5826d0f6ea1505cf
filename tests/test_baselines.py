"""Baselines: each is the program that its name promises, and no plan is slower than any."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from hap.cluster import Cluster, Device, Link
from hap.errors import HapError
from hap.placement import P, R, S
from hap.program import Compute
from hap.synthesizer.baselines import METHODS, baselines
from hap.synthesizer.paper import PaperCost, plan_as_paper
from hap.synthesizer.roles import expert_weights, tensor_parallel_axes, weights
from hap.synthesizer.space import Space
from hap.synthesizer.synthesize import Candidate, Synthesizer
from tests.random_plans import benchmark_case

MODELS = ("mlp", "wide_mlp", "vgg19", "vit", "bert", "gpt2", "llama", "bert_moe")


def cluster(speeds: tuple[float, ...], bandwidth: float, *, launch_s: float = 1e-7) -> Cluster:
    """A machine per device, and links of ``bandwidth`` bytes/s."""
    devices = tuple(
        Device(
            name=f"m{r}:0", kind=f"{speed:g}", node=f"m{r}", memory_bytes=1 << 32,
            flops_per_s={"float32": speed}, memory_bytes_per_s=speed / 10, launch_s=launch_s,
        )
        for r, speed in enumerate(speeds)
    )  # fmt: skip
    link = Link(bandwidth, 1e-6)
    return Cluster("test", devices, {d.node: link for d in devices}, link)


CLUSTERS = {
    "two alike, slow link": cluster((1e11, 1e11), 1e8),
    "two alike, fast link": cluster((1e10, 1e10), 1e11),
    "three unlike": cluster((4e10, 1e10, 1e10), 1e9),
    "four very unlike, fast link": cluster((1e11, 1e9, 3e10, 3e10), 1e12),
    "long launches": cluster((4e12, 1e12, 1e12), 1e10, launch_s=2e-6),
}


def space_of(model: str) -> Space:
    return benchmark_case(model, "tiny").space


@cache
def made(model: str, on: str) -> dict[str, Candidate | str]:
    return baselines(space_of(model), CLUSTERS[on], 2, every=True)


def candidate(model: str, name: str, on: str = "three unlike") -> Candidate:
    found = made(model, on)[name]
    assert isinstance(found, Candidate), found
    return found


@pytest.mark.parametrize("model, on", list(itertools.product(MODELS, CLUSTERS)))
def test_no_plan_is_slower_than_any_baseline(model: str, on: str) -> None:
    best = Synthesizer(space_of(model), CLUSTERS[on], 2).best()
    for name, other in made(model, on).items():
        if isinstance(other, Candidate) and other.fits:
            assert best.timeline.step_s <= other.timeline.step_s * (1 + 1e-9), name
