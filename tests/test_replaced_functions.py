"""Functions of torch that check their data, whose trace is wrong, or that depend on the dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.rule_sources import with_rules
from tests.random_plans import make_case, random_plan, verdict
from tests.test_unusual_models import Forward, Net


def covariance(net: Net, x: Tensor) -> Tensor:
    """torch's own function checks the count of samples."""
    y = net.linear(x)
    weighed = torch.cov(y.T, correction=0).diagonal() + y[:, 0].cov()
    return weighed.square().sum() + torch.corrcoef(y.T).square().mean()


def labels_of_some_classes(net: Net, x: Tensor) -> Tensor:
    """Targets after the first -1 do not count."""
    y = net.linear(x)
    labels = torch.tensor(
        [[3, 0, -1, 2, 1, 1, 1, 4], [*range(8)], [-1] * 8, [5, *[-1] * 7]]
    ).repeat(2, 1)
    apart = F.multilabel_margin_loss(y, labels, reduction="none").square().sum()
    alone = F.multilabel_margin_loss(y[0], labels[0], reduction="sum")
    return F.multilabel_margin_loss(y, labels) + apart + alone


def counts(net: Net, x: Tensor) -> Tensor:
    """torch's own counts are as many as the largest number asks for."""
    y, group = net.linear(x), torch.tensor([0, 3, 1, 3, 3, 0, 5, 1])
    sums = x.new_zeros(6, 8).index_add(0, group, y, alpha=0.5)
    weights = group.bincount(torch.linspace(0, 1, 8), 6)
    return (sums / torch.bincount(group, minlength=6).clamp(min=1)[:, None]).square().mean() + (
        weights[:, None] * sums
    ).mean()


def checked_variance(net: Net, x: Tensor) -> Tensor:
    return F.gaussian_nll_loss(net.linear(x), x, net.linear(x).exp())


def default_eps(net: Net, x: Tensor) -> Tensor:
    """The default is that of the dtype, which the comparison in float64 must not change."""
    small = 1e-3 * net.linear(x)
    return (F.rms_norm(small, (8,)) + net.normalized(small)).square().mean()  # type: ignore[operator]


@pytest.mark.slow
def test_tensors_that_are_empty_on_one_device_leave_every_rank_its_share() -> None:
    def pieces(net: Net, x: Tensor) -> Tensor:
        y = net.linear(x)
        kept = [part.square().sum() for part in torch.split(y, [3, 5, 0], 1)]
        nothing = torch.addmm(y, x.new_zeros(8, 0), x.new_zeros(0, 8))
        return sum(kept) + torch.cat([nothing, y[:, :0]], 1).mean()  # type: ignore[return-value]

    torch.manual_seed(0)
    case = make_case(Net(pieces), torch.randn(8, 8))
    for seed in range(6):
        assert verdict(case, random_plan(case, 2 + seed % 2, seed)).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_defaults_that_depend_on_the_dtype_are_those_of_the_capture(dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def limited(net: Net, x: Tensor) -> Tensor:
        return default_eps(net, x) / (x.abs().amin() + torch.finfo(x.dtype).eps * 1e3)

    # The comparison's torch.finfo knows float32 and float64 models, no bfloat16 ones.
    forward = default_eps if dtype == torch.bfloat16 else limited
    net = Net(forward, normalized=nn.RMSNorm(8)).to(dtype)
    x = torch.randn(8, 8, dtype=dtype)
    case = make_case(net, x, graph=with_rules(capture(net, x), {}))
    assert verdict(case, random_plan(case, 2, 0)).ok


@pytest.mark.parametrize(
    "forward", [covariance, labels_of_some_classes, checked_variance, default_eps, counts]
)
def test_functions_of_torch_that_read_their_data_or_their_dtype_are_verified(
    forward: Forward,
) -> None:
    torch.manual_seed(0)
    net, x = Net(forward, normalized=nn.RMSNorm(8)), torch.randn(8, 8)
    case = make_case(net, x, graph=with_rules(capture(net, x), {}))
    for seed in range(2):
        assert verdict(case, random_plan(case, 2, seed)).ok
