"""Train a planned model file: module, optimizer, data, checkpoints and the log of one rank."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist

from hap.api import compile
from hap.capture.model_file import ModelFile, model_file_of, with_weights
from hap.capture.user_optimizer import default_optimizer, examine, make_optimizer
from hap.errors import InputError, PlanError
from hap.ir.batch import Batch, call
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plan import Plan
from hap.runtime.agreement import check_batch
from hap.runtime.checkpoints.checkpoint import Saved, load, save, wait_for_saves
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.checkpoints.periodic_saves import PeriodicSaves
from hap.runtime.elastic.emergency import EmergencySave
from hap.runtime.elastic.notice import Notice, SavedAndEnded, forks_without_notice
from hap.runtime.hap_module import GradScaler
from hap.runtime.launch import init_from_env
from hap.runtime.replicas import EVERY, equalize, on_unlike_gpus
from hap.runtime.run_logger import RunLogger
from hap.slow_devices import Decision, SlowDevices


class Trainer:
    """One rank's training of a planned model file: module, optimizer and data.

    Create it on every rank, inside a process group, or under torchrun or srun.

    Args:
        backend: as in :func:`hap.compile`.
        check: as there; also compare the file's optimizer and precisions with the plan's.

    Raises:
        PlanError: the model file or the world size differs from the plan's.
        ModelError: the optimizer does not train the shards as it would the whole parameters.
    """

    def __init__(
        self, plan: Plan, file: ModelFile | None = None, *, backend: str = "eager",
        check: bool = True,
    ) -> None:  # fmt: skip
        if plan.world_size > 1 and not dist.is_initialized():
            init_from_env(devices=plan.device_names)
        self._file = file or model_file_of(plan)
        seed = self._file.seed
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed % 2**32)
        self._plan = plan
        self.batch_size = plan.batch_size
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        model = with_weights(self._file.model(), self._file)
        make = self._file.optimizer or default_optimizer
        if check:
            _check_settings(plan, self._file, examine(make, model))
        self.module = compile(
            model, plan, loss=self._file.loss, seed=self._file.seed, backend=backend, check=check
        )
        self._optimizer = make_optimizer(make, self.module)
        self.loaded: Saved | None = None
        self._scaler = GradScaler(self.module, enabled=_underflows(plan))
        self._compares, self._done = check, 0
        self._drifts = on_unlike_gpus(self.module)

    @property
    def seeks(self) -> bool:
        """Can the model file begin with any batch: has its ``batches`` an argument ``start``?"""
        make = self._file.batches
        return make is not None and "start" in inspect.signature(make).parameters

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Global batches: the file's ``batches()``, over and over, or ``batch()`` each time.

        Args:
            start: the number of the first batch; other than 0 only if the file :attr:`seeks`.
        """
        while True:
            made: Iterable[Batch]
            if self._file.batches is None:
                made = (self._file.batch(),)
            else:
                made = self._file.batches(*(start,) if self.seeks else ())
            for batch in made:
                yield batch
                start += 1

    def save(self, folder: str, step: int, keep: int | None = None) -> None:
        """Save a checkpoint, as :func:`hap.save` does."""
        save(self.module, self._optimizer, folder, step=step, scaler=self._scaler, keep=keep)

    def load(self, folder: str) -> Saved:
        """Load a checkpoint, as :func:`hap.load` does."""
        self.loaded = load(self.module, self._optimizer, folder, scaler=self._scaler)
        return self.loaded

    def first_says(self, text: str) -> str:
        """Return what the first rank passes; every rank must call it."""
        return self.module._comm.texts(text)[0]

    def follow(self, last: EmergencySave, done: int) -> None:
        """Have what is trained here watched, from the step ``done`` on."""
        last.follow(self.module, self._optimizer, step=done, scaler=self._scaler)

    def step(self, batch: Batch) -> float:
        """Train on this rank's part of a global batch; return the global loss.

        Raises:
            InputError: the ranks' first global batches differ; with ``check`` only.
        """
        if self._compares:
            check_batch(batch, self.module._comm)
            self._compares = False
        self._optimizer.zero_grad()
        if self._drifts and self._done and self._done % EVERY == 0:
            equalize(self.module)
        loss = call(self.module, self._plan.local_batch(batch, self.rank))
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._done += 1
        return loss.item()  # type: ignore[no-any-return]


def _check_settings(plan: Plan, file: ModelFile, optimizer: OptimizerKind) -> None:
    """Raise ``PlanError`` if the model file has other settings than the plan."""
    recipe = plan.recipe
    for name, planned, now in (
        ("optimizer", str(plan.optimizer), str(optimizer)),
        ("autocast", recipe.autocast, file.autocast),
        (
            "float32_matmul_precision",
            recipe.float32_matmul_precision,
            file.float32_matmul_precision,
        ),
    ):
        if now != planned:
            raise PlanError(
                f"`{name}` of the model file is {now or 'None'}, that of the plan {planned or 'None'}",
                where=file.path,
                hint="plan anew, or go back to the file that the plan was made for",
            )


def _underflows(plan: Plan) -> bool:
    """Return whether gradients are in float16, which underflows, of parameters that are not."""
    tensors = plan.graph.tensors
    stored = {tensors[i.tensor].dtype for i in plan.graph.role("parameter")}
    return any(t.dtype == "float16" for t in tensors.values()) and "float16" not in stored


