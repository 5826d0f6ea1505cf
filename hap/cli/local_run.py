"""``hap run --nproc``: all ranks on this machine, started again when some are lost."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from hap.capture.model_file import model_file_of
from hap.cli.terminal import OnStep
from hap.cli.worker import RunJob, check_world_size, train_rank
from hap.ir.plan import Plan
from hap.launchers import started_as
from hap.part_plans import PartPlans
from hap.runtime.checkpoints.checkpoint_layout import survivable
from hap.runtime.elastic.emergency import LONGEST_S
from hap.runtime.elastic.notice import SavedAndEnded
from hap.runtime.launch import GRACE_S, spawn
from hap.runtime.rank_failures import RankDiedError, RankError


def run_here(job: RunJob, nproc: int, on_step: OnStep) -> None:
    """Train with ``nproc`` ranks on this machine, on a GPU each if possible, else on CPUs.

    Lost ranks are started again, up to ``job.max_restarts`` times, and resume from the newest
    checkpoint. A device whose rank is lost twice without a step in between is left out.

    Raises:
        PlanError: The plan is for another number of ranks, or names no model file.
        ModelError: The model file cannot be used.
        HapError: A rank failed.
        SavedAndEnded: There was a SIGTERM.
    """
    plan = Plan.load(job.path)
    check_world_size(plan, nproc)
    with started_as(job.argv(plan)):
        model_file_of(plan)  # reports a mistake in the file once, here, not once per rank
    names = tuple(device.name for device in plan.cluster.devices)
    last = ""
    for left in range(job.max_restarts, -1, -1):
        trained = _Steps(on_step)
        try:
            _once(job, len(names), trained)
            return
        except (RankDiedError, RankError) as failure:
            mistaken = failure.exit_code == 2 and not trained.any  # a user's mistake stays one
            if mistaken or trained.noticed or not left:
                raise
            name = names[failure.rank]
            job, names = _again(job, names, failure, twice=name == last and not trained.any)
            last = name
            job = replace(job, again=job.again or trained.any)


class _Steps:
    """Hears the steps of one start, and whether there was a SIGTERM."""

    def __init__(self, on_step: OnStep) -> None:
        self._on_step, self.any, self.noticed = on_step, False, False

    def __call__(self, rank: int, step: tuple[int, float, float]) -> None:
        self.any = True
        self._on_step(*step)


def _again(
    job: RunJob, names: tuple[str, ...], failure: RankDiedError | RankError, *, twice: bool
) -> tuple[RunJob, tuple[str, ...]]:
    """Return the job of the next start, and its devices."""
    assert job.checkpoints is not None
    folder, name = job.checkpoints.folder, names[failure.rank]
    text = f"{name} was lost ({failure.what.partition(chr(10))[0]}); "
    job = replace(job, checkpoints=job.checkpoints.again())
    if twice and len(names) > 1:
        names = tuple(other for other in names if other != name)
        plans = PartPlans(job.path, Path(folder) / "plans")
        with started_as(job.argv(plans.whole)):
            job = replace(job, path=str(plans.file(names)))
        text += f"this is the second time, so going on without it, by {job.path}"
        names = tuple(device.name for device in Plan.load(job.path).cluster.devices)
    else:
        text += "starting all ranks again"
    print(text, file=sys.stderr, flush=True)
    return job, names


def _once(job: RunJob, nproc: int, steps: _Steps) -> None:
    """Start all ranks and wait for them; SIGTERM is passed on to them."""
    plan = Plan.load(job.path)
    gpus = torch.cuda.device_count()
    group = "nccl" if gpus >= nproc else "gloo"
    text = f"{nproc} rank{'s' * (nproc > 1)} under {group} on {'GPUs' if group == 'nccl' else 'the CPU'}"
    planned = Counter(d.kind for d in plan.cluster.devices if not d.kind.endswith("cpu"))
    if group == "gloo" and planned:
        kinds = ", ".join(f"{count} {kind}" for kind, count in planned.items())
        text += f": the plan is for {kinds}, and this machine has {gpus} GPUs for them"
    print(f"{text}; starting, which imports torch", file=sys.stderr, flush=True)
    pids: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if steps.noticed or len(pids) < nproc:  # a second one, or no rank has a step to save
            raise SystemExit(128 + number)
        steps.noticed = True
        _send(pids, number)

    before = signal.signal(signal.SIGTERM, pass_on) if job.checkpoints else None
    try:
        ended = spawn(
            train_rank, nproc, args=(job,), backend=group, on_report=steps,
            devices=plan.device_names,
            before_rank=lambda rank, pid: pids.append(pid),
            grace_s=LONGEST_S if job.checkpoints and survivable(plan) else GRACE_S,
        )  # fmt: skip
    except RankDiedError as death:
        if steps.noticed and death.code == -signal.SIGTERM:  # this rank had not begun to train
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if ended[0] is not None:
        ending = SavedAndEnded(ended[0])
        print(ending, file=sys.stderr, flush=True)
        raise ending


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended, which its launcher sees
