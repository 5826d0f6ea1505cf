"""Two mesh axes: the divided step is the same step, programs inside are priced as they run."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hap.cluster import Cluster, Device, Link
from hap.mesh import Inside, Mesh, divide, is_mesh, origin
from hap.placement import P, R, S
from hap.plan import Plan
from hap.program import Value
from hap.synthesizer.labelling import Aims, Problem
from hap.synthesizer.mesh import Between, InsideSynthesizer, best_on_mesh
from hap.synthesizer.simulate import simulate
from hap.synthesizer.space import build_space
from tests.random_plans import Case, RandomPrices, benchmark_case, random_plan, verdict


def machines(*speeds: tuple[float, ...], inner: float = 1e10, between: float = 1e8) -> Cluster:
    """A machine for each tuple, with a device for each relative speed in it."""
    devices = tuple(
        Device(
            name=f"m{m}:{k}", kind="gpu", node=f"m{m}", memory_bytes=1 << 30, launch_s=1e-6,
            flops_per_s={"float32": speed * 1e12}, memory_bytes_per_s=speed * 1e11,
        )
        for m, own in enumerate(speeds) for k, speed in enumerate(own)
    )  # fmt: skip
    nodes = {d.node: Link(inner, 1e-5) for d in devices}
    return Cluster("machines", devices, nodes, Link(between, 3e-5))


def random_mesh_plan(case: Case, count: int, width: int, seed: int) -> Plan:
    """Any program between the machines, any program inside; unlike shares in each machine."""
    rng = random.Random(f"mesh/{count}/{width}/{seed}")
    cluster = machines(*[tuple(rng.choice((1.0, 2.0, 3.0)) for _ in range(width))] * count)
    for attempt in range(50):
        outer = random_plan(case, count, seed * 50 + attempt, least=1)
        if all(0 not in units for units in outer.shares.values()):
            break
    else:
        raise AssertionError("no draw gives every machine a share")
    between = Between(
        mesh=Mesh(cluster), graph=case.graph, program=outer.program, shares=outer.shares
    )
    inside = InsideSynthesizer(between, cluster, 2)
    shares = next(inside.starts())
    space = inside.space
    prices = RandomPrices(space, count * width, dict.fromkeys(shares, (1,) * count * width), rng)
    problem = Problem(space, prices, Aims())
    labelling = problem.solve()
    assert labelling is not None
    program = problem.program(labelling)
    return replace(
        outer, cluster=cluster,
        inside=Inside(program=program, shares={a: shares[a] for a in program.used_axes()}),
    )  # fmt: skip


CASES = [
    (file, variant, shape)
    for file, variant in (("mlp", "tiny"), ("bert", "tiny"), ("bert_moe", "tiny"))
    for shape in ((2, 2), (2, 3), (3, 2))
]


@pytest.mark.parametrize(("file", "variant", "shape"), CASES)
def test_random_plans_on_a_mesh_compute_what_one_device_computes(
    file: str, variant: str, shape: tuple[int, int]
) -> None:
    case = benchmark_case(file, variant)
    for seed in range(2):
        plan = random_mesh_plan(case, *shape, seed)
        assert any(n.op.startswith("mesh.") for n in plan.whole[0].nodes)
        assert plan.whole[1].collectives
        found = verdict(case, plan)
        assert found.ok, (seed, found.first_bad, max(found.rows, key=lambda row: row.error))
