"""What does the runtime itself cost? A planned step on one rank against the plain eager step.

    python -m benchmarks.one_rank             --rounds 9 by default
    python -m benchmarks.one_rank --quick     tiny models: does it run at all?

A cluster of one device leaves nothing to exchange, so all that differs from eager PyTorch is
what capturing and emitting did to the step. Both contenders take turns in one process, each
going first in every other round; a step is forward, backward and optimizer, on one thread. The
seconds are processor time, which other programs on the machine disturb less than wall time; the
ratio is the median of the ratios within one round.

Each case has a process of its own, whose allocator keeps freed memory, as the one for GPUs
does. By glibc's default each block of 32 MiB or more is returned and mapped anew, page by page,
in every step: which of the two is hit harder by that is a matter of luck (``--default-malloc``).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import nn

import hap
from benchmarks.models import bert, gpt2, mlp, vgg19, vit
from hap.api import call
from hap.capture import Step, flatten
from hap.optimizer import MakeOptimizer, default_optimizer
from hap.units import format_seconds

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
TARGET = 1.05
SHORTEST_S = 0.05
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of a size whose step takes 0.1 to 1 s on one core."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: MakeOptimizer = default_optimizer
    loss: Callable[[Any, Any], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Processor seconds per step of each round, and both losses of the first step."""

    name: str
    planned_s: list[float]
    eager_s: list[float]
    first_losses: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(p / e for p, e in zip(self.planned_s, self.eager_s, strict=True))


VIT = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 1024}
VGG = {"stages": ((32,) * 2, (64,) * 2, (128,) * 2), "pooled": 4, "hidden": 512}
GPT2 = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 4096, "seq": 64}

CASES = (
    Case(name="mlp, dropout", model=lambda: mlp.build(512, 2048, 4, dropout=0.1),
         batch=lambda: mlp.inputs(256, 512), loss=mlp.loss),
    Case(name="bert", model=bert.small, batch=bert.small_batch, optimizer=bert.optimizer),
    Case(name="bert, dropout", model=lambda: bert.build(**GPT2, dropout=0.1),
         batch=bert.small_batch, optimizer=bert.optimizer),
    Case(name="gpt2", model=gpt2.small, batch=gpt2.small_batch, optimizer=gpt2.optimizer),
    Case(name="gpt2, dropout", model=lambda: gpt2.build(**GPT2, dropout=0.1),
         batch=gpt2.small_batch, optimizer=gpt2.optimizer),
    Case(name="vit", model=lambda: vit.build(**VIT, dropout=0.0),
         batch=lambda: vit.inputs(16), optimizer=vit.optimizer),
    Case(name="vgg", model=lambda: vgg19.build(**VGG, dropout=0.0),
         batch=lambda: vgg19.inputs(32), optimizer=vgg19.optimizer),
)  # fmt: skip

QUICK = (
    Case(name="mlp", model=mlp.tiny, batch=mlp.tiny_batch, loss=mlp.loss),
    Case(name="vgg", model=vgg19.tiny, batch=vgg19.tiny_batch, optimizer=vgg19.optimizer),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Race every case, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models only")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--default-malloc", action="store_true", help="leave the allocator be")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # race this one, print its figures
    options = parser.parse_args(arguments)
    cases = QUICK if options.quick else CASES
    if options.case:
        case = next(c for c in cases if c.name == options.case)
        print(json.dumps(asdict(race(case, options.rounds))))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            flags = ["--case", case.name, "--rounds", str(options.rounds)]
            flags += ["--quick"] if options.quick else []
            results.append(in_process(flags, {} if options.default_malloc else KEEP_MEMORY))
            progress.advance(task)
    console.print(table(results))
    if options.json:
        figures = [asdict(result) | {"ratio": result.ratio} for result in results]
        options.json.write_text(json.dumps(figures, indent=1))


def in_process(flags: list[str], environment: dict[str, str]) -> Result:
    """The result of this module run with some flags, in a new process."""
    words = [sys.executable, "-m", "benchmarks.one_rank", *flags]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def race(case: Case, rounds: int) -> Result:
    """Both contenders from the same weights on the same batch, taking turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    planned, eager = contenders(case)
    seconds: tuple[list[float], list[float]] = ([], [])
    losses = [planned(), eager()]
    for number in range(1, WARM_UP + rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.process_time()
            (planned, eager)[which]()
            took = time.process_time() - start
            if number >= WARM_UP:
                seconds[which].append(took)
    return Result(
        name=case.name, planned_s=seconds[0], eager_s=seconds[1], first_losses=losses
    )  # fmt: skip


def contenders(case: Case) -> tuple[Callable[[], float], Callable[[], float]]:
    """The planned and the eager training step, each with parameters of its own."""
    model, batch = case.model(), case.batch()
    plan = hap.plan(model, batch, "local:1", loss=case.loss, optimizer=case.optimizer)
    mine = plan.local_batch(batch, 0)
    eager = Step(copy.deepcopy(model), batch, case.loss)
    planned = hap.compile(model, plan, loss=case.loss)
    return (
        trainer(planned, lambda: call(planned, mine), case.optimizer),
        trainer(eager, lambda: eager(*flatten(batch).values()), case.optimizer),
    )


def trainer(
    module: nn.Module, loss_of: Callable[[], torch.Tensor], make: MakeOptimizer
) -> Callable[[], float]:
    """A training step of a module; returns the loss."""
    optimizer = make(module.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def table(results: Sequence[Result]) -> Table:
    """Medians and ratios against the target."""
    out = Table(box=None, title="one training step on one rank", title_justify="left")
    for name in ("model", "planned", "eager", "ratio", "lowest", "highest"):
        out.add_column(name, justify="left" if name == "model" else "right")
    out.add_column("first losses")
    out.add_column(f"target {TARGET:g}")
    for r in results:
        ratios = sorted(p / e for p, e in zip(r.planned_s, r.eager_s, strict=True))
        out.add_row(
            r.name, format_seconds(statistics.median(r.planned_s)),
            format_seconds(statistics.median(r.eager_s)), f"{r.ratio:.3f}",
            f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}", "{:.6f} {:.6f}".format(*r.first_losses),
            _verdict(r),
        )  # fmt: skip
    return out


def _verdict(r: Result) -> str:
    if statistics.median(r.eager_s) < SHORTEST_S:
        return "too short a step to say"
    return "met" if r.ratio <= TARGET else "[bold red]missed[/]"


if __name__ == "__main__":
    main()
