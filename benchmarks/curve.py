"""Loss curves of a small BERT: a plan on unlike ranks against one device.

    python -m benchmarks.curve                     300 steps, a few minutes on two cores
    python -m benchmarks.curve --png docs/curve.png --json curve.json
    python -m benchmarks.curve --backend inductor  with compiled ranks
    python -m benchmarks.curve --rounding bf16-gradients   with gradients that are rounded

A BERT of 4 layers fills in hidden words of ``benchmarks/data/text.txt``, once in plain PyTorch
and once by a plan for four unlike devices as four gloo processes. Weights, batches and optimizer
are the same, in float32 and without dropout, so the two curves differ only by rounding, which
training amplifies step by step. With ``--rounding``, gradients are also rounded to half precision.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import hap
from benchmarks.models import bert
from hap.ir.half_gradients import ROUNDINGS
from hap.runtime.launch import report, spawn

HERE = Path(__file__).parent
SLOW_LINKS = HERE / "clusters" / "slow_links4.yaml"
TARGET = 1e-3
VOCAB, SEQ, ROWS = 2048, 64, 32
UNKNOWN = 1  # the number of all rare words


def main(arguments: list[str] | None = None) -> None:
    """Train both, print the largest difference, write the files; exit code 1 if it is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cluster", default=str(HERE / "clusters" / "demo4.yaml"))
    parser.add_argument("--backend", default="eager", help="eager or inductor")
    parser.add_argument("--rounding", default="", choices=[*ROUNDINGS], help="of gradients")
    parser.add_argument("--png", type=Path, default=Path("curve.png"))
    parser.add_argument("--json", type=Path, default=Path("curve.json"))
    options = parser.parse_args(arguments)
    plan = planned(options.cluster, options.rounding)
    out = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=out, transient=True) as progress:
        names = "one device", f"{plan.world_size} ranks"
        tasks = [progress.add_task(name, total=options.steps) for name in names]
        alone = one_device(options.steps, lambda: progress.advance(tasks[0]))
        ours: list[float] = []

        def heard(rank: int, loss: float) -> None:
            ours.append(loss)
            progress.advance(tasks[1])

        spawn(train_rank, plan.world_size, on_report=heard,
              args=(plan.to_json(), options.steps, options.backend))  # fmt: skip
    differences = [abs(a - b) / abs(a) for a, b in zip(alone, ours, strict=True)]
    worst = max(differences)
    figures = {
        "steps": options.steps, "backend": options.backend, "shares": dict(plan.shares),
        "one_device": alone, "ranks": ours, "largest_relative_difference": worst,
    }  # fmt: skip
    options.json.write_text(json.dumps(figures))
    draw(alone, ours, differences, names[1], options.png)
    out.print(f"loss {alone[0]:.4f} -> {alone[-1]:.4f} on one device, {ours[-1]:.4f} on ranks")
    for axis, shares in plan.shares.items():
        out.print(f"  {axis}: {' '.join(map(str, shares))}")
    out.print(f"largest relative difference in {options.steps} steps: {worst:.1e}, at step "
              f"{differences.index(worst) + 1} (target {TARGET:.0e})")  # fmt: skip
    out.print(f"written to {options.png} and {options.json}")
    sys.exit(worst > TARGET)


def planned(cluster: str, rounding: str) -> hap.Plan:
    """Return a plan that rounds gradients as asked.

    Raises:
        SystemExit: it rounds none, because that is not faster on the cluster.
    """
    chosen = hap.PlanOptions(allow=(rounding,), all_devices=True) if rounding else hap.PlanOptions()
    plan = hap.plan(model(), next(batches()), cluster, optimizer=bert.optimizer, options=chosen)
    if plan.recipe.gradients != rounding:
        sys.exit(f"rounding is not faster on {cluster}; try --cluster {SLOW_LINKS}")
    return plan


def model() -> nn.Module:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    return bert.build(
        layers=4, hidden=128, heads=4, ffn=512, vocab=VOCAB, seq=SEQ, dropout=0.0
    ).train()  # fmt: skip


def batches() -> Iterator[dict[str, Tensor]]:
    """Yield random windows of the text, endlessly, the same ones in every process."""
    text = (HERE / "data" / "text.txt").read_text(encoding="utf-8").lower()
    words = re.findall(r"\w+|[^\w\s]", text)
    common = [word for word, _ in Counter(words).most_common(VOCAB - 2)]
    number = {word: k for k, word in enumerate(common, start=UNKNOWN + 1)}
    tokens = torch.tensor([number.get(word, UNKNOWN) for word in words])
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - SEQ, (ROWS, 1), generator=generator)
        hide = torch.rand(ROWS, SEQ, generator=generator) < 0.15
        yield bert.masked(tokens[starts + torch.arange(SEQ)], hide)


def one_device(steps: int, stepped: Any) -> list[float]:
    """Return the losses of the model in plain PyTorch."""
    module = model()
    optimizer = bert.optimizer(module.parameters())
    losses = []
    for batch in islice(batches(), steps):
        optimizer.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stepped()
    return losses


def train_rank(data: dict[str, Any], steps: int, backend: str) -> None:
    """Train one rank of the plan; the first one reports the global losses."""
    plan, rank = hap.Plan.from_json(data), dist.get_rank()
    module = hap.compile(model(), plan, backend=backend)
    optimizer = bert.optimizer(module.parameters())
    for batch in islice(batches(), steps):
        optimizer.zero_grad()
        loss = module(**plan.local_batch(batch, rank))
        loss.backward()
        optimizer.step()
        if rank == 0:
            report(loss.item())


def draw(
    alone: list[float], ours: list[float], differences: list[float], name: str, path: Path
) -> None:
    """Plot both curves, and their relative difference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = range(1, len(alone) + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(6.4, 4.8), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    top.plot(steps, alone, color="tab:gray", linewidth=3, label="one device")
    top.plot(steps, ours, color="tab:blue", linewidth=1, label=f"{name}, unlike")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.semilogy(steps, [max(d, 1e-9) for d in differences], color="tab:blue", linewidth=1)
    bottom.axhline(TARGET, color="tab:gray", linestyle="--", linewidth=1)
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
