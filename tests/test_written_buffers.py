"""Buffers that the forward writes and the backward reads, in their old or their new values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.tracing import capture
from hap.ir.placement import R
from hap.ir.program import Convert
from hap.rule_sources import with_rules
from tests.random_plans import make_case, random_plan, verdict
from tests.test_unusual_models import Forward, Net


def power_iteration(net: Net, x: Tensor) -> Tensor:
    """New values of buffers that the backward reads, too, in a placement of its own."""
    return net.normed(x).relu().square().mean()  # type: ignore[operator]


def queue(net: Net, x: Tensor) -> Tensor:
    """The backward reads a copy of a buffer whose old value the forward replaces, as in MoCo."""
    y = F.normalize(net.linear(x), dim=1)
    scores = y @ net.keys.clone().detach()  # type: ignore[operator]
    with torch.no_grad():
        net.keys.copy_(torch.cat([y.T, net.keys[:, : -len(x)]], 1))  # type: ignore[operator, index]
    return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [power_iteration, queue])
def test_buffers_that_the_backward_reads_are_verified(forward: Forward) -> None:
    torch.manual_seed(0)
    net = Net(forward, normed=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
    net.register_buffer("keys", F.normalize(torch.randn(8, 24), dim=0))
    x = torch.randn(8, 8)
    case = make_case(net, x, graph=with_rules(capture(net, x), {}))
    late = 0
    for seed in range(8):
        plan = random_plan(case, 2 + seed % 2, seed)
        assert verdict(case, plan).ok
        late += _made_for_the_backward(plan)
    assert late > 0


def _made_for_the_backward(plan: hap.Plan) -> int:
    """Convert a new value of a buffer in the backward instead: such a program must be refused."""
    buffers = {o.tensor for o in plan.graph.outputs if o.role == "buffer"}
    for k, step in enumerate(plan.program.instructions):
        if isinstance(step, Convert) and step.tensor in buffers and step.dst == R:
            moved = [*plan.program.instructions]
            moved[k] = replace(step, backward=True)
            with pytest.raises(ValueError, match="which the backward makes"):
                replace(plan.program, instructions=tuple(moved)).check(plan.graph)
            return 1
    return 0
