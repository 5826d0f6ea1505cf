"""Overhead of the runtime: a planned step on one rank against the plain eager step.

    python -m benchmarks.one_rank                      --rounds 9 by default
    python -m benchmarks.one_rank --backend inductor   compiled ranks against torch.compile
    python -m benchmarks.one_rank --host               tiny models, whose steps are the host's work
    python -m benchmarks.one_rank --quick              a few rounds of two, to test the benchmark

With one device there is no communication, so all differences from eager PyTorch come from
capturing and emitting. The contenders take turns in one process, each
going first in every other round; a step is forward, backward and optimizer, on one thread. The
seconds are processor time, which other programs on the machine disturb less than wall time; the
ratio is the median of the ratios within one round. ``--backend`` may be given twice.

With ``--host`` kernels are so short that launching them decides, as in half precision on a fast GPU.

Each case has its own process, whose allocator keeps freed memory, as the allocator for GPUs
does. By default glibc returns each block of 32 MiB or more and maps it anew, page by page,
in every step; which contender loses more time to that is random (``--default-malloc``).
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
from benchmarks.models import bert, gpt2, mlp, segmenter, vgg19, vit
from hap.capture.tracing import Step
from hap.capture.user_optimizer import MakeOptimizer, default_optimizer
from hap.ir.batch import call, flatten
from hap.units import format_seconds

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
TARGET = 1.03
PAIRS = {"eager": ("planned", "eager"), "inductor": ("planned, inductor", "torch.compile")}
"""Backend -> (name of the planned step, name of its reference)."""

SHORTEST_S = 0.05
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with steps of 0.1 to 1 s on one core."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: MakeOptimizer = default_optimizer
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Per contender, the processor seconds per step of each round, and the first step's loss."""

    name: str
    seconds: dict[str, list[float]]
    first_losses: dict[str, float]

    @property
    def backends(self) -> list[str]:
        return [backend for backend, pair in PAIRS.items() if pair[0] in self.seconds]

    def ratios(self, backend: str) -> list[float]:
        """Return planned over plain, in each round."""
        ours, theirs = (self.seconds[name] for name in PAIRS[backend])
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    def ratio(self, backend: str) -> float:
        return statistics.median(self.ratios(backend))


VIT = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 1024}
VGG = {"stages": ((32,) * 2, (64,) * 2, (128,) * 2), "pooled": 4, "hidden": 512}
GPT2 = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 4096, "seq": 64}

CASES = (
    Case(name="mlp", model=lambda: mlp.build(512, 2048, 4, dropout=0.0),
         batch=lambda: mlp.inputs(256, 512), loss=mlp.loss),
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
    Case(name="segmenter", model=lambda: segmenter.build((16, 32, 64, 128)),
         batch=lambda: segmenter.inputs(8, image=128)),
)  # fmt: skip

HOST = (
    Case(name="bert", model=bert.tiny, batch=bert.tiny_batch, optimizer=bert.optimizer),
    Case(name="gpt2", model=gpt2.tiny, batch=gpt2.tiny_batch, optimizer=gpt2.optimizer),
    Case(name="vit", model=vit.tiny, batch=vit.tiny_batch, optimizer=vit.optimizer),
)

