"""Crossovers between kinds of plans, exactly where they were worked out by hand."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from hap.capture.tracing import capture
from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.placement import Placement
from hap.ir.plan import Plan, Source
from hap.ir.prediction import Prediction
from hap.ir.program import Convert, Program
from hap.ir.regather import backward_alias_of
from hap.synthesizer.baselines import sharded_storage
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.storage_sharding import STORED, level
from hap.synthesizer.synthesize import Synthesizer
from tests.random_plans import make_case, verdict

WIDTH, DEPTH = 256, 6


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().sum()
        return loss


@cache
def space(rows: int = 64) -> Space:
    with torch.device("meta"):
        return build_space(capture(Deep(), torch.empty(rows, WIDTH)))


def cluster(*memory: int, speeds: tuple[float, ...] = (), bandwidth: float = 1e10) -> Cluster:
    speeds = speeds or (1e12,) * len(memory)
    devices = tuple(
        Device(
            name=f"m:{k}", kind=f"{nbytes} {speed:g}", node="m", memory_bytes=nbytes,
            flops_per_s={"float32": speed}, memory_bytes_per_s=speed / 10, launch_s=1e-6,
        )
        for k, (nbytes, speed) in enumerate(zip(memory, speeds, strict=True))
    )  # fmt: skip
    link = Link(bandwidth, 1e-5)
    return Cluster("test", devices, {"m": link}, link)


def zero(rows: int = 64) -> Allowed:
    """Return data parallelism with every parameter stored in shards (any stage of ZeRO)."""
    return sharded_storage(space(rows))


def gathers(program: Program, of: set[str]) -> list[Convert]:
    return [c for c in program.collectives if c.tensor in of and c.kind == "all_gather"]


def searched(on: Cluster, allowed: Allowed, rows: int = 64) -> Candidate:
    synthesizer = Synthesizer(space(rows), on, 2, allowed)
    return synthesizer.search(next(synthesizer.starts()))


def all_of(memory: float) -> Cluster:
    return cluster(*[int(memory)] * 4)


def stage(number: int) -> Allowed:
    """Return ZeRO up to a stage: 1 all-reduces gradients, 2 keeps the replicas of parameters."""
    graph, allowed = space().graph, zero()
    gradients, aliases = set(graph.gradients.values()), set(backward_alias_of(graph).values())

    def restricted(tensor: str, p: Placement, stored: bool) -> bool:
        if p.sharded and (
            (number < 3 and tensor in aliases) or (number < 2 and tensor in gradients)
        ):
            return False
        return allowed(tensor, p, stored)

    return restricted


def least_peak(allowed: Allowed) -> float:
    """Return the peak of the plan that exceeds a too small memory by the least."""
    return float(searched(all_of(1 << 17), allowed).serial.peak_bytes.max())


@pytest.mark.slow
def test_gradients_then_replicas_are_given_up_exactly_where_they_do_not_fit() -> None:
    graph = space().graph
    aliases = set(backward_alias_of(graph).values())
    free = searched(all_of(1 << 30), zero())
    assert len(gathers(free.program, set(backward_alias_of(graph)))) == DEPTH - 1
    assert not gathers(free.program, aliases)
    needed = free.serial.peak_bytes.max()
    assert searched(all_of(needed), zero()).program == free.program
    at_once = searched(all_of(needed - 1), zero())
    assert at_once.fits
    assert at_once.serial.step_s > free.serial.step_s
    assert not gathers(at_once.program, aliases)  # gradients are sharded first: one start each

    needed = least_peak(stage(2))
    assert needed == at_once.serial.peak_bytes.max()
    assert not gathers(searched(all_of(needed), zero()).program, aliases)
    assert not searched(all_of(needed - 1), stage(2)).fits
    again = searched(all_of(needed - 1), zero())
    assert again.fits
    assert len(gathers(again.program, aliases)) == len(aliases)
    assert again.serial.step_s > at_once.serial.step_s


def test_every_stage_of_zero_is_a_program_of_its_own() -> None:
    """Gradients are all-reduced, then reduce-scattered; stage 3 also gathers parameters twice."""
    graph = space().graph
    aliases = set(backward_alias_of(graph).values())
    one, two, three = (searched(all_of(1 << 17), stage(n)) for n in (1, 2, 3))
    for candidate in one, two, three:
        assert all(candidate.program.inputs[i.tensor].sharded for i in graph.role("parameter"))
        assert all(
            p.sharded
            for o, p in zip(graph.outputs, candidate.program.outputs, strict=True)
            if o.role == "gradient"
        )
    kinds = [
        {c.kind for c in x.program.collectives if c.tensor in graph.gradients.values()}
        for x in (one, two, three)
    ]
    assert kinds == [{"all_reduce"}, {"reduce_scatter"}, {"reduce_scatter"}]
    assert [bool(gathers(x.program, aliases)) for x in (one, two, three)] == [False, False, True]
    peaks = [x.serial.peak_bytes.max() for x in (one, two, three)]
    # Stages 1 and 2 may have equal peaks.
    assert peaks[0] >= peaks[1] > peaks[2]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_stage_of_zero_computes_what_one_device_computes(number: int) -> None:
    torch.manual_seed(0)
    case = make_case(Deep(), torch.randn(64, WIDTH))
    on = cluster(*[1 << 17] * 2, 1 << 21, speeds=(2e12, 1e12, 1e12))
    found = Synthesizer(case.space, on, 2, stage(number))
    best = found.search(next(found.starts()))
    nothing = Prediction(
        step_s=0, communicate_s=0, hidden_s=0, ranks=(), collectives=(), alternatives=()
    )
    plan = Plan(
        source=Source(), graph=case.graph, cluster=on, optimizer=OptimizerKind(name="AdamW", states=2), program=best.program,
        shares={name: best.shares[name] for name in best.program.used_axes()}, prediction=nothing,
    )  # fmt: skip
    assert len(set(plan.shares[f"{STORED}{WIDTH}"])) > 1
    assert verdict(case, plan).ok


def test_storing_follows_the_memory_and_computing_the_speed() -> None:
    rows, fast = 1024, 1e12
    roomy = searched(cluster(*[1 << 30] * 4, bandwidth=fast), zero(rows), rows)
    peak = float(roomy.serial.peak_bytes.max())
    on = cluster(*[1 << 30] * 3, int(0.9 * peak), bandwidth=fast)
    synthesizer = Synthesizer(space(rows), on, 2, zero(rows))
    pair = synthesizer.search(next(synthesizer.starts()))
    shares = synthesizer.balance(pair)
    best = synthesizer.judge(pair.program, shares)
    assert best.fits
    assert best.program.inputs == roomy.program.inputs
    assert not gathers(best.program, set(backward_alias_of(space(rows).graph).values()))
    assert shares["batch"] == (256, 256, 256, 256)
    stored = shares[f"{STORED}{WIDTH}"]
    assert max(stored[:3]) - min(stored[:3]) <= 1 and min(stored[:3]) > stored[3]


def test_storing_stays_even_where_speeds_differ_and_memory_does_not_lack() -> None:
    synthesizer = Synthesizer(
        space(2048), cluster(*[1 << 30] * 4, speeds=(3e12, 3e12, 1e12, 1e12)), 2, zero(2048)
    )
    pair = synthesizer.search(next(synthesizer.starts()))
    shares = synthesizer.balance(pair)
    assert shares["batch"][0] > 2 * shares["batch"][3]
    stored = shares[f"{STORED}{WIDTH}"]
    assert max(stored) < 1.5 * min(stored)


def test_level_parts_are_even_under_the_caps() -> None:
    assert level(np.array([1.0, 1.0, 1.0, 1.0])) == pytest.approx(0.25)
    assert level(np.array([0.1, 1.0, 1.0])) == pytest.approx([0.1, 0.45, 0.45])
    assert level(np.array([0.1, 0.2, 5.0])) == pytest.approx([0.1, 0.2, 0.7])
    assert level(np.array([0.1, 0.2, 0.4])) == pytest.approx([0.2, 0.3, 0.5])
    random = np.random.default_rng(0)
    for _ in range(200):
        caps = random.random(5) * random.choice([0.2, 1.0])
        parts = level(caps)
        assert parts.sum() == pytest.approx(1)
        if caps.sum() > 1:
            assert (parts <= caps + 1e-12).all()
            cut = parts < caps - 1e-12
            assert parts[cut] == pytest.approx(parts.max())  # those below their caps
