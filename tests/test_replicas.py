"""Replicas that have drifted apart are made equal, over one mesh axis, two, and in stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hap.ir.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.replicas import equalize, on_unlike_gpus
from tests.random_plans import Case, benchmark_case, make_case, random_plan
from tests.random_stages import random_staged_plan
from tests.test_two_axes import random_mesh_plan

CPU = torch.device("cpu")


def cases() -> dict[str, tuple[Case, Plan]]:
    mlp = benchmark_case("mlp", "tiny")
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    net = make_case(model, torch.randn(8, 16), lambda out, x: out.square().mean())
    return {
        "one axis": (mlp, random_plan(mlp, 3, 1)),
        "two axes": (mlp, random_mesh_plan(mlp, 2, 2, 1)),
        "stages": (net, random_staged_plan(net, (2, 2), 0, 2, ("tanh",))),
    }


@pytest.mark.parametrize("kind", ["one axis", "two axes", "stages"])
def test_replicas_are_those_of_the_first_rank_that_holds_them(kind: str) -> None:
    case, plan = cases()[kind]
    tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}

    def act(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        module = HapModule(plan, case.model, comm, CPU)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1e-3 * (comm.rank + 1))
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        equalize(module)
        assert not on_unlike_gpus(module)
        return before, {n: p.detach() for n, p in module.named_parameters()}

    found = run_ranks(plan.world_size, act)
    compared = 0
    for name, tensor in tensors.items():
        places = {r: plan.levels(tensor, r) for r in range(plan.world_size)}
        for rank, (_, now) in enumerate(found):
            if plan.stages and not now[name].numel():
                continue
            first = min(
                r for r, levels in places.items()
                if levels == places[rank] and found[r][0][name].shape == now[name].shape
            )  # fmt: skip
            assert torch.equal(now[name], found[first][0][name]), (name, rank)
            compared += first != rank
    assert compared, "choose a plan with replicas"
