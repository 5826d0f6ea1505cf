"""Instance norm has torch's results in both modes, and its batch is split."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hap.capture.instance_norm import instance_norm
from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.ir.placement import S
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from tests.random_plans import make_case, random_plan, verdict

OPTIONS: list[dict[str, Any]] = [
    {}, {"affine": True}, {"affine": True, "track_running_stats": True, "momentum": 0.3},
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.InstanceNorm2d(4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).pow(3).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("options", "training"), [*itertools.product(OPTIONS, (True, False))])
def test_results_gradients_and_buffers_are_those_of_torch(
    options: dict[str, Any], training: bool
) -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(4, **options).double().train(training)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 2)
    ours = copy.deepcopy(norm)
    x = torch.randn(5, 4, 7, dtype=torch.float64, requires_grad=True)
    own = not ours.track_running_stats or training
    found = instance_norm(
        x, ours.running_mean, ours.running_var, ours.weight, ours.bias, own, ours.momentum
    )
    wanted = norm(x)
    torch.testing.assert_close(found, wanted)
    for name, buffer in norm.named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(ours.get_buffer(name), buffer)
    weights = torch.randn_like(wanted)
    grads = [
        torch.autograd.grad(out, [x, *module.parameters()], weights)
        for out, module in ((found, ours), (wanted, norm))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("options", "training"), [*itertools.product(OPTIONS, (True, False))])
def test_plans_are_verified(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    case = make_case(Net(**options).train(training), (torch.randn(5, 3, 4, 4),))
    for seed in range(2):
        assert verdict(case, random_plan(case, 2 + seed, seed)).ok


def test_the_batch_and_the_channels_are_split() -> None:
    graph = make_case(Net(affine=True), (torch.randn(5, 3, 4, 4),))
    (node,) = (n for n in graph.graph.nodes if n.op == "hap.group_norm.default")
    assert {S(0), S(1)} <= {row.outs[0] for row in graph.space.rows[node.name]}


def test_eval_of_a_module_planned_in_training() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(5, 3, 4, 4),)
    case = make_case(Net(**OPTIONS[-1]), batch)
    case.model.norm.running_mean.uniform_(1, 2)
    wanted = copy.deepcopy(case.model).eval()(*batch)
    wanted.backward()
    plan = random_plan(case, 2, 0)

    def act(comm: Comm) -> float:
        module = HapModule(plan, case.model, comm, torch.device("cpu")).eval()
        loss: Tensor = module(*plan.local_batch(batch, comm.rank))
        return loss.item()

    assert run_ranks(2, act) == pytest.approx([wanted.item()] * 2, rel=1e-5)


def test_one_pixel_is_refused_as_torch_does() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4))
    with pytest.raises(ModelError, match="more than 1 spatial element"):
        capture(model, torch.randn(2, 3, 1, 1), lambda out, batch: out.sum())
