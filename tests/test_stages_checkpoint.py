"""Checkpoints between plans with stages and without; tests/test_checkpoint_plans.py has two mesh axes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hap
from hap.ir.batch import call
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.hap_module import HapModule
from hap.runtime.launch import spawn
from hap.runtime.one_device import reference_mode
from tests.random_plans import Case, benchmark_case, random_plan, widened
from tests.random_stages import random_staged_plan

STEPS = 2


def case() -> Case:
    return benchmark_case("gpt2", "tiny")  # whose first and last layer share a weight


def trained(plan: Plan | None, comm: Comm, folder: str, *, save: bool = True) -> list[float]:
    """Load the checkpoint in a folder, if there is one; train; save. Return the losses."""
    model = copy.deepcopy(case().model).double()
    cpu = torch.device("cpu")
    module: Any = HapModule(plan, model, comm, cpu, widen=True) if plan else model
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    start = hap.load(module, optimizer, folder).step if any(Path(folder).glob("step-*")) else 0
    batch = widened(case().batch)
    if plan:
        batch = plan.local_batch(batch, comm.rank)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if plan:
            loss = call(module, batch)
        else:
            with reference_mode(widen=True):
                loss = case().loss_of(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if save:
        hap.save(module, optimizer, folder, step=start + STEPS, block=True)
    return losses


def on_rank(data: dict[str, Any], folder: str) -> list[float]:
    return trained(Plan.from_json(data), ProcessGroupComm(), folder)


@pytest.mark.slow
@pytest.mark.gloo
def test_shards_stages_one_process_and_other_stages(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    plans = (
        random_plan(case(), 2, 1), random_staged_plan(case(), (1, 2), 3), None,
        random_staged_plan(case(), (2, 1), 4),
    )  # fmt: skip
    assert plans[1] is not None and plans[1].stages
    losses: list[float] = []
    for plan in plans:
        if plan is None:
            losses += trained(None, LocalComm(), folder)
            continue
        ranks = spawn(on_rank, plan.world_size, args=(plan.to_json(), folder), timeout_s=240)
        assert all(found == pytest.approx(ranks[0], rel=1e-12) for found in ranks)
        losses += ranks[0]
    model = copy.deepcopy(case().model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for _ in range(STEPS * len(plans)):
        optimizer.zero_grad()
        with reference_mode(widen=True):
            loss = case().loss_of(model, widened(case().batch))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-9, rel=1e-9)
