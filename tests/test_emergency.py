"""Ranks that a loss leaves save their state: only what is whole, and of one step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from hap.errors import HapError
from hap.ir.batch import call
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder
from hap.runtime.checkpoints.checkpoint_layout import survivable, writers
from hap.runtime.collectives import ProcessGroupComm
from hap.runtime.elastic.emergency import EmergencySave
from hap.runtime.elastic.survivors import SaveDecision, Survivors, forget, new_folder
from hap.runtime.launch import spawn
from tests.checkpoint_runs import Run, data, net
from tests.random_plans import random_plan
from tests.test_checkpoint_plans import same_state
from tests.test_two_axes import random_mesh_plan

LOST_AT = 2


def inputs(plan: Plan) -> list[str]:
    return [i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_is_written_once_or_something_is_lost(seed: int) -> None:
    """By all subsets of ranks; over two mesh axes, replicas of two machines are not combined."""
    for plan in (random_plan(net(), 3, seed), random_mesh_plan(net(), 2, 2, seed)):
        world = range(plan.world_size)
        for present in (p for n in world for p in combinations(world, n + 1)):
            written = writers(plan, inputs(plan), present)
            whole = True
            for tensor in inputs(plan):
                held, count = (torch.zeros(plan.graph.tensors[tensor].shape) for _ in range(2))
                for rank in present:
                    for to, wanted in (
                        (held, True),
                        (count, rank in (written or {tensor: ()})[tensor]),
                    ):
                        for level in plan.levels(tensor, rank):
                            if level:
                                to = to.narrow(level.dim, level.start, level.sizes[level.place])
                        to += wanted
                whole &= bool((held > 0).all())
                assert written is None or bool((count == 1).all()), (tensor, present)
            assert whole or written is None
            assert written is not None or not whole or plan.mesh


def of_ranks(
    folder: Path, steps: dict[int, int | None], needed: Collection[int]
) -> list[SaveDecision]:
    """Let ranks agree that stand still after their steps; all of ``needed`` hold everything."""
    found: list[SaveDecision] = []

    def agree(rank: int, step: int | None) -> None:
        mine = Survivors(folder, rank, 4)
        found.append(mine.agree(step, lambda ranks: set(needed) <= set(ranks)))

    threads = [threading.Thread(target=agree, args=item) for item in steps.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("steps", "needed", "decided"),
    [
        ({0: 7, 1: 7, 3: 7}, (0, 3), SaveDecision(7, (0, 1, 3))),
        ({0: 7, 1: 8, 3: 8}, (1, 3), SaveDecision(8, (1, 3))),  # rank 0 missed the end of step 8
        ({0: 8, 1: 7, 3: 7}, (1, 3), SaveDecision(7, (1, 3))),
        ({0: 7, 1: 8, 3: 8}, (0, 3), SaveDecision(None, ())),
        ({0: None, 1: 7, 3: 7}, (1, 3), SaveDecision(7, (1, 3))),
        ({0: 7, 1: None, 3: 7}, (1, 3), SaveDecision(None, ())),  # in the middle of an update
    ],
)
def test_ranks_agree_on_one_step(
    tmp_path: Path, steps: dict[int, int | None], needed: tuple[int, ...], decided: SaveDecision
) -> None:
    found = of_ranks(new_folder(tmp_path), steps, needed)
    assert found == [decided] * len(steps)


def test_a_rank_that_arrives_during_the_choice_is_part_of_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    (folder / "rank-3.json").write_text("7")

    def holds(ranks: Collection[int]) -> bool:
        (folder / "rank-1.json").write_text("7")
        return True

    assert Survivors(folder, 0, 4).agree(7, holds) == SaveDecision(7, (0, 1, 3))


def test_ranks_of_an_earlier_start_are_shut_out(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    (folder / "part").mkdir()
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"rank-0\.json|0\.tmp"):
        Survivors(folder, 0, 2).agree(3, lambda ranks: True)


def lose(plan_data: dict[str, Any], folder: str, victim: int, in_update: bool) -> None:
    """Train until the victim is killed in a step, in which rank 1 may fail inside its update."""
    run = Run(Plan.from_json(plan_data), ProcessGroupComm())
    rank = run.comm.rank
    with EmergencySave(folder) as last:
        last.follow(run.module, run.optimizer, step=0, scheduler=run.scheduler)
        for step in range(LOST_AT + 2):
            run.optimizer.zero_grad()
            loss = call(run.module, run.plan.local_batch(data(step), rank))
            if rank == victim and step == LOST_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and step == LOST_AT - 1 and in_update:
                run.optimizer.register_step_pre_hook(fail)
            loss.backward()
            run.optimizer.step()
            run.scheduler.step()
            last.ended(step + 1, {"epoch": step})


def fail(*_: object) -> None:
    raise RuntimeError("out of memory in the update")


def test_a_plan_without_replicas_is_not_watched() -> None:
    plans = [random_plan(net(), 3, seed) for seed in range(8)]
    watched = [survivable(plan) for plan in plans]
    assert watched == [bool(holders(plan)) for plan in plans]
    assert {*watched} == {False, True}


def holders(plan: Plan) -> set[tuple[int, ...]]:
    """Return the groups of one or two of three ranks that hold everything."""
    groups = [group for count in (1, 2) for group in combinations(range(3), count)]
    return {group for group in groups if writers(plan, inputs(plan), group) is not None}


def held_by(*groups: tuple[int, ...]) -> Plan:
    """Return a random plan for three ranks whose :func:`holders` are these groups."""
    plans = (random_plan(net(), 3, seed) for seed in range(200))
    return next(plan for plan in plans if holders(plan) == {*groups})


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("groups", "victim", "in_update", "saved"),
    [
        ([(1, 2)], 0, False, LOST_AT),
        # Rank 1's shards are neither those before the update nor those after it.
        ([(0, 1)], 2, True, None),
        # Rank 0 holds everything alone, whatever rank 1 has.
        ([(0,), (0, 1), (0, 2)], 1, True, LOST_AT),
    ],
)
def test_a_lost_rank(
    tmp_path: Path, groups: list[tuple[int, ...]], victim: int, in_update: bool, saved: int | None
) -> None:
    plan = held_by(*groups)
    assert survivable(plan)
    with pytest.raises(HapError):
        spawn(
            lose, 3, args=(plan.to_json(), str(tmp_path), victim, in_update),
            timeout_s=120, grace_s=60,
        )  # fmt: skip
    steps = CheckpointFolder(tmp_path).steps()
    if in_update and saved:
        assert len(steps) == 1
        saved = steps[0]  # rank 0 had ended the step in which rank 1 failed, or not
    assert steps == ([] if saved is None else [saved])
    if saved is None:
        return
    run, reference = Run(None, shift=1.0), Run(None)
    reference.train(0, saved)
    assert run.load(tmp_path).extra == {"epoch": saved - 1}
    same_state(run, reference)
    assert run.train(saved, saved + 2) == pytest.approx(reference.train(saved, saved + 2), abs=1e-9)
