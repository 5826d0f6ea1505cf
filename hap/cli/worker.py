"""Train by a plan file: as one rank of several, or with all ranks on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch.distributed as dist

from hap.capture.model_file import model_file_of
from hap.cli.terminal import OnStep, print_step
from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.elastic.notice import SavedAndEnded
from hap.runtime.launch import init_from_env, leave_group, report
from hap.runtime.launch_lines import batch_script, elastic_lines, launch_lines
from hap.runtime.peer_errors import losses_told
from hap.training import train


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
        max_restarts: how often lost ranks are started again.
        elastic: go on with the devices that are there.
        adapt: plan anew when a device becomes slower or faster.
        again: the ranks were started before in this run, and checked that the model is the plan's.
    """

    path: str
    steps: int
    extra: tuple[str, ...] = ()
    backend: str = "eager"
    checkpoints: Checkpoints | None = None
    log: str = ""
    max_restarts: int = 0
    elastic: bool = False
    adapt: bool = False
    again: bool = False

    def argv(self, plan: Plan) -> list[str]:
        """``sys.argv`` of the model file: with the arguments of this run, or else with the plan's."""
        return [plan.source.path, *self.extra] if self.extra else plan.source.argv


def run_as_rank(job: RunJob) -> None:
    """Train as the rank that the environment names; rank 0 prints the steps.

    Raises:
        InputError: The environment is incomplete.
        PlanError: The plan is for another number of ranks.
        PeerLostError: Another rank is lost.
        SavedAndEnded: There was a SIGTERM.
    """
    plan = Plan.load(job.path)
    world = init_from_env(devices=plan.device_names)
    try:
        check_world_size(plan, world.size)
        with losses_told(f"rank {world.rank}"):
            train_and_print(plan, job)
    except SavedAndEnded:  # all ranks raise it
        leave_group()
        raise
    # After another error this would wait for ranks that wait for this one, before its message is printed.
    leave_group()


def train_and_print(plan: Plan, job: RunJob) -> None:
    """Train on this rank of a process group; rank 0 prints the steps."""
    try:
        _train(plan, job, print_step)
    except SavedAndEnded as ending:
        if dist.get_rank() == 0:
            print(ending, file=sys.stderr, flush=True)
        raise


def train_rank(job: RunJob) -> int | None:
    """A spawned rank's part; rank 0 reports ``(step, loss, seconds)`` to the parent.

    Returns:
        The step that was saved if a notice ended the run, else ``None``.
    """
    try:
        _train(Plan.load(job.path), job, lambda *step: report(step))
    except SavedAndEnded as ending:
        return ending.step
    return None


def check_world_size(plan: Plan, size: int) -> None:
    if size != plan.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, this run has {size}",
            hint=f"start {plan.world_size} ranks, or plan anew for a cluster of {size} devices",
        )


def machine_lines(plan: Plan, job: RunJob) -> str:
    """The torchrun and srun lines that run a plan on the machines of its cluster."""
    nodes = [(node, len(plan.cluster.ranks(node))) for node in plan.cluster.nodes]
    if job.elastic:
        return elastic_lines(_command(job), nodes, job.max_restarts)
    lines = launch_lines(_command(job), nodes)
    if job.checkpoints is None:
        return lines
    resuming = replace(job, checkpoints=job.checkpoints.again())
    script = batch_script(_command(resuming), nodes)
    return f"{lines}\n\n# sbatch: a script that is queued again and resumes\n{script}"


def _command(job: RunJob) -> list[str]:
    words = ["hap", "run", job.path, "--steps", str(job.steps)]
    words += ["--backend", job.backend] if job.backend != "eager" else []
    words += job.checkpoints.options() if job.checkpoints else []
    words += ["--log", job.log] if job.log else []
    words += ["--elastic"] if job.elastic else []
    words += ["--adapt"] if job.adapt else []
    return [*words, "--", *job.extra] if job.extra else words


def _train(plan: Plan, job: RunJob, on_step: OnStep) -> None:
    sys.argv = job.argv(plan)
    first = dist.get_rank() == 0
    if first and not job.again:
        print("comparing the model with the plan", file=sys.stderr, flush=True)
    train(
        plan, model_file_of(plan), steps=job.steps, on_step=on_step if first else _ignore,
        backend=job.backend, checkpoints=job.checkpoints, log=job.log,
        adapt=job.adapt, check=not job.again,
    )  # fmt: skip


def _ignore(step: int, loss: float, seconds: float) -> None:
    """Ignore a step's loss: it is the same on all ranks, and rank 0 reports it."""
