"""Parameters without gradient that the forward updates are buffers of the plan."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from tests.random_plans import Case, make_case, random_plan, verdict


class Pair(nn.Module):
    """An encoder, and another one that follows it."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.encoder).requires_grad_(trained)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.encoder.parameters(), self.target.parameters(), strict=True)
            for source, target in pairs:
                target.mul_(0.9).add_(source, alpha=0.1)
            wanted = self.target(y)
        return F.mse_loss(self.encoder(x), wanted)


def pair() -> Case:
    torch.manual_seed(0)
    case = make_case(Pair(), (torch.randn(8, 6), torch.randn(8, 6)))
    with torch.no_grad():
        case.model.target[0].weight.mul_(2)
    return case


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_verified(seed: int) -> None:
    case = pair()
    roles = {i.target: i.role for i in case.graph.inputs}
    assert roles["target.0.weight"] == "buffer"
    assert roles["encoder.0.weight"] == "parameter"
    assert verdict(case, random_plan(case, 2 + seed % 2, seed)).ok


def test_the_state_dict_has_the_updated_encoder() -> None:
    case = pair()
    plan = random_plan(case, 2, 0)
    eager = copy.deepcopy(case.model)
    eager(*case.batch)

    def step(comm: Comm) -> dict[str, Tensor]:
        module = HapModule(plan, case.model, comm, torch.device("cpu"))
        assert "target.0.weight" not in dict(module.named_parameters())
        module(*plan.local_batch(case.batch, comm.rank)).backward()
        return module.full_state_dict()

    for found in run_ranks(2, step):
        assert list(found) == list(eager.state_dict())
        for name, tensor in eager.state_dict().items():
            torch.testing.assert_close(found[name], tensor)


def test_trained_parameters_that_the_forward_updates_are_refused() -> None:
    with pytest.raises(ModelError, match=r"changes the parameter 'target.0.bias', which only"):
        capture(Pair(trained=True), (torch.randn(8, 6), torch.randn(8, 6)))
