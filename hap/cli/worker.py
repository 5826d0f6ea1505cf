"""Train by a plan file: as one rank of several, or with all ranks on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hap import api
from hap.capture.model_file import model_file_of
from hap.cli.terminal import OnStep, step_line
from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.launch import init_from_env, launch_lines, report, spawn


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The arguments of ``hap run``.

    Attributes:
        path: the plan file.
        steps: counted from the start of training.
        extra: ``sys.argv`` of the model file, but for its name.
        backend: runs the ranks' graphs, as in :func:`hap.compile`.
        checkpoints: where and how often to save, and what to resume from.
        log: a file for a line per step; empty for none.
    """

    path: str
    steps: int
    extra: tuple[str, ...] = ()
    backend: str = "eager"
    checkpoints: Checkpoints | None = None
    log: str = ""


def run_as_rank(job: RunJob) -> None:
    """Train as the rank that the environment names; rank 0 prints the steps.

    Raises:
        InputError: The environment is incomplete.
        PlanError: The plan is for another number of ranks.
    """
    plan = Plan.load(job.path)
    world = init_from_env()
    try:
        check_world_size(plan, world.size)
        _train(plan, job, _print_step)
    finally:
        dist.destroy_process_group()


def run_here(job: RunJob, nproc: int, on_step: OnStep) -> None:
    """Train with ``nproc`` ranks on this machine, on a GPU each if possible, else on CPUs.

    Raises:
        PlanError: The plan is for another number of ranks, or names no model file.
        ModelError: The model file cannot be used.
        HapError: A rank failed.
    """
    plan = Plan.load(job.path)
    check_world_size(plan, nproc)
    model_file_of(plan)  # reports a mistake in the file once, here, not once per rank
    group = "nccl" if torch.cuda.device_count() >= nproc else "gloo"

    def heard(rank: int, step: Any) -> None:
        on_step(*step)

    spawn(train_rank, nproc, args=(job,), backend=group, on_report=heard)


def train_rank(job: RunJob) -> None:
    """A spawned rank's part; rank 0 reports ``(step, loss, seconds)`` to the parent."""
    _train(Plan.load(job.path), job, lambda *step: report(step))


def check_world_size(plan: Plan, size: int) -> None:
    if size != plan.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, this run has {size}",
            hint=f"start {plan.world_size} ranks, or plan anew for a cluster of {size} devices",
        )


def machine_lines(plan: Plan, job: RunJob) -> str:
    """The torchrun and srun lines that run a plan on the machines of its cluster."""
    command = ["hap", "run", job.path, "--steps", str(job.steps)]
    command += ["--backend", job.backend] if job.backend != "eager" else []
    command += job.checkpoints.options() if job.checkpoints else []
    command += ["--log", job.log] if job.log else []
    command += ["--", *job.extra] if job.extra else []
    nodes = [(node, len(plan.cluster.ranks(node))) for node in plan.cluster.nodes]
    return launch_lines(command, nodes)


def _train(plan: Plan, job: RunJob, on_step: OnStep) -> None:
    sys.argv = [plan.source.path, *job.extra]  # what the model file may read
    first = dist.get_rank() == 0
    api.train(
        plan, model_file_of(plan), steps=job.steps, on_step=on_step if first else _ignore,
        backend=job.backend, checkpoints=job.checkpoints, log=job.log,
    )  # fmt: skip


def _print_step(step: int, loss: float, seconds: float) -> None:
    print(step_line(step, loss, seconds), flush=True)


def _ignore(step: int, loss: float, seconds: float) -> None:
    """Ignore a step's loss: it is the same on all ranks, and rank 0 reports it."""
