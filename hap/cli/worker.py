"""Train by a plan file: as one rank of several, or with all ranks on this machine."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from hap import api
from hap.capture.model_file import model_file_of
from hap.cli.terminal import OnStep, step_line
from hap.errors import PlanError
from hap.ir.plan import Plan
from hap.runtime.launch import init_from_env, launch_lines, report, spawn


def run_as_rank(
    path: str, steps: int, extra: tuple[str, ...], backend: str = "eager", log: str = ""
) -> None:
    """Train as the rank that the environment names; rank 0 prints the steps.

    Raises:
        InputError: The environment is incomplete.
        PlanError: The plan is for another number of ranks.
    """
    plan = Plan.load(path)
    world = init_from_env()
    try:
        check_world_size(plan, world.size)
        _train(plan, steps, extra, _print_step, backend, log)
    finally:
        dist.destroy_process_group()


def run_here(
    path: str, nproc: int, steps: int, extra: tuple[str, ...], on_step: OnStep,
    backend: str = "eager", log: str = "",
) -> None:  # fmt: skip
    """Train with ``nproc`` ranks on this machine, on a GPU each if it has so many, else on CPUs.

    Raises:
        PlanError: The plan is for another number of ranks, or names no model file.
        ModelError: The model file cannot be used.
        HapError: A rank failed.
    """
    plan = Plan.load(path)
    check_world_size(plan, nproc)
    model_file_of(plan)  # a mistake in it is told here, once, and not by a rank
    group = "nccl" if torch.cuda.device_count() >= nproc else "gloo"

    def heard(rank: int, step: Any) -> None:
        on_step(*step)

    args = (path, steps, extra, backend, log)
    spawn(train_rank, nproc, args=args, backend=group, on_report=heard)


def train_rank(
    path: str, steps: int, extra: tuple[str, ...], backend: str = "eager", log: str = ""
) -> None:
    """A spawned rank's part; rank 0 reports ``(step, loss, seconds)`` to the parent."""
    _train(Plan.load(path), steps, extra, lambda *step: report(step), backend, log)


def check_world_size(plan: Plan, size: int) -> None:
    if size != plan.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, this run has {size}",
            hint=f"start {plan.world_size} ranks, or plan anew for a cluster of {size} devices",
        )


def machine_lines(
    plan: Plan, path: str, steps: int, extra: tuple[str, ...], backend: str = "eager",
    log: str = "",
) -> str:  # fmt: skip
    """The torchrun and srun lines that run a plan on the machines of its cluster."""
    command = ["hap", "run", path, "--steps", str(steps)]
    command += ["--backend", backend] if backend != "eager" else []
    command += ["--log", log] if log else []
    command += ["--", *extra] if extra else []
    nodes = [(node, len(plan.cluster.ranks(node))) for node in plan.cluster.nodes]
    return launch_lines(command, nodes)


def _train(
    plan: Plan, steps: int, extra: tuple[str, ...], on_step: OnStep, backend: str, log: str
) -> None:
    sys.argv = [plan.source.path, *extra]  # what the model file may read
    first = dist.get_rank() == 0
    told = on_step if first else _ignore
    api.train(plan, model_file_of(plan), steps=steps, on_step=told, backend=backend, log=log)


def _print_step(step: int, loss: float, seconds: float) -> None:
    print(step_line(step, loss, seconds), flush=True)


def _ignore(step: int, loss: float, seconds: float) -> None:
    """The loss is the same on all ranks: one is enough to hear of it."""
