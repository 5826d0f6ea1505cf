"""Devices that become slower during a run: when a new plan is made, what it is, and that it pays."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hap
from hap.cluster.cluster_file import load_cluster
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan
from hap.run_log import RankFigures
from hap.runtime.lanes import StreamLane
from hap.runtime.timed_lane import TimedStreamLane
from hap.slow_devices import WINDOW, SlowDevices, slowed
from hap.synthesizer.plan_options import PlanOptions
from tests.plain_training import plain_losses

MODEL = """
import os, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    def forward(self, x):
        return ((self.layers(x) - x) ** 2).mean()

class Slow(torch.optim.SGD):
    taken = 0
    def step(self, closure=None):
        Slow.taken += 1
        if os.environ.get("RANK") == os.environ.get("SLOW", "none") and Slow.taken > 25:
            time.sleep(0.03)
        return super().step(closure)

def model():
    return Net()

def batch():
    return {"x": torch.rand(48, 8, dtype=torch.float64)}

def batches(start):
    for number in range(start, 1 << 30):
        torch.manual_seed(number)
        yield batch()

def optimizer(parameters):
    return Slow(parameters, lr=1e-2)
"""
CLUSTER = """
links: {between: 10 Gbit/s}
nodes:
  - {name: n, gpus: 3, type: cpu, memory: 1 GiB, flops: 100 kFLOP/s, memory_bandwidth: 100 kB/s,
     launch: 1 us}
"""  # predicted steps are long, so that a switch pays


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "model.py").write_text(MODEL)
    made = hap.api.plan_file(
        str(folder / "model.py"), load_cluster(CLUSTER), options=PlanOptions(all_devices=True)
    )
    made.save(folder / "plan.json")
    return made


def _figures(plan: Plan, *factors: float) -> list[RankFigures]:
    predicted = simulate_plan(plan).usage.compute_s
    return [
        RankFigures(computing_s=1.3 * f * float(s)) for f, s in zip(factors, predicted, strict=True)
    ]


def _seen(watch: SlowDevices, figures: list[RankFigures], times: int = WINDOW) -> list[object]:
    return [found for _ in range(times) if (found := watch.changed(figures)) is not None]


def test_what_all_have_in_common_or_lasts_short_is_no_change(plan: Plan) -> None:
    watch = SlowDevices(plan)
    assert not _seen(watch, _figures(plan, 1, 1.1, 1), 3 * WINDOW)
    assert not _seen(watch, _figures(plan, 1, 9, 1), WINDOW // 2 - 1)
    assert not _seen(watch, _figures(plan, 1, 1, 1), 2 * WINDOW)
    assert not _seen(watch, [replace(f, computing_s=None) for f in _figures(plan, 1, 9, 1)], 99)


@pytest.mark.slow
def test_the_new_plan_is_that_of_the_slowed_cluster(plan: Plan) -> None:
    watch = SlowDevices(plan)
    (slowness,) = _seen(watch, _figures(plan, 1, 2, 1))
    assert slowness == pytest.approx((1, 2, 1))
    decision = watch.decide(slowness, 10_000, switch_s=1)
    assert decision.text.startswith("n:1 computes 2.00 times as long as predicted; planned anew in")
    new = decision.plan
    assert new is not None
    cluster = slowed(plan.cluster, (1, 2, 1))
    source = f"{plan.source.path}:{plan.source.function}"
    best = hap.api.plan_file(source, cluster, options=PlanOptions(all_devices=True))
    assert simulate_plan(new).run.step_s == pytest.approx(simulate_plan(best).run.step_s, rel=1e-3)
    old = replace(plan, cluster=cluster)
    assert simulate_plan(new).run.step_s < 0.9 * simulate_plan(old).run.step_s

    watch.follow(slowness, new)
    assert not _seen(watch, _figures(replace(new, cluster=plan.cluster), 1, 2, 1), 3 * WINDOW)
    (back,) = _seen(watch, _figures(replace(new, cluster=plan.cluster), 1, 1, 1))
    assert back == pytest.approx((1, 1, 1))


def test_a_switch_that_does_not_pay_is_declined_once(plan: Plan) -> None:
    watch = SlowDevices(plan)
    (slowness,) = _seen(watch, _figures(plan, 1, 2, 1))
    decision = watch.decide(slowness, 1, switch_s=1e6)
    assert decision.plan is None
    assert "1 more steps save less than a switch takes" in decision.text
    watch.follow(slowness, None)
    assert not _seen(watch, _figures(plan, 1, 2.1, 1), 3 * WINDOW)
    assert _seen(watch, _figures(plan, 1, 4, 1))


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_adapts_and_computes_the_same(plan: Plan, tmp_path: Path) -> None:
    path, log = Path(plan.source.path).parent / "plan.json", tmp_path / "log.jsonl"
    words = [sys.executable, "-m", "hap.cli", "run", str(path), "--nproc", "3", "--steps", "100"]
    words += ["--checkpoint", str(tmp_path / "saved"), "--log", str(log), "--adapt"]
    done = subprocess.run(
        words, env={**os.environ, "SLOW": "1"}, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert re.search(
        r"after step \d+: n:1 computes \S+ times as long as predicted; planned anew in [^:]*: "
        r"\S+ \S+ a step instead of \S+ \S+\n", done.stderr
    ), done.stderr  # fmt: skip
    wanted = plain_losses(plan.source.path, len(lines))
    assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.gpu
def test_waits_of_a_cuda_stream_are_timed() -> None:
    device = torch.device("cuda")
    lane = TimedStreamLane(StreamLane(device))
    x = torch.randn(4096, 4096, device=device)
    pending = lane.issue(lambda t: t @ t @ t @ t, x)
    assert torch.isfinite(lane.wait(pending)).any()
    torch.cuda.synchronize()
    assert 0 < lane.waited_s < 10
    lane.clear()
    assert lane.waited_s == 0