QUICK = (
    Case(name="mlp", model=mlp.tiny, batch=mlp.tiny_batch, loss=mlp.loss),
    Case(name="vgg", model=vgg19.tiny, batch=vgg19.tiny_batch, optimizer=vgg19.optimizer),
    Case(name="segmenter", model=segmenter.tiny, batch=segmenter.tiny_batch),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Race every case, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models only")
    parser.add_argument("--host", action="store_true", help="models that the host's time decides")
    parser.add_argument("--rounds", type=int, help="default: 9, or 60 with --host")
    parser.add_argument("--default-malloc", action="store_true", help="leave the allocator be")
    parser.add_argument("--backend", action="append", choices=list(PAIRS))
    parser.add_argument("--only", action="append", help="this model, not all; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # race this case, print its figures
    options = parser.parse_args(arguments)
    cases = QUICK if options.quick else HOST if options.host else CASES
    options.rounds = options.rounds or (60 if options.host else 9)
    pairs = options.backend or ["eager"]
    if options.case:
        case = next(c for c in cases if c.name == options.case)
        print(json.dumps(asdict(race(case, options.rounds, pairs))))
        return
    cases = [c for c in cases if not options.only or c.name in options.only]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            flags = ["--case", case.name, "--rounds", str(options.rounds)]
            flags += [f"--backend={backend}" for backend in pairs]
            flags += ["--quick"] if options.quick else ["--host"] if options.host else []
            results.append(in_process(flags, {} if options.default_malloc else KEEP_MEMORY))
            progress.advance(task)
    console.print(table(results, least_s=0.0 if options.host else SHORTEST_S))
    if options.json:
        figures = [
            asdict(r) | {"ratios": {backend: r.ratio(backend) for backend in pairs}}
            for r in results
        ]
        options.json.write_text(json.dumps(figures, indent=1))


def in_process(flags: list[str], environment: dict[str, str]) -> Result:
    """Run this module with some flags in a new process, and return its result."""
    words = [sys.executable, "-m", "benchmarks.one_rank", *flags]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def race(case: Case, rounds: int, pairs: Sequence[str]) -> Result:
    """Race all contenders from the same weights on the same batch, taking turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = contenders(case, pairs)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step() for name, step in steps.items()}
    for number in range(1, WARM_UP + rounds):
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            start = time.process_time()
            steps[name]()
            took = time.process_time() - start
            if number >= WARM_UP:
                seconds[name].append(took)
    return Result(name=case.name, seconds=seconds, first_losses=losses)


def contenders(case: Case, pairs: Sequence[str]) -> dict[str, Callable[[], float]]:
    """Return the training steps to compare, by name: the planned and the plain one of each pair."""
    model, batch = case.model(), case.batch()
    plan = hap.plan(
        model, batch, "local:1", loss=case.loss, optimizer=case.optimizer, fixed=case.fixed
    )
    mine = plan.local_batch(batch, 0)

    def planned(backend: str) -> Callable[[], float]:
        module = hap.compile(model, plan, loss=case.loss, backend=backend)
        return trainer(module, lambda: call(module, mine), case.optimizer)

    def plain(backend: str) -> Callable[[], float]:
        module: nn.Module = Step(copy.deepcopy(model), batch, case.loss)
        if backend == "inductor":
            module = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
        return trainer(module, lambda: module(*flatten(batch).values()), case.optimizer)

    steps = {}
    for backend in pairs:
        ours, theirs = PAIRS[backend]
        steps[ours], steps[theirs] = planned(backend), plain(backend)
    return steps


def trainer(
    module: nn.Module, loss_of: Callable[[], torch.Tensor], make: MakeOptimizer
) -> Callable[[], float]:
    """Return a training step of a module, which returns the loss."""
    optimizer = make(module.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def table(results: Sequence[Result], *, least_s: float = SHORTEST_S) -> Table:
    """Return medians and ratios against the target, a line for each pair."""
    out = Table(box=None, title="one training step on one rank", title_justify="left")
    for name in ("model", "backend", "planned", "plain", "ratio", "lowest", "highest"):
        out.add_column(name, justify="left" if name in ("model", "backend") else "right")
    out.add_column("first losses")
    out.add_column(f"target {TARGET:g}")
    for r in results:
        for backend in r.backends:
            ratios = sorted(r.ratios(backend))
            ours, theirs = PAIRS[backend]
            out.add_row(
                r.name, backend, format_seconds(statistics.median(r.seconds[ours])),
                format_seconds(statistics.median(r.seconds[theirs])), f"{r.ratio(backend):.3f}",
                f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}",
                f"{r.first_losses[ours]:.6f} {r.first_losses[theirs]:.6f}", _verdict(r, backend, least_s),
            )  # fmt: skip
    return out


def _verdict(r: Result, backend: str, least_s: float) -> str:
    if statistics.median(r.seconds[PAIRS[backend][1]]) < least_s:
        return "too short a step to say"
    return "met" if r.ratio(backend) <= TARGET else "[bold red]missed[/]"


if __name__ == "__main__":
    main()
