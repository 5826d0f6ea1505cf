"""`make demo`: plan a BERT for four unlike devices, then train it beside plain DDP.

The four devices are processes on this machine, limited to 80, 80, 20 and 20 % of a core.
Both contenders take turns, step by step, in the same processes, so that other work on the
machine slows both: read the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks.contenders.base import Setting
from benchmarks.contenders.even_ddp import EvenDDP
from hap import api
from hap.capture.model_file import load_model_file, model_file_of
from hap.cli.plan_screen import plan_screen
from hap.cli.terminal import console, emit
from hap.ir.plan import Plan
from hap.runtime.launch import report, spawn
from hap.runtime.testbed.quotas import cpu_quotas
from hap.training import Trainer

HERE = Path(__file__).parent
FRACTIONS = (0.8, 0.8, 0.2, 0.2)
WARM_UP = 2


def main(arguments: list[str] | None = None) -> None:
    """Plan, train, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(HERE / "models" / "bert.py:small"))
    parser.add_argument("--cluster", default=str(HERE / "clusters" / "demo4.yaml"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(".demo"))
    options = parser.parse_args(arguments)
    out = console()
    out.print(f"[bold]Planning[/] {Path(options.model).name} for {Path(options.cluster).name}")
    plan = api.plan_file(options.model, options.cluster)
    options.out.mkdir(exist_ok=True)
    file = options.out / "plan.json"
    plan.save(file)
    emit(plan_screen(plan, str(file)))
    ours, ddp = race(file, options.steps, out)
    ratio = statistics.median(d / o for o, d in zip(ours, ddp, strict=True))
    out.print(
        f"\nmedian step: this plan {statistics.median(ours):.2f} s, DDP with equal shares "
        f"{statistics.median(ddp):.2f} s"
    )
    out.print(
        f"predicted for the speeds in {Path(options.cluster).name}: {plan.prediction.step_s:.2f} s; "
        "hap profile measures those of a machine"
    )
    out.print(f"[bold]speed-up over DDP: {ratio:.2f}x[/] (median of ratios within one step)")
    if ratio <= 1:
        out.print("the plan was not faster here: is the machine busy with something else?")


def race(plan: Path, steps: int, out: Console) -> tuple[list[float], list[float]]:
    """Return seconds per step of (the plan, DDP) after the warm-up, with a progress bar."""
    seconds: tuple[list[float], list[float]] = ([], [])
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn())
    with cpu_quotas(FRACTIONS) as quotas, Progress(*columns, console=out) as progress:
        how = "by the kernel" if quotas.enforced else f"by duty cycles ({quotas.reason})"
        out.print(f"\nfour gloo processes at 80, 80, 20, 20 % of a core, enforced {how}")
        task = progress.add_task("training", total=steps + WARM_UP)

        def heard(rank: int, step: tuple[int, float, float, float, float]) -> None:
            number, loss, took, ddp_loss, ddp_took = step
            progress.update(task, completed=number)
            out.print(
                f"  step {number:>2}   this plan: loss {loss:.3f} in {took:5.2f} s"
                f"   DDP: loss {ddp_loss:.3f} in {ddp_took:5.2f} s   {ddp_took / took:.2f}x"
                + ("   (warm-up)" if number <= WARM_UP else "")
            )
            if number > WARM_UP:
                seconds[0].append(took)
                seconds[1].append(ddp_took)

        spawn(_rank, len(FRACTIONS), args=(str(plan), steps + WARM_UP),
              before_rank=quotas.place, on_report=heard)  # fmt: skip
    return seconds


def _rank(path: str, steps: int) -> None:
    plan = Plan.load(path)
    file = model_file_of(plan)
    trainer = Trainer(plan, file)
    ddp = EvenDDP(Setting(file=load_model_file(f"{file.path}:{file.function}")))
    batches = trainer.batches()
    for number in range(1, steps + 1):
        batch = next(batches)
        loss, took = _timed(lambda batch=batch: trainer.step(batch))  # type: ignore[misc]
        ddp_loss, ddp_took = _timed(lambda batch=batch: ddp.step(batch))  # type: ignore[misc]
        if dist.get_rank() == 0:
            report((number, loss, took, ddp_loss, ddp_took))


def _timed(step: Callable[[], float]) -> tuple[float, float]:
    """Return (loss, seconds until the last rank is done)."""
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    dist.barrier()
    return loss, time.perf_counter() - start


if __name__ == "__main__":
    main()