def train(
    plan: Plan,
    file: ModelFile | None = None,
    *,
    steps: int,
    on_step: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
    backend: str = "eager",
    checkpoints: Checkpoints | None = None,
    log: str = "",
    adapt: bool = False,
    check: bool = True,
) -> list[float]:
    """Train a planned model file on this rank by a :class:`Trainer`; return the losses.

    Args:
        steps: in all, with those of the checkpoint that training resumes from.
        log: a file to write each step to, as :mod:`hap.run_log` describes.
        backend: what runs the rank's graphs, as in :func:`compile`.
        on_step: called with (step from 1, global loss, seconds of the step).
        checkpoints: where and how often to save, and what to resume from. With them, SIGTERM
            ends training after the current step, which is saved.
        check: as in :func:`compile`.
        adapt: plan anew when a device becomes slower or faster, as :mod:`hap.slow_devices` decides;
            needs ``checkpoints``.

    Raises:
        SavedAndEnded: there was a SIGTERM on some rank.
        InputError: ``adapt`` without ``checkpoints``.
        PlanError, ModelError, CheckpointError: as :func:`compile` and :class:`Trainer` raise them.
    """
    if adapt and checkpoints is None:
        raise InputError(
            "adapt without checkpoints", hint="give checkpoints: the new plan resumes from them"
        )
    with forks_without_notice() if checkpoints else nullcontext():
        return _trained(
            _Run(plan, file, backend, check), steps, on_step, checkpoints, log, adapt=adapt
        )


def _trained(
    run: _Run, steps: int, on_step: Callable[[int, float, float], None],
    checkpoints: Checkpoints | None, log: str, *, adapt: bool,
) -> list[float]:  # fmt: skip
    last = EmergencySave(checkpoints.folder, checkpoints.keep) if checkpoints else None
    if last:
        last.forget(run.trainer.module)
    done, batches = checkpoints.resumed(run.trainer) if checkpoints else (0, run.trainer.batches())
    if done >= steps and run.trainer.rank == 0:
        print(f"{steps} steps are done already: ask for more to go on", file=sys.stderr, flush=True)
    run.measure(log, done, adapt)
    run.switch_s = 2 * (time.perf_counter() - run.begun)
    saves = PeriodicSaves(run.save, run.trainer.rank == 0, checkpoints) if checkpoints else None
    losses: list[float] = []
    with last or nullcontext(), Notice() if checkpoints else nullcontext() as notice:
        run.save_losses(last, done)
        for number, batch in enumerate(itertools.islice(batches, max(steps - done, 0)), done + 1):
            start = time.perf_counter()
            losses.append(run.trainer.step(batch))
            seconds = time.perf_counter() - start
            if last:
                last.ended(number, {"loss": losses[-1], "seconds": seconds})
            on_step(number, losses[-1], seconds)
            new = run.stepped(number, losses[-1], seconds, steps - number)
            if saves is None or notice is None:
                continue
            ending = notice.given()
            saves.ended(number, losses[-1], must=ending or new is not None or number == steps)
            if ending and number < steps:
                raise SavedAndEnded(number)
            if new:
                run.go_on(new, saves.folder, number)
                run.save_losses(last, number)
    return losses


class _Run:
    """One rank's run: its trainer and log, which a new plan replaces."""

    def __init__(self, plan: Plan, file: ModelFile | None, backend: str, check: bool) -> None:
        self.begun = time.perf_counter()
        self._file, self._backend = file or model_file_of(plan), backend
        self._plan = plan
        self.trainer = Trainer(plan, self._file, backend=backend, check=check)
        self.switch_s = 0.0
        self._logger: RunLogger | None = None
        self._watch: SlowDevices | None = None
        self._log = ""

    def measure(self, log: str, done: int, adapt: bool) -> None:
        """Measure the steps from now on, if there is a log or plans are adapted."""
        self._log = log
        if log or adapt:
            loaded = self.trainer.loaded
            self._logger = RunLogger(
                log, self.trainer.module, done, loaded.extra if loaded else None
            )
        if adapt:
            self._watch = SlowDevices(self._plan)

    def save(self, folder: str, step: int, keep: int | None) -> None:
        """Begin to save a checkpoint."""
        self.trainer.save(folder, step, keep)

    def save_losses(self, last: EmergencySave | None, done: int) -> None:
        """Let the ranks that a loss leaves save their state, from the step ``done`` on."""
        if last:
            self.trainer.follow(last, done)

    def stepped(self, number: int, loss: float, seconds: float, left: int) -> Plan | None:
        """Log a step; return the plan to go on with if speeds have changed and it pays."""
        if self._logger is None:
            return None
        ranks = self._logger.step(number, loss, seconds)
        slowness = self._watch.changed(ranks) if self._watch and left else None
        if self._watch is None or slowness is None:
            return None
        told: list[Decision | None] = [None]
        if self.trainer.rank == 0:
            decision = self._watch.decide(slowness, left, self.switch_s)
            print(f"after step {number}: {decision.text}", file=sys.stderr, flush=True)
            told[0] = decision
        if dist.is_initialized():
            dist.broadcast_object_list(told, 0)
        assert told[0] is not None
        self._watch.follow(slowness, told[0].plan)
        return told[0].plan

    def go_on(self, plan: Plan, folder: str, number: int) -> None:
        """Go on by another plan, from the checkpoint that has just been saved."""
        wait_for_saves()
        self._plan = plan
        self.trainer = Trainer(plan, self._file, backend=self._backend, check=False)
        self.trainer.load(folder)
        self._logger = RunLogger(self._log, self.trainer.module, number)
