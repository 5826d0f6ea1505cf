"""Compiled ranks: the same numbers as eager ones, calls of the context in the same order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import hap
from hap.runtime import compiled
from hap.runtime.collectives import LocalComm, ProcessGroupComm
from hap.runtime.launch import spawn
from hap.runtime.module import HapModule
from tests.random_plans import Case, benchmark_case, call, random_plan, verdict

CPU = torch.device("cpu")


def module_of(case: Case, **options: Any) -> HapModule:
    """One rank that does everything."""
    return HapModule(one_rank(case), copy.deepcopy(case.model), LocalComm(), CPU, **options)


def one_rank(case: Case) -> hap.Plan:
    return hap.plan(case.model, case.batch, "local:1", loss=case.loss, optimizer=case.optimizer)


def gradients(module: HapModule, batch: Any) -> dict[str, Tensor]:
    call(module, batch).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


# --- the same numbers ----------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("file", "world", "seed"),
    [
        ("mlp", 2, 0), ("vgg19", 2, 1),
        pytest.param("wide_mlp", 3, 0, marks=SLOW), pytest.param("bert", 2, 0, marks=SLOW),
        pytest.param("vit", 3, 1, marks=SLOW), pytest.param("bert_moe", 2, 0, marks=SLOW),
        pytest.param("gpt2", 2, 3, marks=SLOW),
    ],
)  # fmt: skip
def test_random_programs_compute_what_one_device_computes(file: str, world: int, seed: int) -> None:
    case = benchmark_case(file, "tiny")
    found = verdict(case, random_plan(case, world, seed), backend="inductor")
    worst = max(found.rows, key=lambda row: row.error)
    assert found.ok, f"{worst.what} of {worst.tensor}: {worst.error:.1e}"
    assert found.tolerance == 1e-9


def compiled_losses(data: dict[str, Any]) -> list[float]:
    """Two steps of a compiled rank in a real process."""
    case = benchmark_case("mlp", "tiny")
    plan, comm = hap.Plan.from_json(data), ProcessGroupComm()
    module = HapModule(plan, case.model, comm, CPU, backend="inductor")
    optimizer = case.optimizer(module.parameters())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(module, plan.local_batch(case.batch, comm.rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gloo
def test_compiled_ranks_in_real_processes() -> None:
    case = benchmark_case("mlp", "tiny")
    plan = random_plan(case, 2, 5, least=1)
    model = copy.deepcopy(case.model)
    optimizer = case.optimizer(model.parameters())
    want = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = case.loss_of(model)
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    for losses in spawn(compiled_losses, 2, args=(plan.to_json(),)):
        assert losses == pytest.approx(want, rel=1e-5)


def test_dropout_draws_the_masks_that_eager_draws() -> None:
    case = benchmark_case("mlp", "tiny_dropout")
    eager, inductor = (module_of(case, seed=3, backend=b) for b in compiled.BACKENDS)
    for _ in range(2):
        want, found = gradients(eager, case.batch), gradients(inductor, case.batch)
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-7)
    first = call(inductor, case.batch)
    assert first != call(inductor, case.batch)  # other masks in the next step
    inductor.eval(), eager.eval()
    assert call(inductor, case.batch) == call(inductor, case.batch)
    torch.testing.assert_close(call(inductor, case.batch), call(eager, case.batch))
