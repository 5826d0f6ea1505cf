"""Shares in whole blocks: which are rounded, which are left alone, and the effect on a plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hap
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.synthesizer.share_alignment import blocks, in_blocks
from tests.random_plans import make_case

VECTOR = 16
"""Elements of float32 in a block."""


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
@given(
    shares=st.lists(st.integers(0, 900), min_size=1, max_size=6).filter(any),
    units=st.sampled_from([1, 2, 3, 16]),
)
def test_rounding_keeps_the_sum_and_the_idle_and_grows_no_share_by_much(
    shares: list[int], units: int
) -> None:
    (found,) = in_blocks({"a": tuple(shares)}, {"a": units}).values()
    assert sum(found) == sum(shares)
    assert all(new <= 1.02 * old for new, old in zip(found, shares, strict=True))
    if found != tuple(shares):
        assert sum(share % units != 0 for share in found) <= 1


def test_other_axes_and_narrow_ones_keep_their_shares() -> None:
    assert in_blocks({"a": (10, 6), "b": (1003, 21)}, {"a": 16}) == {"a": (10, 6), "b": (1003, 21)}


def test_the_remainder_goes_to_the_largest() -> None:
    assert in_blocks({"a": (12209, 12208, 3053, 3052)}, {"a": 16}) == {
        "a": (12218, 12208, 3056, 3040)
    }


class Wide(nn.Module):
    """A last layer that has nearly all parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(32, 64), nn.Linear(64, 4000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(x).relu()), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(48, 32), torch.randint(4000, (48,))


def cluster() -> Cluster:
    """Return devices whose proportional shares of 4,000 columns are no multiples of a block."""
    return load_cluster("""
nodes:
  - name: a
    gpus:
      - {type: fast, memory: 8 GB, flops: {float32: 113 GFLOP/s}, memory_bandwidth: 90 GB/s}
      - {type: slow, memory: 8 GB, flops: {float32: 71 GFLOP/s}, memory_bandwidth: 60 GB/s}
    inside: {bandwidth: 40 MB/s, latency: 10 us}
""")


def test_blocks_are_of_axes_that_products_write() -> None:
    case = make_case(Wide(), batch())
    found = blocks(case.graph, case.space.axes)
    wide = [units for axis, units in found.items() if case.space.axes.axes[axis].units == 4000]
    assert wide == [VECTOR]


@pytest.mark.slow
def test_a_plan_cuts_a_wide_layer_into_whole_blocks() -> None:
    plan = hap.plan(Wide(), batch(), cluster(), options=hap.PlanOptions(all_devices=True))
    (share,) = [s for s in plan.shares.values() if sum(s) == 4000]
    assert 0 < share[1] < share[0]
    assert [units % VECTOR for units in share] == [0, 0]
